"""Declare the records that follow the header of a run log, each as a msgspec struct, and convert measurements and
ceilings to records and back.

Reader, writer, ``mamf results check`` and the schema in the docs all use these declarations. A field with the default
UNSET may be missing from a log. Readers ignore fields that are not declared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct
from msgspec import UnsetType as Missing

from mamf.calibration import look_up_repeatability
from mamf.ceilings.ceiling import Ceiling
from mamf.errors import require_known_names
from mamf.measurement import (
    CHECKED_LAUNCHES_KEY,
    CHECKED_VALUES_KEY,
    DIFFERENT_BITS_KEY,
    ERROR_BOUND_KEY,
    LOST_NAN_KEY,
    MAX_PLAUSIBLE_OVERHEAD_SECONDS,
    Conditions,
    Measurement,
    MeasurementStatus,
    Rate,
)
from mamf.operations.unknown import get_operation
from mamf.plans import MATMUL, REGIME_NAMES
from mamf.statistics import (
    Interval,
    Repeatability,
    compute_repeat_interval,
    compute_standard_deviation,
    compute_standard_error,
    summarize_samples,
)

_RATE_STATISTICS = ("mean", "median", "fastest", "slowest")
#: Details of a measurement that mamf computes with, so they must be numbers.
_NUMERIC_DETAILS = {
    *(CHECKED_LAUNCHES_KEY, CHECKED_VALUES_KEY, ERROR_BOUND_KEY, DIFFERENT_BITS_KEY, LOST_NAN_KEY),
    *("reference_tflops", "held_bytes", "planning_us", "sparsity", "cosine_similarity", "relative_l1"),
    "quantization_error",
}
RecordT = TypeVar("RecordT")

# -- types of the fields of records ------------------------------------------------------------------------------------

#: A whole number that fits in 64 bits. JSON itself has no limit.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
#: A reading of a sensor, such as a clock in MHz; None if the sensor gave none. Whole numbers stay whole in the log.
SensorValue = Int64 | float | None
#: The value that one field of a shape or problem may have.
PlainValue = str | bool | Int64 | float | None
FieldValues = dict[str, PlainValue | list[PlainValue]]
# A duration between an attosecond and thirty years. Beyond these limits, rates and squares of samples would not fit in
# a float.
SampleSeconds = Annotated[float, Meta(gt=1e-18, lt=1e9)]
#: TrueClockMhz: a measured clock in megahertz, with a limit far above the clock of any device. CyclesUsed: the share of
#: the compute units' cycles that a kernel used; 1 means all cycles.
TrueClockMhz = Annotated[float, Meta(gt=0, lt=1e6)]
CyclesUsed = Annotated[float, Meta(gt=1e-9, lt=1e3)]
#: A sample in seconds that mamf rejected. It may be zero or negative, because the timer may have failed.
TimerReading = Annotated[float, Meta(gt=-1e9, lt=1e9)]
#: The rates ``mean``, ``median``, ``fastest`` and ``slowest``, and the ``interval`` of the reported rate as [low,
#: high].
LoggedRates = dict[str, float | list[float]]


class ToolRecord(Struct, kw_only=True):
    name: str
    version: str | None
    commit: str | Missing | None = UNSET


# -- records of rows and ceilings --------------------------------------------------------------------------------------


class MeasurementRecord(Struct, kw_only=True):
    operation: str
    shape: FieldValues
    flop: Int64 | float | Missing = UNSET
    bytes: Int64 | float | Missing = UNSET
    unit: str | Missing = UNSET
    kernel: str
    dtype: str | Missing = UNSET
    out_dtype: str | Missing = UNSET
    problem: FieldValues
    regime: str
    best_by: Annotated[str, Meta(pattern=f"^({'|'.join(_RATE_STATISTICS)})$")]
    status: MeasurementStatus
    reason: str
    tflops: LoggedRates | Missing = UNSET
    rate: LoggedRates | Missing = UNSET
    interval_coverage: float | Missing = UNSET
    seconds: dict[str, float] | Missing = UNSET
    launches: Int64
    timer_overhead_seconds: Annotated[float, Meta(ge=0, lt=1e9)]
    timer_accuracy_seconds: Annotated[float, Meta(ge=0, le=MAX_PLAUSIBLE_OVERHEAD_SECONDS)]
    samples_seconds: list[SampleSeconds]
    implausible_samples_seconds: list[TimerReading]
    relative_error: float | None
    clock_mhz: SensorValue
    watts: SensorValue
    celsius: SensorValue
    throttle_reasons: list[str]
    throttle_shares: dict[str, float] | Missing = UNSET
    true_clock_mhz: TrueClockMhz | Missing = UNSET
    cycles_used: CyclesUsed | Missing = UNSET
    remarks: list[str]
    is_reference: bool
    details: dict[str, str | int | float | None]
    peak_memory_bytes: Int64 | None
    peak_reserved_bytes: Int64 | Missing | None = UNSET
    repeatability: Repeatability | None
    phase: str
    round: Int64
    device: Int64 | Missing = UNSET
    time: str | Missing = UNSET


class CeilingRecord(Struct, kw_only=True):
    """A record of a confirmed ceiling. The ceiling of a matmul has ``tflops``; that of another operation has
    ``operation``, ``rate`` and ``unit``.
    """

    operation: str | Missing = UNSET
    regime: str
    problem: FieldValues
    shape: str
    kernel: str
    tflops: float | Missing = UNSET
    interval_tflops: tuple[float, float] | Missing = UNSET
    rate: float | Missing = UNSET
    interval: tuple[float, float] | Missing = UNSET
    unit: str | Missing = UNSET
    interval_coverage: float
    rounds: Int64
    tied: list[dict[str, str]]
    gain_over_default: float | None
    repeatability: Repeatability | None
    joules_per_tflop: float | Missing | None = UNSET
    clock_mhz: SensorValue
    watts: SensorValue
    celsius: SensorValue
    throttle_reasons: list[str]
    true_clock_mhz: TrueClockMhz | Missing = UNSET
    cycles_used: CyclesUsed | Missing = UNSET


# -- other records of a log --------------------------------------------------------------------------------------------


class KernelCounters(Struct, kw_only=True):
    """The hardware counters of one kernel on the device, as a profiler read them (mamf.profiling.counters)."""

    name: str
    grid: str
    block: str
    metrics: dict[str, float | None]


class CountersRecord(Struct, kw_only=True):
    operation: str
    shape: FieldValues
    problem: FieldValues
    kernel: str
    kernels: list[KernelCounters]
    cycles: list[float]
    reason: str
    time: str | Missing = UNSET


class SummaryRecord(Struct, kw_only=True):
    status: str
    reason: str
    measured: Int64
    measured_before_resume: Int64 | Missing = UNSET
    left: Int64 | Missing = UNSET
    elapsed_seconds: float
    best: dict[str, dict[str, Any]]
    ceilings: dict[str, dict[str, Any]] | Missing = UNSET
    phases: dict[str, Int64] | Missing = UNSET
    problems: Int64 | Missing = UNSET
    launches: Int64 | Missing = UNSET
    values: Int64 | Missing = UNSET
    wrong: Int64 | Missing = UNSET
    timer_overhead_after_seconds: float | Missing = UNSET
    shared_after: list[str] | Missing = UNSET
    findings: list[str] | Missing = UNSET
    time: str | Missing = UNSET


class KnownCeilingRecord(Struct, kw_only=True):
    """A record of a ceiling that the run did not measure itself. The report of the run compares rows with this ceiling.

    ``told``: a line for reports that says where the ceiling comes from. mamf converts the record to a
    mamf.measurement.Rate.
    """

    dtype: str
    regime: str
    tflops: Annotated[float, Meta(gt=0)]
    source: str
    told: str


class ResumeRecord(Struct, kw_only=True):
    tool: ToolRecord | Missing = UNSET
    command: str | Missing = UNSET
    started: str | Missing = UNSET
    findings: list[str] | Missing = UNSET
    notes: str | Missing = UNSET


#: Maps the name of each record, except the header, to the struct that declares it.
STRUCT_BY_RECORD: Mapping[str, type] = {
    "measurement": MeasurementRecord,
    "ceiling": CeilingRecord,
    "summary": SummaryRecord,
    "resume": ResumeRecord,
    "counters": CountersRecord,
    "known_ceiling": KnownCeilingRecord,
}


def read_record(record: object, record_type: type[RecordT], prefix: str = "") -> RecordT:
    """Convert the JSON values of a record to a struct or dataclass of the type ``record_type``.

    Raises a ValueError that names the first wrong field. ``prefix``: a text that the message puts before the name of
    this field.
    """
    try:
        return msgspec.convert(record, record_type)
    except msgspec.ValidationError as error:
        what, _, path = str(error).replace("Object missing required", "missing").partition(" - at `$.")
        where = f"field {prefix}{path.removesuffix('`')}: " if path or prefix else ""
        raise ValueError(where + what[0].lower() + what[1:]) from None


def make_json_values(record: Struct) -> dict[str, Any]:
    """Convert a record to JSON values by field name, without the fields that are UNSET."""
    return {
        name: asdict(value) if isinstance(value, Repeatability) else value
        for name in record.__struct_fields__
        if (value := getattr(record, name)) is not UNSET
    }


# -- converting rows and ceilings to records and back ------------------------------------------------------------------


def get_utc_time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _convert_count_for_log(count: int) -> int | float:
    """Return a count, converted to a float if it does not fit in a 64-bit integer."""
    return count if count < 2**63 else float(count)


def make_measurement_record(row: Measurement) -> dict[str, Any]:
    """Convert a measurement to the JSON values of its record.

    The record also has rates and ``seconds``, which follow from the samples and the work of one launch.
    """
    operation, work = get_operation(row.operation), row.work
    record = MeasurementRecord(
        operation=row.operation,
        shape=operation.make_shape_record(row.shape),
        flop=_convert_count_for_log(round(work.flop)),
        bytes=_convert_count_for_log(work.nbytes),
        unit=work.unit,
        kernel=row.kernel,
        dtype=row.problem.dtype,
        out_dtype=getattr(row.problem, "out_dtype", UNSET),
        problem=operation.make_problem_record(row.problem),
        regime=row.regime,
        best_by=row.ranking_statistic,
        status=row.status,
        reason=row.reason,
        launches=row.launch_count,
        timer_overhead_seconds=row.timer_overhead_seconds,
        timer_accuracy_seconds=row.timer_error_seconds,
        samples_seconds=list(row.samples),
        implausible_samples_seconds=list(row.implausible_samples),
        # JSON cannot store an error that is NaN or infinite. The row's ``reason`` describes the output in this case.
        relative_error=row.relative_error
        if row.relative_error is not None and math.isfinite(row.relative_error)
        else None,
        throttle_shares=dict(row.conditions.throttle_shares),
        remarks=list(row.remarks),
        is_reference=row.is_reference,
        details=dict(row.details),
        peak_memory_bytes=row.peak_memory_bytes,
        peak_reserved_bytes=row.peak_reserved_bytes,
        repeatability=row.repeatability,
        phase=row.phase,
        round=row.round_number,
        device=UNSET if row.device_index is None else row.device_index,
        time=get_utc_time(),
        **_make_conditions_fields(row.conditions),
    )
    if row.summary is not None:
        interval = row.rate_interval
        rates: LoggedRates = {
            **{name: round_to_six_digits(row.compute_rate(name)) for name in _RATE_STATISTICS},
            "interval": [round_to_six_digits(interval.low), round_to_six_digits(interval.high)],
        }
        if work.unit == "TFLOPS":
            record.tflops = rates
        else:
            record.rate = rates
        record.interval_coverage = round(interval.coverage, 4)
        record.seconds = {
            **{name: round(getattr(row.summary, name), 12) for name in _RATE_STATISTICS},
            "stdev": round(compute_standard_deviation(row.samples), 12),
        }
    return make_json_values(record)


def read_measurement_record(record: Mapping[str, Any]) -> Measurement:
    """Convert the JSON values of a record to a measurement.

    Raises KeyError or ValueError if the values are not a measurement.
    """
    read = read_record(record, MeasurementRecord)
    require_known_names(("regime", read.regime, REGIME_NAMES))
    if texts := [
        name for name in sorted(_NUMERIC_DETAILS & read.details.keys()) if isinstance(read.details[name], str)
    ]:
        raise ValueError(f"{texts[0]!r} in the field details must be a number")
    operation = get_operation(read.operation, record)
    problem, samples = operation.read_problem_record(read.problem), tuple(read.samples_seconds)
    return Measurement(
        shape=operation.read_shape_record(read.shape),
        kernel=read.kernel,
        problem=problem,
        regime=read.regime,
        ranking_statistic=read.best_by,
        status=read.status,
        reason=read.reason,
        summary=summarize_samples(samples, read.best_by) if read.status == "ok" else None,
        samples=samples,
        implausible_samples=tuple(read.implausible_samples_seconds),
        launch_count=read.launches,
        timer_overhead_seconds=read.timer_overhead_seconds,
        timer_error_seconds=read.timer_accuracy_seconds,
        relative_error=read.relative_error,
        conditions=_read_conditions(read, read.throttle_shares or {}),
        remarks=tuple(read.remarks),
        is_reference=read.is_reference,
        # JSON has null in place of NaN and infinity.
        details={name: value for name, value in read.details.items() if value is not None},
        peak_memory_bytes=read.peak_memory_bytes,
        peak_reserved_bytes=None if read.peak_reserved_bytes is UNSET else read.peak_reserved_bytes,
        repeatability=read.repeatability,
        phase=read.phase,
        round_number=read.round,
        device_index=None if read.device is UNSET else read.device,
    )


def round_to_six_digits(value: float) -> float:
    """Round a rate to six significant digits. A fixed number of decimals would be too coarse for slow devices, because
    a CPU may reach only a few thousandths of a TFLOPS.
    """
    return float(f"{value:.6g}")


def make_ceiling_record(ceiling: Ceiling) -> dict[str, Any]:
    """Convert a ceiling to the JSON values of its record.

    A reader can also compute these values from the repeated measurements that confirmed the ceiling. They have the
    phase ``confirm`` and are earlier in the log.
    """
    operation, rate = get_operation(ceiling.problem.operation), round_to_six_digits(ceiling.rate)
    interval = [round_to_six_digits(ceiling.interval.low), round_to_six_digits(ceiling.interval.high)]
    rate_fields: dict[str, Any] = {
        "operation": operation.name,
        "rate": rate,
        "interval": interval,
        "unit": ceiling.unit,
    }
    if operation.sets_compute_ceiling:
        joules = ceiling.joules_per_tflop and round(ceiling.joules_per_tflop, 4)
        rate_fields = {"tflops": rate, "interval_tflops": interval, "joules_per_tflop": joules}
    return make_json_values(
        CeilingRecord(
            regime=ceiling.regime,
            problem=operation.make_problem_record(ceiling.problem),
            shape=str(ceiling.shape),
            kernel=ceiling.kernel,
            interval_coverage=round(ceiling.interval.coverage, 4),
            rounds=ceiling.round_count,
            tied=[{"shape": str(shape), "kernel": kernel} for shape, kernel in ceiling.tied_candidates],
            gain_over_default=None if ceiling.gain_over_default is None else round(ceiling.gain_over_default, 4),
            repeatability=ceiling.repeatability,
            **rate_fields,
            **_make_conditions_fields(ceiling.conditions),
        )
    )


def read_ceiling_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Ceiling:
    """Convert the JSON values of a record to a ceiling of the device in the header.

    Old versions of mamf recorded no calibration, and an interval of the rounds only. The result then has the current
    calibration and a repeat interval.

    Raises KeyError or ValueError if the values are not a ceiling, and UsageError for an invalid shape.
    """
    read = read_record(record, CeilingRecord)
    operation = get_operation(read.operation or MATMUL, record)
    names = ("rate", "interval") if read.operation else ("tflops", "interval_tflops")
    rate, interval = (getattr(read, name) for name in names)
    if rate is UNSET or interval is UNSET:
        raise ValueError(f"missing field `{names[rate is not UNSET]}`")
    ceiling = Ceiling(
        device=header["device"]["name"],
        uuid_hash=header["device"]["uuid_hash"],
        problem=operation.read_problem_record(read.problem),
        regime=read.regime,
        kernel=read.kernel,
        shape=operation.parse_shape(read.shape),
        rate=rate,
        interval=Interval(interval[0], interval[1], read.interval_coverage),
        round_count=read.rounds,
        tied_candidates=tuple((operation.parse_shape(each["shape"]), each["kernel"]) for each in read.tied),
        conditions=_read_conditions(read),
        gain_over_default=read.gain_over_default,
        repeatability=read.repeatability,
    )
    return _add_repeat_interval(ceiling) if ceiling.repeatability is None else ceiling


def _add_repeat_interval(ceiling: Ceiling) -> Ceiling:
    """Widen the interval of a ceiling, which contains only the scatter of its rounds, by the differences of runs."""
    seconds, error = ceiling.seconds, compute_standard_error(ceiling.interval, ceiling.rate)
    calibration = look_up_repeatability("", ceiling.regime, ceiling.problem)
    rounds = [seconds * (1 - error), seconds * (1 + error)]  # two rounds whose mean has this standard error
    interval = compute_repeat_interval(rounds, seconds, [0.0], calibration, ceiling.conditions.celsius)
    return replace(ceiling, interval=interval.invert(ceiling.rate * seconds), repeatability=calibration)


def make_known_ceiling_record(rate: Rate) -> dict[str, Any]:
    """Return the JSON values of the record of a known ceiling, which the run did not measure."""
    return {
        "dtype": rate.dtype,
        "regime": rate.regime,
        "tflops": rate.tflops,
        "source": rate.source,
        "told": rate.description,
    }


def read_known_ceiling_record(record: Mapping[str, Any], device: str = "") -> Rate:
    """Read a known ceiling, which the run did not measure, from the JSON values of its record.

    Raises ValueError if the values are not a ceiling.
    """
    read = read_record(record, KnownCeilingRecord)
    origin: dict[str, Any] = {"source": read.source, "description": read.told}
    return Rate(rate=read.tflops, dtype=read.dtype, regime=read.regime, device=device, **origin)


def _make_conditions_fields(conditions: Conditions) -> dict[str, Any]:
    return {
        # The median of two clocks may end in half a hertz. Round to whole hertz, like the code that reads the log.
        "clock_mhz": None if conditions.clock_hz is None else round(conditions.clock_hz) / 1e6,
        "watts": conditions.watts,
        "celsius": conditions.celsius,
        "throttle_reasons": list(conditions.throttle_reasons),
        "true_clock_mhz": UNSET if conditions.true_clock_hz is None else round(conditions.true_clock_hz) / 1e6,
        "cycles_used": UNSET
        if conditions.used_cycle_share is None
        else round_to_six_digits(conditions.used_cycle_share),
    }


def _read_conditions(
    record: MeasurementRecord | CeilingRecord, throttle_shares: Mapping[str, float] = {}
) -> Conditions:
    return Conditions(
        clock_hz=None if record.clock_mhz is None else float(round(record.clock_mhz * 1e6)),
        watts=record.watts,
        celsius=record.celsius,
        throttle_reasons=tuple(record.throttle_reasons),
        throttle_shares=throttle_shares,
        true_clock_hz=None if record.true_clock_mhz is UNSET else float(round(record.true_clock_mhz * 1e6)),
        used_cycle_share=None if record.cycles_used is UNSET else record.cycles_used,
    )
