"""Measures the steps of a strategy one after another, and remembers launches that crash the process.

A strategy is a generator: it yields a step and receives the row, or None if the budget has ended. The runner handles
the budget, memory, the rows of an interrupted run, and failures before the first shape.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from mamf.backend import Backend, OperandPool
from mamf.ceilings.ceiling import Ceiling, confirm_plan_ceilings
from mamf.engine.isolation import get_isolation
from mamf.engine.measure import ClockChoice, find_rate_limit, is_cut_short, measure
from mamf.engine.regimes import Regime, StoppingRule
from mamf.errors import (
    CRASHED,
    GIVEN_UP,
    LOST,
    DeviceError,
    DeviceLostError,
    PluginError,
    describe_error,
    get_plugin_errors,
)
from mamf.kernel import AnyKernel, Buffer, Problem
from mamf.logs.recording import Record
from mamf.measurement import Measurement
from mamf.plans import Plan, StepKey
from mamf.plugins.contracts import wrap_errors_of

_MAX_CRASHES = 3
#: A kernel, with the name that it was requested by.
NamedKernel = tuple[str, AnyKernel]


@dataclass
class Crashes:
    """The launches on one device that crashed their process.

    ``fatal_rows``: the rows of such launches. ``set_pending_row``: called before each launch with the row to log if the
    launch ends the process, and with None after the launch.
    """

    fatal_rows: Sequence[Measurement] = ()
    set_pending_row: Callable[[Measurement | None], None] = lambda row: None

    def explain_skip(self, asked: Measurement) -> str:
        """Return why a step must not be launched again, or an empty string if it may be launched."""
        of_kernel = [row for row in self.fatal_rows if row.kernel == asked.kernel]
        same = next((row.reason for row in of_kernel if row.step == asked.step), "")
        ends = sum(not row.reason.startswith(GIVEN_UP) for row in of_kernel)
        return same or (f"{GIVEN_UP}: not launched" if ends >= _MAX_CRASHES else "")


_CRASHES_BY_BACKEND: WeakKeyDictionary[Backend, Crashes] = WeakKeyDictionary()


def get_crashes(backend: Backend) -> Crashes:
    """Return the Crashes of an opened device."""
    return _CRASHES_BY_BACKEND.setdefault(backend, Crashes())


class Step(NamedTuple):
    """One measurement to make. ``rule``: has no deadline; the runner adds it. ``is_reported``: False if the strategy
    adds something to the row and then yields it itself.
    """

    kernel: AnyKernel
    problem: Problem
    shape: Any
    regime: Regime
    rule: StoppingRule
    phase: str = ""
    round: int = 0
    is_reference: bool = False
    is_reported: bool = True


#: What a strategy yields: steps to measure, and rows to report unchanged.
Steps = Generator[Step | Measurement, Measurement | None, None]


@dataclass
class Runner:
    """One run on an opened backend.

    - ``budget_seconds``: the time limit. It cuts a measurement short, except the first row that is not a reference.
    - ``earlier_rows``: the rows of an interrupted run, in order. The runner returns them instead of measuring again.
    - ``clocks``: chooses the rows whose true clock is measured.
    """

    backend: Backend
    budget_seconds: float | None = None
    earlier_rows: Collection[Measurement] = ()
    on_phase: Callable[[str], None] = lambda text: None
    clocks: ClockChoice = field(default_factory=ClockChoice)
    #: The number of steps that were skipped because the budget ended.
    skipped_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.begun = self.now()
        self.deadline = None if self.budget_seconds is None else self.begun + self.budget_seconds
        self._unused_rows = deque(self.earlier_rows)
        self._pools: dict[object, OperandPool] = {}
        self._has_figure = self._has_tried = False

    def run_steps(self, steps: Steps) -> Iterator[Measurement]:
        """Yield each row that is measured. Closing the generator discards the measurement in progress."""
        try:
            asked = next(steps)
            while True:
                if isinstance(asked, Measurement):
                    yield asked
                    asked = steps.send(None)
                    continue
                # A row of the interrupted run answers any step of the row's phase, even a step for another candidate.
                is_replayed = bool(self._unused_rows) and self._unused_rows[0].phase == asked.phase
                row = self._unused_rows.popleft() if is_replayed else None
                if row is None:
                    row = self._measure_step(asked)
                    if row is not None and asked.is_reported:
                        yield row
                asked = steps.send(row)
        except StopIteration:
            return
        finally:
            steps.close()
            self.release_pools()

    # -- for strategies ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self.backend.now()

    @property
    def is_replaying(self) -> bool:
        """Return whether rows of an interrupted run answer the next steps."""
        return bool(self._unused_rows)

    def is_budget_over(self) -> bool:
        """Whether the budget has ended and a step was tried, because preparing can take longer than the budget."""
        return self.deadline is not None and self._has_tried and self.now() >= self.deadline

    def has_next_step(
        self,
        regime: Regime,
        phase: str,
        until: float,
        number: int = 0,
        is_due: bool = False,
        problem: Problem | None = None,
    ) -> bool:
        """Whether a phase has another step. While rows of an interrupted run remain, they decide; after that, the
        remaining time decides.

        ``number``: the round. ``is_due``: the phase must not yet end because of time. ``problem``: the problem of the
        phase, in a run with several.
        """
        if self._unused_rows:
            held = self._unused_rows[0]
            is_of_phase = (held.regime, held.phase) == (regime.name, phase) and problem in (None, held.problem)
            return is_of_phase and (not number or held.round <= number)
        if self.is_budget_over():
            self.skipped_count += 1
        return not self.skipped_count and (is_due or self.now() < until)

    def start_regime(self, regime: Regime) -> Regime:
        """Start a regime and return it. Raises DeviceError if the device fails."""
        try:
            regime.start()
        except get_plugin_errors() as error:
            raise DeviceError(
                f"{self._device_label} failed before the first shape in {regime.name}: {describe_error(error)}"
            ) from error
        return regime

    def preallocate_operands(self, problem: Problem, needed: Iterable[Mapping[str, Buffer]]) -> None:
        """Allocate one buffer per operand, large enough for all later steps, because the device would cool while
        buffers grow between visits. Shapes that do not fit fail later, as rows. Raises DeviceError if the device fails.
        """
        self.on_phase("allocating operands")
        pool, largest = self.get_operand_pool(problem), dict[str, Buffer]()
        for buffers in needed:
            for name, buffer in buffers.items():
                largest[name] = max(buffer, largest.get(name, buffer))
        try:
            for name, buffer in largest.items():
                pool.take(name, *buffer)
        except get_plugin_errors() as error:
            if not self.backend.is_out_of_memory(error):
                raise DeviceError(f"{self._device_label} failed while allocating: {describe_error(error)}") from error
            pool.release()
        self.backend.release_memory()

    def get_operand_pool(self, problem: Problem) -> OperandPool:
        """Return the operand pool shared by problems with the same operation, data and seed."""
        key = (problem.operation, problem.data, problem.seed)
        if key not in self._pools:
            self._pools[key] = self.backend.operand_pool(problem.data, problem.seed)
        return self._pools[key]

    def release_pools(self) -> None:
        """Release all operands."""
        for pool in self._pools.values():
            pool.release()
        self._pools.clear()

    @property
    def _device_label(self) -> str:
        return f"the device of backend {self.backend.name}"

    # -- answering ---------------------------------------------------------------------------------------------------

    def _measure_step(self, step: Step) -> Measurement | None:
        """Measure a step. Returns None if the budget ended first. Raises DeviceLostError."""
        if self.is_budget_over():
            self.skipped_count += 1
            return None
        self._has_tried = self._has_tried or not step.is_reference
        kernel, problem = step.kernel, step.problem
        require_work(problem, step.shape)
        limit = find_rate_limit(kernel, self.backend.info, problem, step.shape)
        # The first row has no deadline. Otherwise a run with a very short budget would never get past it, however often
        # it is resumed. A visit of fixed length has no deadline either, because a part of it would not count.
        deadline = self.deadline if self._has_figure and not step.regime.fixed_visit_seconds else None
        rule = replace(step.rule, deadline=deadline)
        failed, crashes = make_failed_row(step), get_crashes(self.backend)
        if reason := crashes.explain_skip(failed):
            return replace(failed, reason=reason)
        crashes.set_pending_row(replace(failed, reason=CRASHED))
        try:
            wants_clock = self.clocks.make_clock_test(step.phase, step.regime.name, problem, step.shape, kernel.name)
            row = measure(
                kernel, problem, step.shape, step.regime, self.get_operand_pool(problem), rule, limit, wants_clock
            )
            row = get_isolation(self.backend).confirm_in_fresh_process(row, kernel, self.backend)
        finally:
            crashes.set_pending_row(None)
        if row.status == "failed":
            self._require_device(replace(failed, reason=f"{LOST} ({row.reason})"))
        if is_cut_short(row, step.regime, deadline, self.now()):
            self.skipped_count += 1
            return None
        self._has_figure = self._has_figure or (row.ok and not step.is_reference)
        return replace(row, phase=step.phase, round=step.round, is_reference=step.is_reference)

    def _require_device(self, lost: Measurement) -> None:
        """Raise DeviceLostError with the row ``lost`` if the device no longer answers."""
        try:
            self.backend.synchronize()
            self.backend.wait(self.backend.mark())
        except get_plugin_errors() as error:
            raise DeviceLostError(
                f"{lost.kernel} at {lost.shape} {lost.reason}; --resume continues in a new process", lost
            ) from error


@dataclass
class Setup:
    """A plan on an opened device.

    - ``kernels``: the plan's kernels, in its order.
    - ``rows``: all rows so far, including those of an interrupted run. The driver adds each row that a strategy yields.
    - ``on_phase``: called before each phase with a description of the phase.
    """

    plan: Plan
    backend: Backend
    kernels: Sequence[NamedKernel]
    rows: list[Measurement] = field(default_factory=list)
    on_phase: Callable[[str], None] = lambda text: None

    @property
    def kernel_objects(self) -> list[Any]:
        """The kernels without their names."""
        return [kernel for _, kernel in self.kernels]

    @property
    def remaining_steps(self) -> list[StepKey]:
        """The steps of the plan that no row answers yet, with kernels named as requested."""
        return self.plan.steps(self.answered_rows)

    @property
    def answered_rows(self) -> dict[StepKey, Measurement]:
        """The rows that answer steps of the plan, by step."""
        requested = {kernel.name: name for name, kernel in self.kernels}
        found = {}
        for row in self.rows:
            if row.operation in self.plan.operations and not row.phase and not row.is_reference:
                library = row.kernel.partition("[")[0]  # the row may name an algorithm
                name = requested.get(row.kernel) or requested.get(library, row.kernel)
                found[row.step._replace(kernel=name)] = row
        return found

    @property
    def confirmed_ceilings(self) -> dict[tuple[Any, str], Ceiling]:
        """The ceilings that the rows confirm, by problem and regime."""
        return confirm_plan_ceilings(self.plan, self.rows, self.backend.info, self.kernel_objects[0].name)


class Strategy(Protocol):
    """Chooses the steps of a run one after another, and has them measured."""

    @property
    def skipped_count(self) -> int:
        """The number of steps that were skipped because the budget ended. Known once ``results`` has ended."""

    def results(self) -> Iterator[Measurement | Record]:
        """Yield what the log of the run records. Closing the iterator discards the measurement in progress."""


class PlanStrategy(ABC):
    """A strategy for a plan. The runner measures its ``steps``. ``replayed``: the rows of an interrupted run, in order,
    which answer its steps again.
    """

    def __init__(self, setup: Setup, replayed: Iterable[Measurement] = ()) -> None:
        self.setup, self.plan, self.backend = setup, setup.plan, setup.backend
        self.replayed = list(replayed)

    @property
    def skipped_count(self) -> int:
        return self.run.skipped_count

    def results(self) -> Iterator[Measurement | Record]:
        self.run = Runner(
            self.backend, self.plan.budget_seconds, self.replayed, self.setup.on_phase, ClockChoice.from_plan(self.plan)
        )
        yield from self.run.run_steps(self.steps())

    @abstractmethod
    def steps(self) -> Steps:
        """Yield the steps that the runner (``self.run``) measures."""


def make_failed_row(step: Step) -> Measurement:
    """Return a row with the status ``failed`` for a step; the caller adds the reason."""
    kernel, regime = step.kernel.name, step.regime
    return Measurement(
        step.shape,
        kernel,
        step.problem,
        regime.name,
        regime.best_by,
        "failed",
        is_reference=step.is_reference,
        phase=step.phase,
        round=step.round,
    )


def require_work(problem: Problem, shape: Any) -> None:
    """Raise PluginError if an operation counts no work for a shape: its rows would have no rate."""
    label = f"operation {problem.operation}"
    with wrap_errors_of(label, f"the work of {shape}"):
        amount = problem.work(shape).amount
    if not 0 < amount < math.inf:
        raise PluginError(f"{label} is broken: the work of {shape} is {amount:g}, not a number above 0")
