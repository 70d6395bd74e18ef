"""Measure one kernel on one shape in one regime, which gives one row of a log. A failure of the kernel becomes the
status of the row and does not end the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import Backend, DeviceInfo, OperandPool, SensorReading
from mamf.ceilings.ceiling import CONFIRM_PHASE
from mamf.engine.regimes import Regime, Samples, StoppingRule, SustainedRegime
from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.errors import UnsupportedError, describe_error, get_catchable_plugin_errors
from mamf.kernel import AnyKernel, Verdict, explain_unsupported_launch
from mamf.measurement import TERA, Conditions, Measurement, MeasurementStatus, find_timer_calibration
from mamf.operations.unknown import get_operation
from mamf.plans import ALL_CLOCKS, BEST_CLOCK, FIND, NO_CLOCK, SWEEP, Plan
from mamf.plausibility import compute_used_cycle_share, explain_implausible_row, separate_impossible_samples
from mamf.statistics import compute_mean_or_median, compute_median_ignoring_none, find_two_levels, summarize_samples

#: A function that takes a row's rate in FLOP/s, and returns whether to measure the true clock for the row. The true
#: clock is the frequency at which the compute units really run. The driver may report a different one.
ShouldMeasureClock = Callable[[float], bool]


@dataclass
class ClockPolicy:
    """The rule by which a run decides for each new row whether to measure the true clock of the compute units, which
    takes additional launches.

    - ``clock_mode``: ALL_CLOCKS measures the clock for every row, and NO_CLOCK for none. BEST_CLOCK measures it for
      each row that is faster than all earlier rows of the same problem and regime, so the fastest row always has a
      clock.
    - ``is_per_shape``: True if BEST_CLOCK compares a row only with earlier rows of its shape (in runs that compare
      kernels).
    """

    clock_mode: str = NO_CLOCK
    is_per_shape: bool = False
    _best_rate_by_group: dict[Hashable, float] = field(default_factory=dict, init=False)

    @classmethod
    def make_from_plan(cls, plan: Plan) -> ClockPolicy:
        """Return the rule for the field ``clock`` of a plan. If the field is BEST_CLOCK but other runs will be compared
        with the rows of the plan, return the rule for ALL_CLOCKS instead.
        """
        compares = plan.kind not in (SWEEP, FIND) and plan.clock == BEST_CLOCK
        return cls(ALL_CLOCKS if compares else plan.clock, is_per_shape=len(plan.kernels) > 1)

    def should_measure_clock(self, phase: str, regime: str, problem: Any, shape: Any, kernel: str, rate: float) -> bool:
        """Return whether to measure the true clock for a new row with this ``rate`` (FLOP/s), and remember the rate to
        compare later rows with it. Return False in a ``phase`` of a search that only chooses the shapes to confirm.
        """
        if self.clock_mode == NO_CLOCK or phase not in ("", CONFIRM_PHASE):
            return False
        # When a search confirms a ceiling, the pair of shape and kernel with the highest median wins. Any pair may win,
        # so measure the clock of each pair.
        shape_key = (shape, kernel) if phase == CONFIRM_PHASE else (shape,) if self.is_per_shape else ()
        group_key = (regime, problem, *shape_key)
        best_rate = self._best_rate_by_group.get(group_key, 0.0)
        self._best_rate_by_group[group_key] = max(rate, best_rate)
        return rate > best_rate or self.clock_mode == ALL_CLOCKS


#: The number of launches to time before mamf decides that a launch is too long for the regime burst. The shortest of
#: these launches decides.
_LAUNCHES_PER_TIME_ESTIMATE = 3
#: The relative standard deviation of launch times between runs that mamf assumes if the host queues launches more
#: slowly than the device runs them. On two hosts with an NVIDIA H100, the rates of such launches differed by a factor
#: of 2 (12.5 and 24 TFLOPS for a matmul of 512x512x512). With 0.3, the interval of the rate is so wide that reports
#: call it unknown and comparisons leave the row undecided.
_HOST_LIMITED_DEVIATION_SHARE = 0.3


def measure_row(
    kernel: AnyKernel,
    problem: Any,
    shape: Any,
    regime: Regime,
    operand_pool: OperandPool,
    stopping_rule: StoppingRule,
    max_possible_rate: float | None = None,
    should_measure_clock: ShouldMeasureClock = lambda rate: False,
    on_prepared: Callable[[], None] = lambda: None,
) -> Measurement:
    """Prepare and verify a kernel on a shape, then let the regime take samples until ``stopping_rule`` stops it. Return
    the row.

    If anything fails, return a row whose status is not ``ok``. Raises only the exceptions that must end the run
    (mamf.errors.RUN_ENDING_EXCEPTIONS).

    - ``operand_pool``: the buffers of the operands, which rows of a run share.
    - ``max_possible_rate``: the FLOP or bytes per second that the device cannot exceed; None if unknown.
    - ``should_measure_clock``: a function that takes the row's rate in FLOP/s, and returns whether to measure the true
      clock of the compute units too.
    - ``on_prepared``: called before the first sample, when the kernel is compiled and its first output is verified.
    """
    run = _RowMeasurement(
        kernel,
        problem,
        shape,
        regime,
        operand_pool,
        stopping_rule,
        max_possible_rate,
        should_measure_clock,
        on_prepared,
    )
    backend = regime.backend
    try:
        return run.measure_row()
    except WrongResultError as error:
        return run.make_row(
            "wrong_result", str(error), relative_error=error.verdict.error, details=error.verdict.details
        )
    except get_catchable_plugin_errors() as error:  # Any error of a vendor's library becomes the status.
        status, reason = classify_error(error, kernel, backend)
    # Release memory only after the except block, because the traceback of its exception keeps the operands alive.
    if status == "out_of_memory":
        operand_pool.release_buffers()
        backend.release_cached_memory()
    return run.make_row(status, reason)


def classify_error(error: BaseException, kernel: AnyKernel, backend: Backend) -> tuple[MeasurementStatus, str]:
    """Return the status and the reason of a row whose measurement raised ``error``. The kernel and the backend classify
    ``error``. If they raise another error, the status is ``failed`` and the reason describes the other error.
    """
    try:
        if isinstance(error, UnsupportedError) or (isinstance(error, Exception) and kernel.is_refusal(error)):
            return "unsupported", describe_error(error)
        return (
            "out_of_memory" if isinstance(error, Exception) and backend.is_out_of_memory(error) else "failed",
            describe_error(error),
        )
    except get_catchable_plugin_errors() as another:
        return "failed", describe_error(another)


@dataclass
class _RowMeasurement:
    kernel: Any
    problem: Any
    shape: Any
    regime: Regime
    operand_pool: OperandPool | None
    stopping_rule: StoppingRule
    max_possible_rate: float | None
    should_measure_clock: ShouldMeasureClock = lambda rate: False
    on_prepared: Callable[[], None] = lambda: None

    def measure_row(self) -> Measurement:
        backend, kernel, problem, shape = self.regime.backend, self.kernel, self.problem, self.shape
        if reason := explain_unsupported_launch(kernel, backend, problem, shape):
            return self.make_row("unsupported", reason)
        sets = self.regime.choose_operand_set_count(problem, shape, backend.info.cache_bytes)
        with kernel.apply_settings(backend, problem):
            checked = CheckedKernel(
                kernel.prepare(backend, problem, shape, self.operand_pool, sets, self.regime.must_rewrite_output)
            )
            # Compile, tune and verify before any timed launch.
            launch_seconds = checked.warm_up_and_verify(backend)
            if kernel.must_fit_in_burst and self.regime.explain_too_long_launch(launch_seconds):
                # Time more launches: the first one may have included compilation, and threads of the compiler may still
                # keep the host busy.
                launch_seconds = min(checked.time_launch(0, backend) for _ in range(_LAUNCHES_PER_TIME_ESTIMATE))
                if reason := self.regime.explain_too_long_launch(launch_seconds):
                    return self.make_row("unsupported", reason)
            if kernel.reports_reserved_memory:
                checked.poison_outputs()
                backend.release_cached_memory()  # Do not count blocks that the allocator kept from earlier launches.
            peak = measure_launch_memory_bytes(backend, checked, problem, shape) if kernel.reports_memory else None
            reserved = (
                backend.read_peak_reserved_memory_bytes()
                if kernel.reports_reserved_memory and peak is not None
                else None
            )
            self.on_prepared()
            samples = self.regime.take_and_verify_samples(checked, self.stopping_rule, launch_seconds)
            self.measure_true_clock(checked, samples)
            checked.require_unchanged_operands()
            self.regime.keep_device_loaded(checked.launches, samples.seconds_per_launch[-1])
        held_details = {} if peak is None else {"held_bytes": checked.prepared.extra_bytes_per_set}
        verdict = replace(checked.verdict, details={**checked.verdict.details, **samples.details, **held_details})
        return self.make_row_from_samples(samples, verdict, peak, reserved)

    def measure_true_clock(self, checked: CheckedKernel, samples: Samples) -> None:
        """Measure the true clock of the compute units and store it in ``samples``, if the operation counts FLOP and
        ``should_measure_clock`` returns True for the rate.
        """
        work = self.problem.compute_work(self.shape)
        seconds = compute_mean_or_median(
            samples.seconds_per_launch, "mean" if self.regime.ranking_statistic == "mean" else "median"
        )
        if (
            samples.mean_clock_hz is None
            and work.unit == "TFLOPS"
            and self.should_measure_clock(work.amount / max(seconds, 1e-12))
        ):
            samples.mean_clock_hz = self.regime.measure_true_clock(checked, seconds)

    def make_row_from_samples(
        self, samples: Samples, verdict: Verdict, peak_bytes: int | None, reserved_bytes: int | None
    ) -> Measurement:
        # Round to nanoseconds as the log does, so that figures computed from the log are identical to those of the row.
        # No timer resolves a nanosecond.
        seconds = [round(sample, 9) for sample in samples.seconds_per_launch]
        work = self.problem.compute_work(self.shape)
        timer = find_timer_calibration(self.regime.backend.name)
        timer_error = (
            timer.error_seconds if timer and samples.timer_overhead_seconds else 0.0
        )  # 0 if the error is unknown.
        possible, impossible = separate_impossible_samples(seconds, work.amount, self.max_possible_rate, timer_error)
        levels, alternation = find_two_levels(possible) if self.regime.name == SustainedRegime.name else None, []
        if levels:  # The power controller alternates between two clocks.
            slow, fast = sorted(work.amount / each / TERA for each in levels)
            alternation = [f"the rate alternated between {slow:.4g} and {fast:.4g} {work.unit}"]
        row = self.make_row(
            "ok",
            summary=summarize_samples(possible, self.regime.ranking_statistic) if possible else None,
            relative_error=verdict.error,
            details=verdict.details,
            peak_memory_bytes=peak_bytes,
            peak_reserved_bytes=reserved_bytes,
            samples=tuple(possible),
            implausible_samples=tuple(impossible),
            launch_count=samples.launch_count,
            timer_overhead_seconds=samples.timer_overhead_seconds,
            timer_error_seconds=timer_error,
            conditions=summarize_readings(samples.readings, samples.mean_watts),
            remarks=(*samples.remarks, *alternation),
        )
        info = self.regime.backend.info
        if samples.mean_clock_hz is not None and row.summary is not None and work.unit == "TFLOPS":
            clock_hz = float(round(samples.mean_clock_hz))
            used = compute_used_cycle_share(row.best_rate * TERA, info, self.problem.dtype, clock_hz)
            used = used and float(f"{used:.6g}")
            row = replace(row, conditions=replace(row.conditions, true_clock_hz=clock_hz, used_cycle_share=used))
        if reason := explain_implausible_row(row, info, self.max_possible_rate):
            return replace(row, status="implausible", reason=reason, summary=None)
        repeatability = self.regime.find_repeatability(self.problem)
        if samples.is_limited_by_host and repeatability is not None:
            repeatability = replace(
                repeatability,
                launch_seconds=max(_HOST_LIMITED_DEVIATION_SHARE * row.seconds, repeatability.launch_seconds),
            )
        return replace(row, repeatability=repeatability)

    def make_row(self, status: MeasurementStatus, reason: str = "", **fields: Any) -> Measurement:
        return Measurement(
            self.shape,
            self.kernel.name,
            self.problem,
            self.regime.name,
            self.regime.ranking_statistic,
            status,
            reason,
            **fields,
        )


def build_row_from_samples(
    kernel: AnyKernel, problem: Any, shape: Any, regime: Regime, samples: Samples, verdict: Verdict
) -> Measurement:
    """Build a row of the log from samples that the caller took itself, without ``Regime.take_samples``. ``verdict``:
    how far the worst verified output is from its reference.
    """
    limit = compute_max_possible_rate(kernel, regime.backend.info, problem, shape)
    return _RowMeasurement(kernel, problem, shape, regime, None, StoppingRule(), limit).make_row_from_samples(
        samples, verdict, None, None
    )


def compute_max_possible_rate(kernel: AnyKernel, info: DeviceInfo, problem: Any, shape: Any) -> float | None:
    """Return the FLOP or bytes per second that the device cannot exceed with this problem and shape. Return None if
    that limit is unknown. Also return None for an approximate kernel. Such a kernel skips some of the work, but its
    rate counts all work, so the rate may exceed the limit.
    """
    return get_operation(problem.operation).find_max_possible_rate(info, problem, shape) if kernel.is_exact else None


def is_row_cut_short(row: Measurement, regime: Regime, deadline: float | None, now: float) -> bool:
    """Return whether a resumed run must measure a row again, because the time budget ended (at ``deadline``) before the
    row was complete.

    In the sustained regime, a row is complete if its launches took at least as long as one visit (one measurement of a
    kernel on a shape). In other regimes, a row is complete if it has enough samples.
    """
    if deadline is None or now < deadline or row.status not in ("ok", "implausible"):
        return False
    if isinstance(regime, SustainedRegime):
        return sum(row.samples) / max(len(row.samples), 1) * row.launch_count < regime.visit_seconds
    return len(row.samples) < StoppingRule.min_samples


def measure_launch_memory_bytes(backend: Backend, checked: CheckedKernel, problem: Any, shape: Any) -> int | None:
    """Measure the bytes of device memory that one launch needs: operands, saved tensors and what the launch allocates.
    Other memory of the process does not count. Return None if the backend does not report memory.
    """
    checked.poison_outputs()  # This also releases the outputs that earlier launches returned.
    before = backend.read_allocated_memory_bytes()
    if before is None:
        return None
    backend.reset_peak_memory()
    checked.launches[0]()
    backend.submit()
    backend.synchronize()
    peak = backend.read_peak_memory_bytes()
    operands = sum(buffer.nbytes for buffer in problem.list_buffers(shape).values())
    return None if peak is None else int(operands + checked.prepared.extra_bytes_per_set + peak - before)


def summarize_readings(readings: Sequence[SensorReading], watts: float | None) -> Conditions:
    """Summarize sensor readings as the conditions of a row: median clock, highest temperature, and the throttle reasons
    that occur in at least a tenth of the readings. ``watts``: the power from an energy counter; if None, the median
    power of the readings is used.
    """
    reasons = Counter(reason for reading in readings for reason in reading.throttle_reasons)
    return Conditions(
        clock_hz=_round_if_known(compute_median_ignoring_none([reading.clock_hz for reading in readings]), 0),
        watts=_round_if_known(
            watts if watts is not None else compute_median_ignoring_none([reading.watts for reading in readings]), 1
        ),
        celsius=_round_if_known(max((each.celsius for each in readings if each.celsius is not None), default=None), 1),
        throttle_reasons=tuple(sorted(reason for reason, count in reasons.items() if count * 10 >= len(readings))),
        throttle_shares={reason: round(reasons[reason] / len(readings), 4) for reason in sorted(reasons)},
    )


def _round_if_known(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
