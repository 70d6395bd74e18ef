"""Define a row of a log (``Measurement``: one kernel on one shape in one regime) and the rate of a device (``Rate``),
and subtract the time that a backend's device timer adds to each launch.

The time that the timer adds was measured by comparison with the vendor's profiler (timers.csv). This *overhead* is
estimated in each process and subtracted from each launch. The overhead varies between processes, and the repeat
interval (the 95 % interval for the result of one more run) includes this variation. The timer's *accuracy* is the error
that remains after the subtraction, because the overhead depends on the kernel: 1.0 us or 0.5 % on NVIDIA, whichever is
larger. All repeated runs share this error, so repeat intervals do not include it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from mamf.dtypes import DTYPES
from mamf.errors import CRASH_REASON, LOST_DEVICE_REASON, REPEATED_CRASH_REASON, PeakSource
from mamf.files import read_packaged_csv_rows
from mamf.kernel import Work
from mamf.plans import RowKey
from mamf.statistics import (
    Interval,
    Repeatability,
    SampleSummary,
    compute_repeat_interval,
    compute_standard_error,
    widen_interval,
)

#: The smallest error that mamf assumes for a launch time, as a share of the time. Long launches have this error too,
#: because the timer's overhead is not the only cause of errors.
_MIN_RELATIVE_TIMING_ERROR = 0.005
#: The largest plausible overhead, in seconds, of a timer that has not been compared with a profiler.
MAX_PLAUSIBLE_OVERHEAD_SECONDS = 20e-6
#: The largest acceptable difference, in seconds, between the timer overhead measured after a run and the overhead that
#: mamf subtracted during the run.
MAX_OVERHEAD_SHIFT_SECONDS = 0.5e-6
#: Reports print the timer's accuracy, which is 1 us or more, only for launches that are shorter than this. For longer
#: launches, 1 us is less than 1 % of the time.
MAX_SHORT_LAUNCH_SECONDS = 100e-6


class TimerCalibration(NamedTuple):
    """The overhead and the error of a backend's device timer, in seconds (a row of timers.csv).

    - ``min_overhead_seconds``, ``typical_overhead_seconds``, ``max_overhead_seconds``: the time that the timer adds to
      a launch.
    - ``error_seconds``: the error of a launch time after mamf has subtracted the timer's overhead.
    """

    min_overhead_seconds: float
    typical_overhead_seconds: float
    max_overhead_seconds: float
    error_seconds: float


class TimerOverhead(NamedTuple):
    """The timer overhead that mamf subtracts from the time of each launch.

    ``remark``: for the log, why mamf does not use the overhead that the backend estimated; empty if mamf uses it.
    """

    seconds: float
    remark: str = ""


@functools.cache
def find_timer_calibration(backend: str) -> TimerCalibration | None:
    """Return the overhead and the error of a backend's device timer, or None if the timer was never compared with a
    profiler.
    """
    rows = (row for row in read_packaged_csv_rows("timers.csv") if row["backend"] == backend)
    columns = ("lowest_us", "typical_us", "highest_us", "accuracy_us")
    return next((TimerCalibration(*(float(row[column]) * 1e-6 for column in columns)) for row in rows), None)


def is_plausible_overhead(backend: str, overhead_seconds: float) -> bool:
    """Return whether ``overhead_seconds`` per launch are plausible for a backend's device timer."""
    timer = find_timer_calibration(backend)
    low, high = (
        (timer.min_overhead_seconds, timer.max_overhead_seconds) if timer else (0.0, MAX_PLAUSIBLE_OVERHEAD_SECONDS)
    )
    return low <= overhead_seconds <= high


def choose_timer_overhead(backend: str, estimated_seconds: float | None) -> TimerOverhead:
    """Choose the timer overhead to subtract from each launch, rounded to the nanosecond like logged samples.

    This is ``estimated_seconds``, the estimate of the backend, if it is plausible. Otherwise it is the typical overhead
    of the backend's timer. It is 0 if there is no estimate, or if the typical overhead is unknown.
    """
    timer = find_timer_calibration(backend)
    # If the timer was never compared with a profiler, treat a slightly negative estimate as 0, because it is noise.
    if estimated_seconds is None or (timer is None and -MAX_OVERHEAD_SHIFT_SECONDS < estimated_seconds < 0):
        return TimerOverhead(0.0)
    if is_plausible_overhead(backend, estimated_seconds):
        return TimerOverhead(round(estimated_seconds, 9))
    assumed_seconds = round(timer.typical_overhead_seconds, 9) if timer else 0.0
    return TimerOverhead(
        assumed_seconds,
        f"mamf assumed a timer overhead of {assumed_seconds * 1e6:.1f} us, because the estimate of "
        f"{estimated_seconds * 1e6:.1f} us is implausible",
    )


def compute_relative_timing_error(error_seconds: float, seconds: float) -> float:
    """Return the timing error of a launch that takes ``seconds``, as a share of that time.

    ``error_seconds``: the error of the timer in seconds, or 0 if the error is unknown. The result is then 0 too.
    """
    return max(error_seconds / seconds, _MIN_RELATIVE_TIMING_ERROR) if error_seconds else 0.0


def subtract_timer_overhead(event_seconds: float, overhead_seconds: float) -> float:
    """Return the seconds of a launch: the time between the events around the launch, minus the timer's overhead. The
    result is at least half of ``event_seconds``, because a smaller difference would be too inaccurate.
    """
    return max(event_seconds - overhead_seconds, event_seconds / 2)


KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


class NotebookTable:
    """An object that a notebook shows as an HTML table. ``render`` makes the table. ``mamf/__init__.py`` sets
    ``render``, because this module cannot import the report modules, which import this module.
    """

    render: Callable[[NotebookTable], str]

    def _repr_html_(self) -> str:
        return type(self).render(self)


MeasurementStatus = Literal["ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed"]
#: FLOP/s in one TFLOPS, and bytes/s in one TB/s.
TERA = 1e12
#: Keys of ``Measurement.details``. WRONG_TILES_KEY: where the output is wrong. CHECKED_LAUNCHES_KEY: the number of
#: launches whose output was verified. CHECKED_VALUES_KEY: the number of verified output values. ERROR_BOUND_KEY: the
#: largest allowed error.
WRONG_TILES_KEY, CHECKED_LAUNCHES_KEY, CHECKED_VALUES_KEY, ERROR_BOUND_KEY = (
    "wrong tiles",
    "checked launches",
    "checked values",
    "bound",
)
#: Keys of ``Measurement.details``. DIFFERENT_BITS_KEY: the number of launches whose output is not bitwise equal to the
#: output of the first launch; only for kernels whose output may differ between launches. LOST_NAN_KEY: the number of
#: output values that should be NaN, because an operand is NaN, but are finite.
DIFFERENT_BITS_KEY, LOST_NAN_KEY = "other bits", "lost NaN"
#: The label of idle time, when the device runs no kernel, in a breakdown of a launch's time.
IDLE_LABEL = "idle"


def group_pairs(pairs: Iterable[tuple[KeyT, ItemT]]) -> dict[KeyT, list[ItemT]]:
    """Group the second items of ``pairs`` by their first items. Keys and items keep the order of ``pairs``."""
    items_by_key: dict[KeyT, list[ItemT]] = {}
    for key, item in pairs:
        items_by_key.setdefault(key, []).append(item)
    return items_by_key


@dataclass(frozen=True)
class Conditions:
    """The clock, power and temperature of a device while mamf took samples. None: the value could not be read.

    - ``clock_hz``: the clock that the driver reports. It is the requested clock, which may differ from
      ``true_clock_hz``.
    - ``watts``, ``celsius``: the power draw and the temperature.
    - ``throttle_reasons``: the reasons that the driver gave for lowering the clock.
    - ``throttle_shares``: the share of sensor readings with each throttle reason; only for single measurements.
    - ``true_clock_hz``: the mean clock of the compute units during launches. A kernel on the device measures it with a
      clock counter.
    - ``used_cycle_share``: the measured rate, as a share of the rate that the compute units would reach if they worked
      in every cycle at ``true_clock_hz`` (mamf.plausibility).
    """

    clock_hz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    throttle_shares: Mapping[str, float] = field(default_factory=dict)
    true_clock_hz: float | None = None
    used_cycle_share: float | None = None


@dataclass(frozen=True)
class Measurement(NotebookTable):
    """A row of a log: the measurement of one kernel on one shape in one regime. The operation defines the types of
    ``shape`` (the sizes, such as M, N and K) and ``problem`` (dtypes, data and options).

    - ``ranking_statistic``: the statistic of the samples by which mamf ranks rows of this regime: ``median``, ``mean``
      or ``fastest``.
    - ``status``, ``reason``: whether the kernel was measured (``ok``) and, if it was not, why.
    - ``samples``: seconds per launch, after subtraction of ``timer_overhead_seconds``. A sample is one launch or, in
      the sustained regime, the mean of a block of launches. ``implausible_samples``: samples that are faster than the
      device can be.
    - ``relative_error``: the largest relative error of the verified outputs.
    - ``is_reference``: True if the row was measured only to compare the run's other rows with it: a reference shape, or
      the matmul of the device's ceiling.
    - ``phase``: the stage of a search or of repeated measurements, such as ``confirm``; otherwise empty.
      ``round_number``: the number of the repetition in this stage; 0 if the stage has no repetitions.
    - ``details``: further findings of the kernel or the regime, by name.
    - ``peak_memory_bytes``: the memory that a launch needs for operands, saved tensors and allocations (attention and
      models only). ``peak_reserved_bytes``: memory that the process has reserved on the device, including unused blocks
      of its allocator (models only).
    - ``repeatability``: how much the results of repeated runs differ; None if this is unknown, as in converted logs.
    - ``device_index``: the index of the device that measured the row, if several devices share the run.
      ``device_speed``: the speed of that device relative to the run's first device, from a shape that both measured;
      None if unknown (mamf.logs.run_log). ``device_speed_half_width``: half the width of the interval of
      ``device_speed``, as a share of ``device_speed``.
    - ``timer_error_seconds``: the timing error of a short launch, which all repeated runs share; 0 if unknown.
    """

    shape: Any
    kernel: str
    problem: Any
    regime: str
    ranking_statistic: str
    status: MeasurementStatus
    reason: str = ""
    summary: SampleSummary | None = None
    samples: tuple[float, ...] = ()
    implausible_samples: tuple[float, ...] = ()
    launch_count: int = 0
    timer_overhead_seconds: float = 0.0
    relative_error: float | None = None
    conditions: Conditions = field(default_factory=Conditions)
    remarks: tuple[str, ...] = ()
    is_reference: bool = False
    phase: str = ""
    round_number: int = 0
    details: Mapping[str, float | str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    repeatability: Repeatability | None = None
    device_index: int | None = None
    device_speed: float | None = 1.0
    device_speed_half_width: float = 0.0
    timer_error_seconds: float = 0.0

    def __repr__(self) -> str:
        figure = f"{self.status}, {self.reason}" if self.summary is None else f"{self.best_rate:.4g} {self.work.unit}"
        return f"Measurement({self.operation} {self.shape} by {self.kernel}, {self.regime}: {figure})"

    @property
    def operation(self) -> str:
        """The name of the operation that was measured, such as ``matmul``."""
        return str(self.problem.operation)

    @cached_property
    def work(self) -> Work:
        """The FLOP and the bytes that one launch of this shape needs."""
        work: Work = self.problem.compute_work(self.shape)
        return work

    @property
    def flop(self) -> float:
        """The FLOP that one launch of this shape needs."""
        return float(self.work.flop)

    @property
    def work_amount(self) -> float:
        """The FLOP or the bytes of one launch, whichever the operation's rate counts."""
        return self.work.amount

    @property
    def key(self) -> RowKey:
        """The key of this row: its regime, problem and shape, and the name of its kernel. Rows that repeat a
        measurement have the same key.
        """
        return RowKey(self.regime, self.problem, self.shape, self.kernel)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_fatal(self) -> bool:
        """Whether a launch of this row ended the process or made the device unusable."""
        return self.status == "failed" and self.reason.startswith(
            (CRASH_REASON, LOST_DEVICE_REASON, REPEATED_CRASH_REASON)
        )

    def compute_rate(self, statistic: str) -> float:
        """Return the rate in TFLOPS (1e12 FLOP/s), or in TB/s if the operation counts bytes, from the mean, median,
        fastest or slowest sample, whichever ``statistic`` names. Raises ValueError if the row has no samples.
        """
        return self.work_amount / float(getattr(self._get_summary(), statistic)) / TERA

    @property
    def best_rate(self) -> float:
        """The rate in TFLOPS or TB/s from the statistic (``ranking_statistic``) that ranks rows of this regime."""
        return self.compute_rate(self.ranking_statistic)

    @property
    def tflops(self) -> float:
        """The rate in TFLOPS that ranks this row (``best_rate``). Only for operations that count FLOP."""
        return self.best_rate

    @property
    def comparable_rate(self) -> float:
        """The rate that ranks this row among rows of several devices: ``best_rate`` divided by the speed of the row's
        device relative to the run's first device, if that is known.
        """
        return self.best_rate / (self.device_speed or 1.0)

    @property
    def comparable_seconds(self) -> float:
        """The seconds per launch, multiplied by the speed of the row's device relative to the run's first device."""
        return self.seconds * (self.device_speed or 1.0)

    @property
    def comparable_interval(self) -> Interval:
        """The 95 % interval of ``comparable_seconds``: the row's interval, widened by the uncertainty of the speed of
        its device relative to the run's first device.
        """
        return widen_interval(
            self.interval.scale(self.device_speed or 1.0), self.comparable_seconds, self.device_speed_half_width
        )

    @property
    def rate_sort_key(self) -> tuple[bool, float]:
        """The key to sort rows by rate: the fastest row has the highest key. Rows of a device whose speed relative to
        the run's first device is unknown rank lowest.
        """
        return self.device_speed is not None, self.comparable_rate

    @cached_property
    def stdev(self) -> float:
        """The standard deviation of the samples, in seconds per launch; 0 for a single sample."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def statistic(self) -> str:
        """The name of the statistic that ``seconds`` and ``interval`` describe: ``mean`` in regimes that rank rows by
        the mean (total work divided by total time), else ``median``.
        """
        return "mean" if self.ranking_statistic == "mean" else "median"

    @property
    def seconds(self) -> float:
        """The mean or median seconds per launch, whichever ``statistic`` names."""
        return float(getattr(self._get_summary(), self.statistic))

    @cached_property
    def interval(self) -> Interval:
        """The 95 % interval, in seconds per launch, of the result of one more run (``compute_repeat_interval``). If
        ``repeatability`` is unknown, as in converted logs, the interval includes only the scatter of the samples.
        Raises ValueError for a row without samples.
        """
        if self.repeatability is None:
            return self._get_summary().interval
        seconds, celsius = self.seconds, self.conditions.celsius
        return compute_repeat_interval([seconds], seconds, [self.relative_standard_error], self.repeatability, celsius)

    @property
    def relative_standard_error(self) -> float:
        """The standard error of ``seconds`` as a share of ``seconds``, estimated from the row's samples."""
        return compute_standard_error(self._get_summary().interval, self.seconds)

    @property
    def rate_interval(self) -> Interval:
        """The 95 % interval of the rate of one more run, in TFLOPS or TB/s."""
        return self.interval.invert(self.work_amount / TERA)

    @property
    def relative_timing_error(self) -> float:
        """The timing error of this row as a share of ``seconds``; 0 if unknown.

        ``interval`` does not include this error, because the error is the same in all repeated runs. Include it when
        you compare the row with another instrument, or with launches of another length.
        """
        return compute_relative_timing_error(self.timer_error_seconds, self.seconds)

    @property
    def relative_half_width(self) -> float:
        """Half the width of the row's 95 % interval, as a share of its seconds per launch."""
        return self.interval.half_width / self.seconds

    def _get_summary(self) -> SampleSummary:
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured, because its status is {self.status}: check row.ok first")
        return self.summary


#: The source of a rate: ``measured`` on this device, ``contributed`` by a user who measured the same model of device,
#: ``published`` by other people, listed in a ``datasheet``, or ``given`` on the command line.
RateSource = Literal[PeakSource, "given"]
#: The values of ``Rate.tier`` for published rates and for rates from a datasheet.
PUBLISHED_TIER, DATASHEET_TIER = "published, not checked", "datasheet"
_FAST_ACCUMULATION_LABEL = "fast accumulation"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The FLOP or bytes per second that a device reaches, and the source of that figure.

    - ``rate``: the rate in ``unit``, which is TFLOPS (1e12 FLOP/s, or 1e12 operations/s for int8) or TB/s.
    - ``interval``: the 95 % repeat interval of ``rate``, in ``unit``; None for a datasheet or a published figure.
    - ``dtype``: the dtype as ``make_dtype_label`` formats it, including an unusual output dtype.
    - ``regime``: ``burst`` or ``sustained``; None for a datasheet or a published figure.
    - ``device``, ``uuid_hash``: the name of the device, and the hashed identifier of the card if known.
    - ``source``: ``measured``, ``contributed``, ``published``, ``datasheet`` or ``given``. ``reference``: the log,
      address or datasheet that gives the figure. ``description``: source and reference in one line.
    - ``tier``: for a log in results/, how complete its evidence is; for other sources ``published, not checked`` or
      ``datasheet``.
    - ``date``: the date (UTC) on which the rate was measured; empty if unknown.
    """

    rate: float
    dtype: str
    device: str
    source: RateSource
    regime: str | None = None
    interval: Interval | None = None
    unit: str = "TFLOPS"
    uuid_hash: str | None = None
    description: str = ""
    tier: str = "complete"
    reference: str = ""
    date: str = ""

    @property
    def tflops(self) -> float:
        """The rate in TFLOPS. Only valid for an operation that counts FLOP."""
        return self.rate

    @property
    def flops(self) -> float:
        """The rate in FLOP (or bytes) per second."""
        return self.rate * TERA


RateT = TypeVar("RateT", bound=Rate)
#: The rates of a device, by dtype (as ``make_dtype_label`` formats it) and regime.
RatesByDtypeAndRegime = Mapping[tuple[str, str], Rate]


def find_rate(rates: Mapping[tuple[str, str], RateT], dtype: str, regime: str) -> RateT | None:
    """Return the rate of a dtype in a regime, or None if ``rates`` has none. Prefer a rate without fast accumulation
    (sums with fewer bits). Ignore rates with an unusual output dtype.
    """
    return rates.get((dtype, regime)) or rates.get((f"{dtype}, {_FAST_ACCUMULATION_LABEL}", regime))


def make_dtype_label(problem: Any) -> str:
    """Return the label of a problem's dtype, by which mamf looks up rates. For a matmul, the label includes an unusual
    output dtype and fast accumulation, because both change the ceiling (the highest rate of the device):
    ``int8, int8 output`` or ``float8_e4m3fn, fast accumulation``.
    """
    dtype, is_fast = str(problem.dtype), getattr(problem, "fast_accumulation", None)
    if is_fast is None:  # The ceilings of operations other than matmul do not depend on the output dtype.
        return dtype
    is_usual = dtype not in DTYPES or problem.out_dtype == DTYPES[dtype].default_output_dtype
    return ", ".join(
        [
            dtype,
            *([] if is_usual else [f"{problem.out_dtype} output"]),
            *([_FAST_ACCUMULATION_LABEL] if is_fast else []),
        ]
    )
