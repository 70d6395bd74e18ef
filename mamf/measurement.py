"""The measurement of one kernel on one shape in one regime (a row of a log), and the rate of a device, as data; and the
time that a backend's device timer adds to a launch.

That time was measured against the vendor's profiler (timers.csv). There are two quantities. The *overhead* is estimated
in each process and subtracted; its variation between processes is part of the repeat interval. The *accuracy* is the
error that remains, because the overhead depends on the kernel: 1.0 us or 0.5 % on NVIDIA, whichever is larger. All
repeats share this error, so repeat intervals do not contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from mamf.dtypes import DTYPES
from mamf.errors import CRASHED, GIVEN_UP, LOST, PeakSource
from mamf.files import read_packaged_rows
from mamf.kernel import Work
from mamf.plans import StepKey
from mamf.statistics import (
    Interval,
    Repeatability,
    Summary,
    compute_exact_standard_deviation,
    compute_repeat_interval,
    compute_standard_error,
    widen_interval,
)

#: The smallest relative error of a figure, because long launches have errors other than the overhead.
MIN_RELATIVE_ACCURACY = 0.005
#: The smallest error in seconds that was shown for a timer.
MIN_ACCURACY_SECONDS = 1e-6
#: The largest plausible overhead of a timer that has not been compared with a profiler, in seconds.
MAX_OVERHEAD_SECONDS = 20e-6
#: The largest acceptable difference between the overhead measured after a run and the subtracted one, in seconds.
MAX_SHIFT_SECONDS = 0.5e-6
#: Reports give the accuracy only of launches shorter than this, of which 1 us is 1 % or more.
SHORT_LAUNCH_SECONDS = 100e-6


class Timer(NamedTuple):
    """The timer of a backend, in seconds: its overhead, from ``lowest`` to ``highest``, and the ``accuracy`` of figures
    after subtraction.
    """

    lowest: float
    typical: float
    highest: float
    accuracy: float


class Overhead(NamedTuple):
    """The seconds to subtract from each window, and a remark if they are not the estimate."""

    seconds: float
    remark: str = ""


@functools.cache
def _read_timers() -> dict[str, Timer]:
    columns = [f"{name}_us" for name in Timer._fields]
    rows = read_packaged_rows("timers.csv")
    return {row["backend"]: Timer(*(float(row[column]) * 1e-6 for column in columns)) for row in rows}


def find_timer(backend: str) -> Timer | None:
    """Return the measured timer of a backend, or None if it has not been measured."""
    return _read_timers().get(backend)


def is_plausible_overhead(backend: str, overhead: float) -> bool:
    """Return whether an overhead in seconds is plausible for a backend's timer."""
    timer = find_timer(backend)
    low, high = (timer.lowest, timer.highest) if timer else (0.0, MAX_OVERHEAD_SECONDS)
    return low <= overhead <= high


def choose_overhead(backend: str, estimate: float | None) -> Overhead:
    """Return the overhead to subtract: the estimate in seconds if it is plausible, else the timer's typical overhead (0
    if unknown). It is rounded to the nanosecond, like logged samples.
    """
    if estimate is None:
        return Overhead(0.0)
    if is_plausible_overhead(backend, estimate):
        return Overhead(round(estimate, 9))
    timer = find_timer(backend)
    if timer is None and -MAX_SHIFT_SECONDS < estimate < 0:  # noise of a timer without overhead
        return Overhead(0.0)
    used = round(timer.typical, 9) if timer else 0.0
    return Overhead(
        used, f"assumed a timer overhead of {used * 1e6:.1f} us: the estimate of {estimate * 1e6:.1f} us is implausible"
    )


def find_timer_accuracy(backend: str, overhead: float) -> float:
    """Return the error in seconds of short launches after subtraction of this overhead; 0 if unknown."""
    timer = find_timer(backend)
    return timer.accuracy if timer and overhead else 0.0


def compute_relative_accuracy(accuracy: float, seconds: float) -> float:
    """Return the error of a figure as a share of its seconds, from ``find_timer_accuracy``; 0 if that is unknown."""
    return max(accuracy / seconds, MIN_RELATIVE_ACCURACY) if accuracy else 0.0


def subtract_overhead(window: float, overhead: float) -> float:
    """Subtract the timer's overhead from a window, and return the seconds of the launch in it. The result is at least
    half the window, because shorter launches cannot be timed.
    """
    return max(window - overhead, window / 2)


KeyT = TypeVar("KeyT")
ItemT = TypeVar("ItemT")


class Tabular:
    """Base class of objects that notebooks show as html. ``mamf/__init__.py`` sets ``render``, because the report
    modules import these classes.
    """

    render: Callable[[Tabular], str]

    def _repr_html_(self) -> str:
        return type(self).render(self)


Status = Literal["ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed"]
TERA = 1e12
#: Names of the details of verified rows: where the output is wrong; the number of checked launches and output values;
#: the bound of the error; launches with different bits, if the kernel does not promise equal bits; and outputs that
#: lost the NaN of an operand.
WRONG_TILES, CHECKED_LAUNCHES, CHECKED_VALUES = "wrong tiles", "checked launches", "checked values"
BOUND, OTHER_BITS, LOST_NAN = "bound", "other bits", "lost NaN"
#: The part of a launch's time in which nothing runs.
IDLE = "idle"


def group_pairs(pairs: Iterable[tuple[KeyT, ItemT]]) -> dict[KeyT, list[ItemT]]:
    """Group the second items of pairs by the first ones, in the order of the pairs."""
    groups: dict[KeyT, list[ItemT]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


@dataclass(frozen=True)
class Conditions:
    """The state of the device while the samples were taken. None: it could not be read.

    - ``clock_hz``: the clock that the driver requests, from its sensors.
    - ``true_clock_hz``: the mean clock of the compute units during launches, from clock stamps.
    - ``cycles_used``: the share of the units' cycles at that clock which the rate accounts for (mamf.plausibility).
    - ``throttle_shares``: the share of readings with each throttle reason; only for single measurements.
    """

    clock_hz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    throttle_shares: Mapping[str, float] = field(default_factory=dict)
    true_clock_hz: float | None = None
    cycles_used: float | None = None


@dataclass(frozen=True)
class Measurement(Tabular):
    """One kernel on one shape in one regime. The operation defines the types of ``shape`` and ``problem``.

    - ``samples``: seconds, one per launch (sustained: one per block, the mean seconds of a launch), after subtraction
      of ``timer_overhead``.
    - ``phase``, ``round``: the part of a search for a ceiling that the measurement belongs to.
    - ``details``: further findings of the kernel or the regime.
    - ``peak_memory_bytes``: memory that a launch needs: operands, saved tensors and allocations (attention and models
      only). ``peak_reserved_bytes``: memory that the process has reserved on the device, including unused blocks of its
      allocator (models only).
    - ``repeatability``: how much repeated runs differ; None if unknown, and in converted logs.
    - ``device``: the index of the device that measured the row, if several devices share the run. ``device_speed``: its
      speed relative to the run's first device, from their common reference; None if unknown (mamf.logs.run_log).
      ``device_speed_half_width``: half the width of its interval, as a share of it.
    - ``timer_accuracy``: the error of a short launch, in seconds, that all repeats share; 0 if unknown.
    """

    shape: Any
    kernel: str
    problem: Any
    regime: str
    best_by: str
    status: Status
    reason: str = ""
    summary: Summary | None = None
    samples: tuple[float, ...] = ()
    implausible_samples: tuple[float, ...] = ()
    launches: int = 0
    timer_overhead: float = 0.0
    error: float | None = None
    conditions: Conditions = field(default_factory=Conditions)
    remarks: tuple[str, ...] = ()
    is_reference: bool = False
    phase: str = ""
    round: int = 0
    details: Mapping[str, float | str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    repeatability: Repeatability | None = None
    device: int | None = None
    device_speed: float | None = 1.0
    device_speed_half_width: float = 0.0
    timer_accuracy: float = 0.0

    def __repr__(self) -> str:
        figure = f"{self.status}, {self.reason}" if self.summary is None else f"{self.best_rate:.4g} {self.work.unit}"
        return f"Measurement({self.operation} {self.shape} by {self.kernel}, {self.regime}: {figure})"

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return str(self.problem.operation)

    @cached_property
    def work(self) -> Work:
        """FLOP and bytes of one launch."""
        work: Work = self.problem.work(self.shape)
        return work

    @property
    def flop(self) -> float:
        """FLOP of one launch."""
        return float(self.work.flop)

    @property
    def amount(self) -> float:
        """The FLOP or bytes of one launch, whichever the rate counts."""
        return self.work.amount

    @property
    def step(self) -> StepKey:
        """The step that this row answers, with the kernel's own name."""
        return StepKey(self.regime, self.problem, self.shape, self.kernel)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_fatal(self) -> bool:
        """Whether the launch ended the process or lost the device."""
        return self.status == "failed" and self.reason.startswith((CRASHED, LOST, GIVEN_UP))

    def rate(self, statistic: str) -> float:
        """Return the rate in TFLOPS (1e12 FLOP/s), or in TB/s if the operation counts bytes, at a statistic of the
        summary: mean, median, fastest or slowest. Raises ValueError if there is no summary.
        """
        return self.amount / self._get_statistic_seconds(statistic) / TERA

    @property
    def best_rate(self) -> float:
        """The rate at the statistic that ranks rows in this regime."""
        return self.rate(self.best_by)

    @property
    def tflops(self) -> float:
        """``best_rate``, in TFLOPS. Only for operations that count FLOP."""
        return self.best_rate

    @property
    def comparable_rate(self) -> float:
        """``best_rate``, normalized to the run's first device if the relative speed is known."""
        return self.best_rate / (self.device_speed or 1.0)

    @property
    def comparable_seconds(self) -> float:
        """``seconds``, normalized to the run's first device."""
        return self.seconds * (self.device_speed or 1.0)

    @property
    def comparable_interval(self) -> Interval:
        """The interval of ``comparable_seconds``: the row's, widened by the uncertainty of the device's speed."""
        speed = self.device_speed or 1.0
        own = Interval(self.interval.low * speed, self.interval.high * speed, self.interval.coverage)
        return widen_interval(own, self.comparable_seconds, self.device_speed_half_width)

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key of rows: the best row has the highest key. Rows of a device of unknown speed rank lowest."""
        return self.device_speed is not None, self.comparable_rate

    @cached_property
    def stdev(self) -> float:
        """Standard deviation of the samples, in seconds."""
        return compute_exact_standard_deviation(self.samples)

    @property
    def figure(self) -> str:
        """The statistic that the interval belongs to: the mean if it ranks rows (work over time), else the median."""
        return "mean" if self.best_by == "mean" else "median"

    @property
    def seconds(self) -> float:
        """Seconds per launch at the statistic ``figure``."""
        return self._get_statistic_seconds(self.figure)

    @cached_property
    def interval(self) -> Interval:
        """The 95 % interval that contains the seconds per launch of one more run (``compute_repeat_interval``). Without
        a calibration, as in converted logs, it is the interval from the scatter within the visit. Raises ValueError for
        a row without samples.
        """
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        within = self.summary.interval
        if self.repeatability is None:
            return within
        own, celsius = self.seconds, self.conditions.celsius
        return compute_repeat_interval([own], own, [self.standard_error], self.repeatability, celsius)

    @property
    def standard_error(self) -> float:
        """The relative standard error of ``seconds`` within the visit."""
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        return compute_standard_error(self.summary.interval, self.seconds)

    @property
    def rate_interval(self) -> Interval:
        """The repeat interval as a rate, in the unit of ``rate``."""
        interval = self.interval
        return Interval(self.amount / interval.high / TERA, self.amount / interval.low / TERA, interval.coverage)

    @property
    def accuracy(self) -> float:
        """The relative error of the timer that all repeats share. Repeat intervals do not include it. Comparisons with
        another instrument or with a launch of another length must.
        """
        return compute_relative_accuracy(self.timer_accuracy, self.seconds)

    @property
    def relative_half_width(self) -> float:
        """Half the width of the interval, as a share of ``seconds``."""
        return self.interval.half_width / self.seconds

    def _get_statistic_seconds(self, statistic: str) -> float:
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        return float(getattr(self.summary, statistic))


#: The source of a rate: ``measured`` on this device, ``contributed`` for its model, ``published`` by other people,
#: listed in a ``datasheet``, or ``given`` on the command line.
RateSource = Literal[PeakSource, "given"]
#: Tiers of rates without a log.
PUBLISHED, DATASHEET = "published, not checked", "datasheet"
_FAST = "fast accumulation"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The FLOP or bytes per second of a device, and the source of that figure.

    - ``rate``: in ``unit``, which is TFLOPS (1e12 FLOP/s; int8: operations) or TB/s.
    - ``interval``: the 95 % repeat interval in the same unit; None for a datasheet or a published figure.
    - ``dtype``: as named by ``label_dtype``, which includes an unusual output dtype.
    - ``regime``: ``burst`` or ``sustained``; None for a datasheet or a published figure.
    - ``device``, ``uuid_hash``: the name, and the hashed identifier of the card if known.
    - ``source``: ``measured``, ``contributed``, ``published``, ``datasheet`` or ``given``. ``reference``: the log,
      address or datasheet. ``description``: both in one line.
    - ``tier``: that of the log in results/, else ``published, not checked`` or ``datasheet``.
    - ``date``: when it was measured (UTC); empty if unknown.
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
        """``rate``, if it counts FLOP."""
        return self.rate

    @property
    def flops(self) -> float:
        """FLOP per second."""
        return self.rate * TERA


RateT = TypeVar("RateT", bound=Rate)
#: Rates by dtype (as named by ``label_dtype``) and regime.
Rates = Mapping[tuple[str, str], Rate]


def find_rate(rates: Mapping[tuple[str, str], RateT], dtype: str, regime: str) -> RateT | None:
    """Return the rate of a dtype in a regime, or None. A rate with fast accumulation is used only if there is no other;
    a rate with an unusual output dtype is never used.
    """
    return rates.get((dtype, regime)) or rates.get((f"{dtype}, {_FAST}", regime))


def label_dtype(problem: Any) -> str:
    """Return the dtype of a problem and, for matmul, what else its ceiling depends on: ``int8, int8 output`` or
    ``float8_e4m3fn, fast accumulation``. Every look-up of a rate uses this label.
    """
    dtype, is_fast = str(problem.dtype), getattr(problem, "fast_accumulation", None)
    if is_fast is None:  # not a matmul: its ceiling does not depend on the output dtype
        return dtype
    is_usual = dtype not in DTYPES or problem.out_dtype == DTYPES[dtype].default_output_dtype
    return ", ".join([dtype, *([] if is_usual else [f"{problem.out_dtype} output"]), *([_FAST] if is_fast else [])])
