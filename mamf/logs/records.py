"""Converts measurements and ceilings to and from the JSON values in run logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from mamf.calibration import ANEW, find_calibration
from mamf.ceilings.ceiling import Ceiling
from mamf.measurement import STATUSES, Conditions, Measurement
from mamf.operations.unknown import operation_called
from mamf.plans import MATMUL
from mamf.rate import Rate
from mamf.regime_names import require_regime
from mamf.statistics import Interval, Repeatability, standard_deviation, summarize
from mamf.timers import LEAST_ACCURACY_SECONDS, MOST_OVERHEAD_SECONDS

# An attosecond and thirty years: beyond them rates, or squares of samples, leave what a float holds.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-18, 1e9
_OLD_ANEW_DEGREES = 6
_STATISTICS = ("mean", "median", "fastest", "slowest")


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def measurement_record(row: Measurement) -> dict[str, Any]:
    """A measurement as JSON values. Rates and ``seconds`` follow from ``samples_seconds`` and the work."""
    of, work = operation_called(row.operation), row.work
    record: dict[str, Any] = {
        "operation": row.operation,
        "shape": of.shape_record(row.shape),
        "flop": round(work.flop),
        "bytes": work.nbytes,
        "unit": work.unit,
        "kernel": row.kernel,
        "dtype": row.problem.dtype,
        **({"out_dtype": row.problem.out_dtype} if hasattr(row.problem, "out_dtype") else {}),
        "problem": of.problem_record(row.problem),
        "regime": row.regime,
        "best_by": row.best_by,
        "status": row.status,
        "reason": row.reason,
    }
    if row.summary is not None:
        interval = row.rate_interval
        rates: dict[str, Any] = {name: significant_digits(row.rate(name)) for name in _STATISTICS}
        low, high = significant_digits(interval.low), significant_digits(interval.high)
        record["tflops" if work.unit == "TFLOPS" else "rate"] = {**rates, "interval": [low, high]}
        record["interval_coverage"] = round(interval.coverage, 4)
        seconds = {name: getattr(row.summary, name) for name in _STATISTICS} | {
            "stdev": standard_deviation(row.samples)
        }
        record["seconds"] = {name: round(value, 12) for name, value in seconds.items()}
    record |= {
        "launches": row.launches,
        "timer_overhead_seconds": row.timer_overhead,
        "timer_accuracy_seconds": row.timer_accuracy,
        "samples_seconds": list(row.samples),
        "implausible_samples_seconds": list(row.implausible_samples),
        # An output with NaN in it has no error to speak of; the reason says so.
        "relative_error": row.error if row.error is not None and math.isfinite(row.error) else None,
        **conditions_record(row.conditions),
        "throttle_shares": dict(row.conditions.throttle_shares),
        "remarks": list(row.remarks),
        "is_reference": row.is_reference,
        "details": dict(row.details),
        "peak_memory_bytes": row.peak_memory_bytes,
        "peak_reserved_bytes": row.peak_reserved_bytes,
        "repeatability": repeatability_record(row.repeatability),
        "phase": row.phase,
        "round": row.round,
        **({} if row.device is None else {"device": row.device}),
        "time": utc_now(),
    }
    return record


def measurement_from_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Measurement:
    """Raises KeyError or ValueError for a record that cannot be a measurement of this run."""
    if record["status"] not in STATUSES:
        raise ValueError(f"unknown status {record['status']!r}")
    require_regime(record["regime"])
    of = operation_called(record["operation"], record)
    shape, problem = of.shape_from_record(record["shape"]), of.problem_from_record(record["problem"])
    if record["best_by"] not in _STATISTICS:
        raise ValueError(f"unknown statistic {record['best_by']!r}")
    samples, aside = tuple(map(float, record["samples_seconds"])), tuple(record["implausible_samples_seconds"])
    if not all(_SHORTEST_SECONDS < sample < _LONGEST_SECONDS for sample in samples):
        raise ValueError("a sample is not a positive number of seconds that a launch can take")
    # Implausible samples may be 0 or negative: a timer that missed a launch reads that.
    if not all(abs(sample) < _LONGEST_SECONDS for sample in aside):
        raise ValueError("a sample that was set aside is no number of seconds that a timer reads")
    error, overhead = record["relative_error"], record["timer_overhead_seconds"]
    # Early logs of schema 5 name a better accuracy than the timer has.
    accuracy = record["timer_accuracy_seconds"] and max(record["timer_accuracy_seconds"], LEAST_ACCURACY_SECONDS)
    if not (0 <= overhead < _LONGEST_SECONDS and 0 <= accuracy <= MOST_OVERHEAD_SECONDS):
        raise ValueError(f"a timer that adds {overhead:g} s, accurate to {accuracy:g} s")
    return Measurement(
        shape=shape,
        kernel=record["kernel"],
        problem=problem,
        regime=record["regime"],
        best_by=record["best_by"],
        status=record["status"],
        reason=record["reason"],
        summary=summarize(samples, record["best_by"]) if record["status"] == "ok" else None,
        samples=samples,
        implausible_samples=aside,
        launches=record["launches"],
        timer_overhead=overhead,
        timer_accuracy=accuracy,
        error=None if error is None else float(error),
        conditions=conditions_from_record(record),
        remarks=tuple(record["remarks"]),
        is_reference=record["is_reference"],
        details=record["details"],
        peak_memory_bytes=record["peak_memory_bytes"],
        peak_reserved_bytes=record.get("peak_reserved_bytes"),
        repeatability=_repeatability_from_record(record, header, problem),
        phase=record["phase"],
        round=record["round"],
        device=record.get("device"),
    )


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record without nesting: ``shape.m``, ``tflops.median``."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def significant_digits(value: float) -> float:
    """Six of them: a CPU's TFLOPS begin behind the point."""
    return float(f"{value:.6g}")


def as_logged(ceiling: Ceiling) -> Ceiling:
    """A ceiling with the digits that its log holds, so that a run and its log print the same."""
    low, high = map(significant_digits, (ceiling.interval.low, ceiling.interval.high))
    interval = Interval(low, high, round(ceiling.interval.coverage, 4))
    return replace(ceiling, rate=significant_digits(ceiling.rate), interval=interval)


def ceiling_record(ceiling: Ceiling) -> dict[str, Any]:
    """A ceiling as JSON values. It follows from the measurements of phase ``confirm`` before it."""
    of, logged = operation_called(ceiling.problem.operation), as_logged(ceiling)
    interval = [logged.interval.low, logged.interval.high]
    if is_matmul := of.name == MATMUL:
        rates = {"tflops": logged.rate, "interval_tflops": interval}
    else:
        rates = {"rate": logged.rate, "interval": interval, "unit": ceiling.unit}
    joules = {"joules_per_tflop": ceiling.joules_per_tflop and round(ceiling.joules_per_tflop, 4)}
    return {
        **({} if is_matmul else {"operation": of.name}),
        "regime": ceiling.regime,
        "problem": of.problem_record(ceiling.problem),
        "shape": str(ceiling.shape),
        "kernel": ceiling.kernel,
        **rates,
        "interval_coverage": logged.interval.coverage,
        "rounds": ceiling.rounds,
        "tied": [{"shape": str(shape), "kernel": kernel} for shape, kernel in ceiling.tied],
        "gain_over_default": None if ceiling.gain_over_default is None else round(ceiling.gain_over_default, 4),
        "repeatability": repeatability_record(ceiling.repeatability),
        **(joules if is_matmul else {}),
        **conditions_record(ceiling.conditions),
    }


def ceiling_from_record(record: Mapping[str, Any], header: Mapping[str, Any]) -> Ceiling:
    """Raises KeyError or ValueError for a record that cannot be a ceiling; UsageError for an invalid shape."""
    is_matmul = "operation" not in record
    of = operation_called(record.get("operation", MATMUL), record)
    low, high = map(float, record["interval_tflops" if is_matmul else "interval"])
    problem = of.problem_from_record(record["problem"])
    return Ceiling(
        device=header["device"]["name"],
        uuid_hash=header["device"]["uuid_hash"],
        problem=problem,
        regime=record["regime"],
        kernel=record["kernel"],
        shape=of.parse_shape(record["shape"]),
        rate=float(record["tflops" if is_matmul else "rate"]),
        interval=Interval(low, high, record["interval_coverage"]),
        rounds=record["rounds"],
        tied=tuple((of.parse_shape(each["shape"]), each["kernel"]) for each in record["tied"]),
        conditions=conditions_from_record(record),
        gain_over_default=record["gain_over_default"],
        repeatability=_repeatability_from_record(record, header, problem),
    )


def known_ceiling_record(rate: Rate) -> dict[str, Any]:
    """A ceiling that the run did not measure as JSON values."""
    values = {"tflops": rate.tflops, "source": rate.source, "told": rate.description}
    return {"dtype": rate.dtype, "regime": rate.regime, **values}


def known_ceiling_from_record(record: Mapping[str, Any], device: str = "") -> Rate:
    """Raises ValueError for a rate that is not positive."""
    if not record["tflops"] > 0:
        raise ValueError(f"a known ceiling of {record['tflops']} TFLOPS")
    origin = {"source": record["source"], "description": record["told"]}
    return Rate(rate=record["tflops"], dtype=record["dtype"], regime=record["regime"], device=device, **origin)


def repeatability_record(known: Repeatability | None) -> dict[str, Any] | None:
    """A repeatability as JSON values."""
    return None if known is None else dict(vars(known))


def is_of_old_calibration(record: Mapping[str, Any]) -> bool:
    """Whether a row or a ceiling holds a calibration of another form, which readers replace by today's."""
    return record["repeatability"] is not None and "per_degree" not in record["repeatability"]


def _repeatability_from_record(
    record: Mapping[str, Any], header: Mapping[str, Any], problem: Any
) -> Repeatability | None:
    """As the record holds it, or today's instead of an old calibration. None in a row without a figure, and in
    converted logs, whose intervals are of the visit or the rounds alone.
    """
    stored = record["repeatability"]
    if stored is None or not is_of_old_calibration(record):
        return None if stored is None else Repeatability(**stored)
    # What marked visits that start anew: first the flag alone, then the degrees of freedom too.
    is_anew = stored.get("is_whole") and ("launch_seconds" not in stored or stored["degrees"] == _OLD_ANEW_DEGREES)
    return find_calibration(header["device"]["backend"], ANEW if is_anew else record["regime"], problem)


def conditions_record(conditions: Conditions) -> dict[str, Any]:
    return {
        # In whole hertz, as it is read: a median of two may have half of one.
        "clock_mhz": None if conditions.clock_hz is None else round(conditions.clock_hz) / 1e6,
        "watts": conditions.watts,
        "celsius": conditions.celsius,
        "throttle_reasons": list(conditions.throttle_reasons),
    }


def conditions_from_record(record: Mapping[str, Any]) -> Conditions:
    clock_mhz = record["clock_mhz"]
    return Conditions(
        clock_hz=None if clock_mhz is None else float(round(clock_mhz * 1e6)),
        watts=record["watts"],
        celsius=record["celsius"],
        throttle_reasons=tuple(record["throttle_reasons"]),
        throttle_shares=record.get("throttle_shares", {}),
    )
