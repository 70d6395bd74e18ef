"""Measure the steps of a strategy one after another, and remember launches that crash the process.

A strategy decides what a run measures next. Its generator yields a step (one kernel, problem, shape and regime) and
receives the row that answers the step, or None if the run's time budget has ended. The runner keeps to the budget,
allocates the operands, and handles failures before the first measurement. In a run that continues an interrupted one,
the runner first answers steps with the rows of the interrupted run, without measuring them again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from mamf.backend import Backend, OperandPool
from mamf.ceilings.ceiling import Ceiling, find_confirmed_ceilings
from mamf.engine.isolation import get_isolated_checker
from mamf.engine.measure import ClockPolicy, compute_max_possible_rate, is_row_cut_short, measure_row
from mamf.engine.regimes import Regime, StoppingRule
from mamf.errors import (
    CRASH_REASON,
    LOST_DEVICE_REASON,
    REPEATED_CRASH_REASON,
    DeviceError,
    DeviceLostError,
    PluginError,
    describe_error,
    get_catchable_plugin_errors,
)
from mamf.kernel import AnyKernel, Buffer, Problem, Work
from mamf.logs.recording import LogRecord
from mamf.measurement import Measurement
from mamf.plans import Plan, RowKey
from mamf.plugins.contracts import convert_plugin_errors

#: A kernel that has crashed the process this many times is not launched again.
_MAX_CRASHES_PER_KERNEL = 3
#: A row is skipped if it would probably exceed the budget by more than this share of the budget.
_MAX_BUDGET_EXCESS = 0.2
#: The name by which the user requested a kernel, and the kernel itself.
NamedKernel = tuple[str, AnyKernel]
#: A function that shows the user which step (shape and kernel, as text) a run prepares or, if True, now measures. The
#: preparation, which includes compilation and the check of a result, can take minutes.
StepReporter = Callable[[str, bool], None]


@dataclass
class CrashRecord:
    """A record of the launches on one device that crashed their process, so that a resumed run does not repeat them.

    - ``fatal_rows``: the rows of launches that ended their process or made the device unusable.
    - ``set_pending_row``: called before each measurement with the row that the log gets if a launch ends the process,
      and with None after the measurement.
    """

    fatal_rows: Sequence[Measurement] = ()
    set_pending_row: Callable[[Measurement | None], None] = lambda row: None

    def explain_why_not_to_launch(self, failed_row: Measurement) -> str:
        """Return why the kernel of ``failed_row`` must not be launched on the row's shape: the kernel crashed the
        process on this shape, or too often on other shapes. Return an empty string if the kernel may be launched.
        """
        kernel_rows = [row for row in self.fatal_rows if row.kernel == failed_row.kernel]
        row_reason = next((row.reason for row in kernel_rows if row.key == failed_row.key), "")
        crash_count = sum(not row.reason.startswith(REPEATED_CRASH_REASON) for row in kernel_rows)
        return row_reason or (
            f"{REPEATED_CRASH_REASON}, so mamf no longer launches it" if crash_count >= _MAX_CRASHES_PER_KERNEL else ""
        )


_CRASH_RECORD_BY_BACKEND: WeakKeyDictionary[Backend, CrashRecord] = WeakKeyDictionary()


def get_crash_record(backend: Backend) -> CrashRecord:
    """Return the record of the launches that crashed on an opened device. Create the record on first use."""
    return _CRASH_RECORD_BY_BACKEND.setdefault(backend, CrashRecord())


class Step(NamedTuple):
    """One measurement that a strategy asks the runner to make.

    - ``stopping_rule``: when to stop taking samples. The rule has no deadline; the runner adds one, the end of the
      run's budget.
    - ``phase``, ``round_number``, ``is_reference``: fields of the row (see Measurement).
    - ``is_reported``: True if the runner yields the row to the log; False if the strategy completes the row and yields
      it to the log itself.
    """

    kernel: AnyKernel
    problem: Problem
    shape: Any
    regime: Regime
    stopping_rule: StoppingRule
    phase: str = ""
    round_number: int = 0
    is_reference: bool = False
    is_reported: bool = True


#: The generator of a strategy. It yields steps to measure, and finished rows that the runner passes on to the log. For
#: each step, it receives the measured row, or None if the time budget is used up.
StepGenerator = Generator[Step | Measurement, Measurement | None, None]


@dataclass
class Runner:
    """One run on an opened device, which measures the steps of a strategy.

    - ``budget_seconds``: the time limit of the run. A measurement in progress then ends early, unless the run has no
      row yet. Reference rows, which only serve for comparison, do not count.
    - ``replayed_rows``: the rows of an interrupted run, in order. They answer the first steps, so that these steps
      are not measured again.
    - ``report_phase``: called before each phase with a description of the phase.
    - ``clock_policy``: decides for which rows the true clock is measured.
    - ``report_step``: called when the preparation of each step begins, and when its measurement begins.
    """

    backend: Backend
    budget_seconds: float | None = None
    replayed_rows: Collection[Measurement] = ()
    report_phase: Callable[[str], None] = lambda text: None
    clock_policy: ClockPolicy = field(default_factory=ClockPolicy)
    report_step: StepReporter = lambda step, is_prepared: None
    #: The number of steps that were skipped because the budget ended.
    skipped_step_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.start_time = self.now()
        self.deadline = None if self.budget_seconds is None else self.start_time + self.budget_seconds
        self._unused_rows = deque(self.replayed_rows)
        self._operand_pools: dict[object, OperandPool] = {}
        self._has_measured_row = self._has_tried_step = False
        self._seconds_per_byte: dict[tuple[str, str], list[float]] = defaultdict(list)

    def measure_steps(self, steps: StepGenerator) -> Iterator[Measurement]:
        """Measure the steps that a strategy yields, and yield the rows for the log. Closing the returned generator
        discards the measurement in progress.
        """
        try:
            next_item = next(steps)
            while True:
                row = None
                if isinstance(next_item, Measurement):
                    yield next_item
                # If the next row of the interrupted run belongs to the phase of this step, use that row as the result
                # of the step. The row may have another shape or kernel, because the interrupted run may have chosen
                # differently.
                elif self._unused_rows and self._unused_rows[0].phase == next_item.phase:
                    row = self._unused_rows.popleft()
                else:
                    row = self._measure_step(next_item)
                    if row is not None and next_item.is_reported:
                        yield row
                next_item = steps.send(row)
        except StopIteration:
            return
        finally:
            steps.close()
            self.release_pools()

    # -- methods that strategies call ---------------------------------------------------------------------------------

    def now(self) -> float:
        return self.backend.now()

    @property
    def is_replaying(self) -> bool:
        """True until all rows of an interrupted run have answered their steps."""
        return bool(self._unused_rows)

    def is_budget_over(self) -> bool:
        """Return whether the run's budget has ended. The budget never ends before the first step, so that a run
        measures something even if its preparation takes longer than the budget.
        """
        return self.deadline is not None and self._has_tried_step and self.now() >= self.deadline

    def has_next_step(
        self,
        regime: Regime,
        phase: str,
        end_time: float,
        round_number: int = 0,
        is_required: bool = False,
        problem: Problem | None = None,
    ) -> bool:
        """Return whether a phase of a search has another step.

        A new run continues the phase until ``end_time``. A resumed run first repeats the steps of the interrupted run:
        as long as unused rows of that run remain, the phase continues if the next of these rows belongs to it.

        - ``end_time``: the backend time (``Backend.now``) at which the phase ends.
        - ``round_number``: the number of the phase's round; 0 if the phase has no rounds.
        - ``is_required``: True if the phase must have this step even after ``end_time``.
        - ``problem``: the problem of the phase, in a run with several problems.
        """
        if self._unused_rows:
            next_row = self._unused_rows[0]
            is_of_phase = (next_row.regime, next_row.phase) == (regime.name, phase) and problem in (
                None,
                next_row.problem,
            )
            return is_of_phase and (not round_number or next_row.round_number <= round_number)
        if self.is_budget_over():
            self.skipped_step_count += 1
        return not self.skipped_step_count and (is_required or self.now() < end_time)

    def prepare_regime(self, regime: Regime) -> Regime:
        """Let a regime prepare the device before the first shape, and return the regime. Raise DeviceError if the
        device fails.
        """
        try:
            regime.prepare_device()
        except get_catchable_plugin_errors() as error:
            raise DeviceError(
                f"the device of backend {self.backend.name} failed before the first shape in the regime {regime.name}: "
                f"{describe_error(error)}"
            ) from error
        return regime

    def allocate_largest_operands(self, problem: Problem, needed_buffers: Iterable[Mapping[str, Buffer]]) -> None:
        """Allocate one buffer per operand that is large enough for all later steps. Otherwise mamf would have to
        enlarge buffers between measurements, and the device would cool meanwhile. If memory is too small, allocate
        nothing; the rows of large shapes then fail later. Raise DeviceError if the device fails.

        ``needed_buffers``: for each step, the buffer that it needs for each operand.
        """
        self.report_phase("allocating memory for operands")
        pool, largest = self.get_operand_pool(problem), dict[str, Buffer]()
        for buffers in needed_buffers:
            largest |= {name: max(buffer, largest.get(name, buffer)) for name, buffer in buffers.items()}
        try:
            for name, buffer in largest.items():
                pool.take_buffer(name, *buffer)
        except get_catchable_plugin_errors() as error:
            if not self.backend.is_out_of_memory(error):
                raise DeviceError(
                    f"the device of backend {self.backend.name} failed while mamf allocated operands: "
                    f"{describe_error(error)}"
                ) from error
            pool.release_buffers()
        self.backend.release_cached_memory()

    def get_operand_pool(self, problem: Problem) -> OperandPool:
        """Return the operand buffers for a problem. Problems with equal operation, data and seed share a pool."""
        key = (problem.operation, problem.data, problem.seed)
        if key not in self._operand_pools:
            self._operand_pools[key] = self.backend.make_operand_pool(problem.data, problem.seed)
        return self._operand_pools[key]

    def release_pools(self) -> None:
        """Release the memory of all operands of this run."""
        for pool in self._operand_pools.values():
            pool.release_buffers()
        self._operand_pools.clear()

    # -- measuring steps ---------------------------------------------------------------------------------------------

    def _measure_step(self, step: Step) -> Measurement | None:
        """Measure a step and return its row, or None if the run's budget ended first. Raise DeviceLostError if the
        device no longer answers.
        """
        if self.is_budget_over() or self._would_exceed_budget(step):
            self.skipped_step_count += 1
            return None
        self._has_tried_step = self._has_tried_step or not step.is_reference
        kernel, problem, start_time = step.kernel, step.problem, self.now()
        require_positive_work(problem, step.shape)
        limit = compute_max_possible_rate(kernel, self.backend.info, problem, step.shape)
        # The first row has no deadline. Otherwise a run with a very short budget would never complete the row, even if
        # the user resumes the run many times. A measurement of fixed length has no deadline either, because a shorter
        # measurement is useless.
        deadline = self.deadline if self._has_measured_row and not step.regime.fixed_visit_seconds else None
        rule = replace(step.stopping_rule, deadline=deadline)
        failed, crashes = make_failed_row(step), get_crash_record(self.backend)
        if reason := crashes.explain_why_not_to_launch(failed):
            return replace(failed, reason=reason)
        crashes.set_pending_row(replace(failed, reason=CRASH_REASON))
        label = f"{step.shape} {kernel.name}"
        self.report_step(label, False)
        try:
            should_measure_clock = partial(
                self.clock_policy.should_measure_clock, step.phase, step.regime.name, problem, step.shape, kernel.name
            )
            row = measure_row(
                kernel,
                problem,
                step.shape,
                step.regime,
                self.get_operand_pool(problem),
                rule,
                limit,
                should_measure_clock,
                partial(self.report_step, label, True),
            )
            row = get_isolated_checker(self.backend).confirm_row_in_fresh_process(row, kernel, self.backend)
        finally:
            crashes.set_pending_row(None)
        if row.status == "failed":
            self._require_answering_device(replace(failed, reason=f"{LOST_DEVICE_REASON} ({row.reason})"))
        if is_row_cut_short(row, step.regime, deadline, self.now()):
            self.skipped_step_count += 1
            return None
        self._has_measured_row = self._has_measured_row or (row.ok and not step.is_reference)
        if row.ok and row.work.nbytes:
            self._seconds_per_byte[problem.operation, kernel.name].append((self.now() - start_time) / row.work.nbytes)
        return replace(row, phase=step.phase, round_number=step.round_number, is_reference=step.is_reference)

    def _would_exceed_budget(self, step: Step) -> bool:
        """Return whether a step on a CPU, which includes filling and checking its operands, would probably exceed the
        budget by more than 20 %. The estimate is the lowest time per byte of the same kernel so far.
        """
        seconds_per_byte = self._seconds_per_byte[step.problem.operation, step.kernel.name]
        if self.budget_seconds is None or self.backend.is_accelerator or step.phase or len(seconds_per_byte) < 2:
            return False
        end_time = self.now() + min(seconds_per_byte) * require_positive_work(step.problem, step.shape).nbytes
        return end_time > self.start_time + (1 + _MAX_BUDGET_EXCESS) * self.budget_seconds

    def _require_answering_device(self, failed_row: Measurement) -> None:
        """Raise DeviceLostError if the device no longer answers. ``failed_row``: the row that the error passes to the
        log.
        """
        try:
            self.backend.synchronize()
            self.backend.wait_for_mark(self.backend.record_mark())
        except get_catchable_plugin_errors() as error:
            raise DeviceLostError(
                f"kernel {failed_row.kernel} at {failed_row.shape} {failed_row.reason}: continue in a new process with "
                "--resume",
                failed_row,
            ) from error


@dataclass
class RunSetup:
    """A plan of a run, the opened device that measures it, and the rows so far.

    - ``kernels``: the plan's kernels, in the order of the plan, each with the name by which it was requested.
    - ``rows``: all rows so far, including those of an interrupted run. The code that iterates over a strategy must
      append each row that the strategy yields.
    - ``report_phase``: called before each phase with a description of the phase.
    - ``report_step``: called when the preparation of each step begins, and when its measurement begins.
    """

    plan: Plan
    backend: Backend
    kernels: Sequence[NamedKernel]
    rows: list[Measurement] = field(default_factory=list)
    report_phase: Callable[[str], None] = lambda text: None
    report_step: StepReporter = lambda step, is_prepared: None

    @property
    def plan_kernels(self) -> list[Any]:
        """The plan's kernels in the order of the plan, without the names by which they were requested."""
        return [kernel for _, kernel in self.kernels]

    @property
    def remaining_row_keys(self) -> list[RowKey]:
        """The keys (regime, problem, shape and kernel) of the plan's rows that are not measured yet. Each key contains
        the name by which the user requested the kernel.
        """
        return self.plan.list_row_keys(self.row_by_key)

    @property
    def row_by_key(self) -> dict[RowKey, Measurement]:
        """The measured rows of the plan, by key (regime, problem, shape and kernel)."""
        requested = {kernel.name: name for name, kernel in self.kernels}
        rows = {}
        for row in self.rows:
            if row.operation in self.plan.operations and not row.phase and not row.is_reference:
                library = row.kernel.partition("[")[0]  # Drop the name of the algorithm, if it follows in brackets.
                name = requested.get(row.kernel) or requested.get(library, row.kernel)
                rows[row.key._replace(kernel=name)] = row
        return rows

    @property
    def confirmed_ceilings(self) -> dict[tuple[Any, str], Ceiling]:
        """The ceilings (highest rates that repeated measurements confirm) of this run's rows, by problem and regime."""
        requested = [
            (problem, regime, self.plan_kernels[0].name)
            for problem in self.plan.problems
            for regime in self.plan.regimes
        ]
        return find_confirmed_ceilings(self.rows, requested, self.backend.info.name, self.backend.info.uuid_hash)


class Strategy(Protocol):
    """The part of a run that chooses what to measure next, and yields what the log records."""

    @property
    def skipped_step_count(self) -> int:
        """The number of steps that were skipped because the budget ended. The number is final once ``yield_results``
        ends.
        """

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        """Measure the run's steps, and yield the rows and other records of its log. Closing the returned iterator
        discards the measurement in progress.
        """


class PlanStrategy(ABC):
    """A strategy that measures a plan: its ``yield_steps`` yields steps, and a ``Runner`` measures them.

    ``replayed_rows``: the rows of an interrupted run, in order. They answer the first steps.
    """

    def __init__(self, setup: RunSetup, replayed_rows: Iterable[Measurement] = ()) -> None:
        self.setup, self.plan, self.backend = setup, setup.plan, setup.backend
        self.replayed_rows = list(replayed_rows)

    @property
    def skipped_step_count(self) -> int:
        return self.runner.skipped_step_count

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        self.runner = Runner(
            self.backend,
            self.plan.budget_seconds,
            self.replayed_rows,
            self.setup.report_phase,
            ClockPolicy.make_from_plan(self.plan),
            self.setup.report_step,
        )
        yield from self.runner.measure_steps(self.yield_steps())

    @abstractmethod
    def yield_steps(self) -> StepGenerator:
        """Yield the steps that ``self.runner`` measures, one after another. Each ``yield`` of a step returns its row,
        or None if the run's budget has ended.
        """


def make_failed_row(step: Step) -> Measurement:
    """Return a row for a step that failed. The caller adds the reason to the row."""
    kernel, regime = step.kernel.name, step.regime
    return Measurement(
        step.shape,
        kernel,
        step.problem,
        regime.name,
        regime.ranking_statistic,
        "failed",
        is_reference=step.is_reference,
        phase=step.phase,
        round_number=step.round_number,
    )


def require_positive_work(problem: Problem, shape: Any) -> Work:
    """Return the work of a launch of this shape. Raise PluginError unless the problem's operation reports a positive
    number of FLOP or bytes. Without a positive number, a row of this shape would have no rate.
    """
    label = f"operation {problem.operation}"
    with convert_plugin_errors(label, f"the work of {shape}"):
        amount = (work := problem.compute_work(shape)).amount
    if not 0 < amount < math.inf:
        raise PluginError(
            f"{label} is broken: it reports {amount:g} as the work of a launch of {shape}, not a positive number"
        )
    return work
