"""A kernel on a shape in a regime: what was measured, as data. Reading a log needs this and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeGuard

from mamf.statistics import (
    Interval,
    Repeatability,
    Summary,
    exact_standard_deviation,
    repeat_interval,
    standard_error,
    widen,
)
from mamf.tabular import Tabular
from mamf.work import Work

Status = Literal["ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed"]
STATUSES: tuple[Status, ...] = ("ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed")
TERA = 1e12
#: How details end that say which share of a launch's time something takes.
TIME = " time"
#: The time of a launch in which nothing runs.
IDLE = "idle"
#: The detail that says how long a launch worked under a profiler. Without it, in logs of before it was recorded, idle
#: holds what the profiler added.
BUSY_SECONDS = "busy_seconds"


def is_share(value: object) -> TypeGuard[float]:
    """Whether a detail may be the share of a launch's time."""
    return isinstance(value, (int, float)) and 0 <= value <= 1


@dataclass(frozen=True)
class Conditions:
    """What the sensors said while the samples were taken. None: they could not be read.

    ``throttle_shares``: of the readings, by reason; of one measurement, not of several together.
    """

    clock_hz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    throttle_shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement(Tabular):
    """A kernel on a shape in a regime; shape and problem are the operation's.

    ``samples`` are seconds, one a launch (sustained: one a block, mean seconds a launch), each less the
    ``timer_overhead``. ``phase`` and ``round``: of a search for a ceiling, what it was taken for. ``details``: what the
    kernel said of its launch. ``peak_memory_bytes``: what a launch needs, its operands, what it saved before and what
    it allocates (attention and models only). ``peak_reserved_bytes``: what the process had taken of the device by then,
    blocks of its allocator that nobody used among them (models only). ``repeatability``: how far repeats lie apart, as
    calibrated for the backend; None if that is not known, and in converted logs.

    ``device``: the index of the one that measured it, in a run that several share; ``device_speed``: how fast that is
    to the run's first device, as their common reference tells, and None where nothing does (mamf.logs.device_speeds);
    ``device_speed_half_width``: of its interval, as a share of it.

    ``timer_accuracy``: seconds by which the timer may be wrong in all repeats alike (machine.timers); 0 if unknown.
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
        """The name of what was computed."""
        return str(self.problem.operation)

    @cached_property
    def work(self) -> Work:
        """What one launch does."""
        work: Work = self.problem.work(self.shape)
        return work

    @property
    def flop(self) -> float:
        """FLOP of one launch."""
        return float(self.work.flop)

    @property
    def amount(self) -> float:
        """What of a launch its rate counts: FLOP or bytes."""
        return self.work.amount

    @property
    def step(self) -> tuple[str, Any, Any, str]:
        """The step that this row measured, by the kernel's own name."""
        return self.regime, self.problem, self.shape, self.kernel

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def rate(self, statistic: str) -> float:
        """TFLOPS (1e12 FLOP/s), or TB/s where the operation counts bytes, at a statistic of the summary: mean, median,
        fastest, slowest. Raises ValueError without one.
        """
        return self.amount / self._measured(statistic) / TERA

    def tflops(self, statistic: str) -> float:
        """The rate of an operation that counts FLOP."""
        return self.rate(statistic)

    @property
    def best_rate(self) -> float:
        """The figure that a best is chosen by in this regime."""
        return self.rate(self.best_by)

    @property
    def comparable_rate(self) -> float:
        """The best rate as the run's first device would give it, where the two were compared."""
        return self.best_rate / (self.device_speed or 1.0)

    @property
    def comparable_seconds(self) -> float:
        """The same of ``seconds``."""
        return self.seconds * (self.device_speed or 1.0)

    @property
    def comparable_interval(self) -> Interval:
        """That of ``comparable_seconds``: wider than the row's own by what the reference does not tell."""
        speed = self.device_speed or 1.0
        own = Interval(self.interval.low * speed, self.interval.high * speed, self.interval.coverage)
        return widen(own, self.comparable_seconds, self.device_speed_half_width)

    @property
    def rank(self) -> tuple[bool, float]:
        """What a best is chosen by: rows of a device that nothing compares with the others come after theirs."""
        return self.device_speed is not None, self.comparable_rate

    @cached_property
    def stdev(self) -> float:
        """Standard deviation of the samples, in seconds."""
        return exact_standard_deviation(self.samples)

    @property
    def figure(self) -> str:
        """What the interval is of: the mean where a best is chosen by it (work over time), else the median."""
        return "mean" if self.best_by == "mean" else "median"

    @property
    def seconds(self) -> float:
        """Seconds of a launch by that figure."""
        return self._measured(self.figure)

    @cached_property
    def interval(self) -> Interval:
        """The 95 % repeat interval in seconds (mamf.statistics.repeat_interval). Without a calibration, as in
        converted logs: the interval of the figure within the visit.
        """
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        within = self.summary.interval
        if self.repeatability is None:
            return within
        return repeat_interval([self.seconds], self.seconds, [self.standard_error], self.repeatability)

    @property
    def standard_error(self) -> float:
        """The relative standard error of the figure within the visit."""
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        return standard_error(self.summary.interval, self.seconds)

    @property
    def rate_interval(self) -> Interval:
        """The same interval as a rate."""
        interval = self.interval
        return Interval(self.amount / interval.high / TERA, self.amount / interval.low / TERA, interval.coverage)

    @property
    def accuracy(self) -> float:
        """How far the figure may be from the truth, as a share of it, for a reason that all repeats have in common: the
        timer. No repeat interval contains it; a comparison with another instrument or a launch of another length must.
        """
        return self.timer_accuracy / self.seconds

    @property
    def relative_half_width(self) -> float:
        """Half the width of the interval, as a share of the figure."""
        return self.interval.half_width / self.seconds

    @property
    def time_shares(self) -> dict[str, float]:
        """The share of a launch's time by what was at work (attention, say, or idle); empty where nobody told. What can
        be none, in a log of somebody's, is left out.
        """
        told = {name.removesuffix(TIME): share for name, share in self.details.items() if name.endswith(TIME)}
        return {name: share for name, share in told.items() if is_share(share)}

    @property
    def idle_is_bound(self) -> bool:
        """Whether ``time_shares`` are of a launch under a profiler: idle is an upper bound, others are lower bounds."""
        return bool(self.time_shares) and BUSY_SECONDS not in self.details

    def _measured(self, statistic: str) -> float:
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        return float(getattr(self.summary, statistic))
