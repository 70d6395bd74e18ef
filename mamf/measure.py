"""One kernel, one shape, one regime -> one Measurement. Whatever goes wrong becomes its status, never the end of a
run.
"""

from __future__ import annotations

import statistics as stdlib_statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mamf.backend import Backend, OperandPool, Reading
from mamf.checking import Checked, WrongResultError
from mamf.errors import UnsupportedError, first_line
from mamf.kernel import MatmulKernel, Verdict
from mamf.operations.attention.kernel import AttentionKernel
from mamf.regimes import Regime, Samples, StoppingRule, Sustained
from mamf.statistics import Interval, Repeatability, Summary, repeat_interval, standard_error, summarize, two_levels

Status = Literal["ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed"]
STATUSES: tuple[Status, ...] = ("ok", "out_of_memory", "unsupported", "wrong_result", "implausible", "failed")
TERA = 1e12
Kernel = MatmulKernel | AttentionKernel


@dataclass(frozen=True)
class Conditions:
    """What the sensors said while the samples were taken. None: they could not be read."""

    clock_hz: float | None = None
    watts: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """A kernel on a shape in a regime: of matmul (MatmulShape, MatmulProblem) or attention (AttentionShape,
    AttentionProblem). ``samples`` are seconds, one a launch (sustained: one a block, mean seconds a
    launch), each less the ``timer_overhead``. ``phase`` and ``round``: of a search for a ceiling, what it was taken
    for. ``details``: what the kernel said of its launch. ``peak_memory_bytes``: what a launch needs, its operands,
    what it saved before and what it allocates (attention only). ``repeatability``: how far repeats lie apart, as
    calibrated for the backend; None where that is not known, and in logs from before there was one.
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
    repeatability: Repeatability | None = None

    @property
    def flop(self) -> float:
        """FLOP of one launch."""
        return float(self.problem.flop(self.shape))

    @property
    def step(self) -> tuple[str, Any]:
        """The step of a sweep that this row is of."""
        return self.regime, self.shape

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def tflops(self, statistic: str) -> float:
        """TFLOPS (1e12 FLOP/s) at a statistic of the summary: mean, median, fastest, slowest. Raises ValueError
        without one.
        """
        return self.flop / self._measured(statistic) / TERA

    @property
    def best_tflops(self) -> float:
        """The figure that a best is chosen by in this regime."""
        return self.tflops(self.best_by)

    @property
    def figure(self) -> str:
        """What the interval is of: the mean where a best is chosen by it (work over time), else the median."""
        return "mean" if self.best_by == "mean" else "median"

    @property
    def seconds(self) -> float:
        """Seconds of a launch by that figure."""
        return self._measured(self.figure)

    @property
    def interval(self) -> Interval:
        """Where the seconds of a repeat lie; without a calibration, only what scattered within the visit."""
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
    def tflops_interval(self) -> Interval:
        """The same interval in TFLOPS."""
        interval = self.interval
        return Interval(self.flop / interval.high / TERA, self.flop / interval.low / TERA, interval.coverage)

    @property
    def relative_half_width(self) -> float:
        """Half the width of the interval, as a share of the figure."""
        return self.interval.half_width / self.seconds

    def _measured(self, statistic: str) -> float:
        if self.summary is None:
            raise ValueError(f"{self.shape} was not measured: {self.status}")
        return float(getattr(self.summary, statistic))


def measure(
    kernel: Kernel,
    problem: Any,
    shape: Any,
    regime: Regime,
    pool: OperandPool,
    rule: StoppingRule,
    fastest_possible_flops: float | None = None,
) -> Measurement:
    """Prepare, verify, sample. ``fastest_possible_flops``: FLOP/s that the device cannot exceed at its maximum clock.

    Returns a Measurement with any status; raises only what is not an Exception (KeyboardInterrupt).
    """
    run = _Run(kernel, problem, shape, regime, pool, rule, fastest_possible_flops)
    backend = regime.backend
    try:
        return run.take()
    except WrongResultError as error:
        return run.result("wrong_result", str(error), error=error.verdict.error, details=error.verdict.details)
    except Exception as error:  # a status of this shape, whatever a vendor's library throws
        if isinstance(error, UnsupportedError) or kernel.refuses(error):
            status: Status = "unsupported"
        elif backend.is_out_of_memory(error):
            status = "out_of_memory"
        else:
            status = "failed"
        reason = first_line(error)
    # Outside the handler: its traceback holds the operands that are to be released.
    if status == "out_of_memory":
        pool.release()
        backend.release_memory()
    return run.result(status, reason)


@dataclass
class _Run:
    kernel: Any
    problem: Any
    shape: Any
    regime: Regime
    pool: OperandPool
    rule: StoppingRule
    fastest_possible_flops: float | None

    def take(self) -> Measurement:
        backend, kernel, problem, shape = self.regime.backend, self.kernel, self.problem, self.shape
        reason = kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape)
        if reason:
            return self.result("unsupported", reason)
        sets = self.regime.sets(problem, shape, backend.info.cache_bytes)
        with kernel.settings(backend, problem):
            self.regime.bridge()
            checked = Checked(kernel.prepare(backend, problem, shape, self.pool, sets, self.regime.needs_rewrite))
            # Nothing compiles, tunes or is wrong for the first time in a timed launch.
            estimate = checked.rehearse(backend)
            peak = needed_memory(backend, checked, problem, shape) if kernel.operation == "attention" else None
            samples = self.regime.sample(checked, self.rule, estimate)
            checked.require_unchanged_operands()
        return self.judge(samples, checked.verdict, peak)

    def judge(self, taken: Samples, verdict: Verdict, peak: int | None) -> Measurement:
        # A nanosecond is far below any timer's step; what is logged is then exactly what was computed with.
        seconds = [round(sample, 9) for sample in taken.seconds]
        flop = self.problem.flop(self.shape)
        possible, impossible = split_implausible(seconds, flop, self.fastest_possible_flops)
        common: dict[str, Any] = {
            "error": verdict.error,
            "details": verdict.details,
            "peak_memory_bytes": peak,
            "samples": tuple(possible),
            "implausible_samples": tuple(impossible),
            "launches": taken.launches,
            "timer_overhead": taken.timer_overhead,
            "conditions": conditions(taken.readings, taken.watts),
            "remarks": (*taken.remarks, *self.alternation(possible)),
        }
        if len(impossible) > len(possible):
            tflops = flop / max(min(impossible), 1e-12) / TERA
            reason = f"{len(impossible)} of {len(taken.seconds)} samples are impossibly fast ({tflops:.0f} TFLOPS)"
            return self.result("implausible", reason, **common)
        common["repeatability"] = self.regime.repeatability
        return self.result("ok", summary=summarize(possible, self.regime.best_by), **common)

    def alternation(self, samples: Sequence[float]) -> Sequence[str]:
        """That a power controller hunts between two levels: the mean over time stands for both."""
        levels = two_levels(samples) if self.regime.name == Sustained.name else None
        if levels is None:
            return ()
        slow, fast = sorted(self.problem.flop(self.shape) / seconds / TERA for seconds in levels)
        return (f"alternated between {slow:.4g} and {fast:.4g} TFLOPS",)

    def result(self, status: Status, reason: str = "", **fields: Any) -> Measurement:
        return Measurement(
            self.shape,
            self.kernel.name,
            self.problem,
            self.regime.name,
            self.regime.best_by,
            status,
            reason,
            **fields,
        )


def cut_short(result: Measurement, deadline: float | None, backend: Backend) -> bool:
    """Whether the budget ended before a shape had its fewest samples: a resumed run measures it anew."""
    ended = deadline is not None and backend.now() >= deadline
    # A sustained visit is at least 2 s long or it is none.
    too_few = len(result.samples) < StoppingRule.fewest or result.regime == Sustained.name
    return ended and result.status in ("ok", "implausible") and too_few


def needed_memory(backend: Backend, checked: Checked, problem: Any, shape: Any) -> int | None:
    """Bytes that one launch needs: its operands, what was saved for it and what it allocates; None where the backend
    does not tell. The same whatever else the process holds.
    """
    checked.poison()  # lets go of what earlier launches returned
    before = backend.allocated_memory()
    if before is None:
        return None
    backend.reset_peak_memory()
    checked.launches[0]()
    backend.submit()
    backend.synchronize()
    peak = backend.peak_memory()
    if peak is None:
        return None
    operands = sum(buffer.nbytes for buffer in problem.buffers(shape).values())
    return int(operands + checked.held_bytes + peak - before)


def split_implausible(
    seconds: Sequence[float], flop: float, fastest_possible_flops: float | None
) -> tuple[list[float], list[float]]:
    """Samples that can be true, and those that cannot.

    Impossible is what is not positive, what is faster than the device's physics and, since that is not always known,
    what is under half the median of all: launches scatter upwards, while a timer that misses its launch reads far too
    low.
    """
    floor = flop / fastest_possible_flops if fastest_possible_flops else 0.0
    positive = [sample for sample in seconds if sample > 0]
    if positive:
        floor = max(floor, stdlib_statistics.median(positive) / 2)
    possible = [sample for sample in seconds if sample > 0 and sample >= floor]
    impossible = [sample for sample in seconds if not (sample > 0 and sample >= floor)]
    return possible, impossible


def conditions(readings: Sequence[Reading], watts: float | None) -> Conditions:
    """Readings in short: median clock, hottest temperature, every throttle reason seen in at least a tenth of them."""
    reasons = Counter(reason for reading in readings for reason in reading.throttle_reasons)
    return Conditions(
        clock_hz=_whole(_median([reading.clock_hz for reading in readings])),
        watts=_tenth(watts if watts is not None else _median([reading.watts for reading in readings])),
        celsius=_tenth(max((reading.celsius for reading in readings if reading.celsius is not None), default=None)),
        throttle_reasons=tuple(sorted(reason for reason, count in reasons.items() if count * 10 >= len(readings))),
    )


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _whole(value: float | None) -> float | None:
    return None if value is None else float(round(value))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdlib_statistics.median(known) if known else None
