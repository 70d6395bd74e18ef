"""Measures the kernels of a plan on given shapes, each next to the matmul of its ceiling."""

from __future__ import annotations

import itertools
import statistics as stdlib_statistics
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mamf.ceilings.ceiling import Ceiling, Ceilings
from mamf.engine.regimes import Regime, StoppingRule, get_regime_class
from mamf.engine.runner import PlanStrategy, Setup, Step, Steps
from mamf.errors import UnsupportedError
from mamf.kernel import AnyKernel, Buffer, Problem
from mamf.logs.recording import Record
from mamf.measurement import Measurement, find_rate
from mamf.operations.matmul.shapes import COMMON_MATMUL_SHAPE
from mamf.plans import ALGORITHM, SWEEP, Plan, StepKey, SweepOptions

#: Time for a visit to the ceiling's matmul, relative to a row's. The visit only has to show whether the card drifted.
_PRODUCT_SHARE = 0.25
#: The share of free memory for operands. The flush buffer and the libraries' workspaces need the rest.
_SHARE_OF_MEMORY = 0.9
#: Time to rank one of a kernel's algorithms, relative to a row.
_RANKING_SHARE = 0.25
#: The number of recent rows from which the speed of the next row is predicted.
_RECENT_ROWS = 32
#: Steps, as a generator that returns a row or something derived from rows.
StepsWithResult = Generator[Step | Measurement, Measurement | None, Any]


class RowsStrategy(PlanStrategy):
    """Measures every step of a plan that no row answers yet.

    - ``ceilings``: rows are shares of these; may be empty. The matmul of its ceiling is measured before and after each
      row.
    - ``references``: the kernels of the ceilings, by name. A ceiling whose kernel is missing is not measured again.
    - ``records``: records that the log gets before the rows.

    If several devices share a run, each device finds its own ceilings and first measures common rows, so that rows of
    different devices can be compared.
    """

    #: Whether each row is measured with the fastest of its kernel's algorithms.
    must_rank_algorithms: ClassVar[bool] = False

    def __init__(
        self,
        setup: Setup,
        ceilings: Ceilings | None = None,
        references: Mapping[str, AnyKernel] | None = None,
        records: Iterable[Record] = (),
        replayed: Iterable[Measurement] = (),
    ) -> None:
        super().__init__(setup, replayed)
        self.ceilings = {} if ceilings is None else ceilings
        self.references, self.records = references or {}, records
        self.kernels: dict[str, AnyKernel] = dict(setup.kernels)
        self.options: SweepOptions = self.plan.options if self.plan.kind == SWEEP else SweepOptions()
        #: FLOP or bytes per second of the latest rows, by kernel and problem.
        self._speeds: dict[tuple[str, Problem], deque[float]] = {}

    def results(self) -> Iterator[Measurement | Record]:
        yield from self.records
        yield from super().results()

    def steps(self) -> Steps:
        for name, steps in itertools.groupby(self.setup.remaining_steps, key=lambda step: step.regime):
            yield from self.measure_rows(
                self.run.start_regime(self.make_regime(name)), self._alternate_problems(list(steps))
            )

    def _alternate_problems(self, steps: list[StepKey]) -> list[StepKey]:
        """Order steps so that, under a budget, all problems are measured on a shape and kernel before any problem is
        measured on the next.
        """
        if self.plan.budget_seconds is None:
            return steps
        places = {shape: place for place, shape in enumerate(self.plan.own_shapes())}
        return sorted(steps, key=lambda step: (places[step.shape], self.plan.kernels.index(step.kernel)))

    def measure_rows(self, regime: Regime, steps: Iterable[StepKey]) -> Steps:
        """Measure these steps, all of one regime."""
        dtype, before, done = "", None, 0
        for step in steps:
            _, problem, shape, name = step
            if self._would_overrun(step):
                self.run.skipped_count += 1
                continue
            self.setup.on_phase(f"{regime.name} {shape} {name}")
            if problem.dtype != dtype:
                dtype, done = problem.dtype, 0
                if self.plan.is_shared:
                    yield from self._measure_ceiling_matmul(regime, problem, COMMON_MATMUL_SHAPE)
                before = yield from self._measure_ceiling_matmul(regime, problem)
            if self.options.reference is not None and done % self.options.reference_every == 0:
                yield from self._measure_reference(regime, problem)
            kernel: AnyKernel | None = self.kernels[name]
            if self.must_rank_algorithms:
                kernel = yield from self._find_fastest_algorithm(self.kernels[name], problem, shape, regime)
            if kernel is None:
                continue
            row = yield Step(kernel, problem, shape, regime, self.make_rule(regime), is_reported=False)
            if row is None:
                continue
            done += 1
            if row.summary is not None:
                self._speeds.setdefault((name, problem), deque(maxlen=_RECENT_ROWS)).append(row.amount / row.seconds)
            after = (yield from self._measure_ceiling_matmul(regime, problem)) if row.ok else None
            yield add_matmul_details(row, kernel, before, after)
            before = after or before

    def _find_fastest_algorithm(
        self, kernel: AnyKernel, problem: Problem, shape: Any, regime: Regime
    ) -> StepsWithResult:
        """Find the kernel's fastest algorithm for a shape. Return the kernel itself if it has only one algorithm, if
        the other algorithms must be compiled, or if none works; None if the budget ended.

        Each algorithm gets a row with the phase ALGORITHM, in the same regime. The fastest algorithm is then measured
        again for the row of the step, because the fastest of several rows is partly lucky.
        """
        if not kernel.has_cheap_variants:
            return kernel
        found, rule = kernel.variants(self.backend, problem, shape), self.make_rule(regime)
        brief = replace(rule, seconds=rule.seconds and rule.seconds * _RANKING_SHARE)
        fastest, best_rate = kernel, 0.0
        for variant in found if len(found) > 1 else ():
            row = yield Step(variant, problem, shape, regime, brief, ALGORITHM)
            if row is None:
                return None
            if row.ok and row.best_rate > best_rate:
                fastest, best_rate = variant, row.best_rate
        return fastest

    def _would_overrun(self, step: StepKey) -> bool:
        """Return whether verification and the minimum number of launches would exceed the budget, at the speed of
        recent rows.
        """
        speeds, run = self._speeds.get((step.kernel, step.problem)), self.run
        if run.deadline is None or not speeds:
            return run.is_budget_over()
        min_launches = 1 + StoppingRule.min_samples
        seconds = min_launches * step.problem.work(step.shape).amount / stdlib_statistics.median(speeds)
        return bool(seconds > run.deadline - run.now())

    def _measure_ceiling_matmul(self, regime: Regime, problem: Problem, common: Any = None) -> StepsWithResult:
        """Measure the ceiling's matmul now, so that a row is compared with it in the same state of the card.

        ``common``: a shape to use instead of the ceiling's. All devices of a shared run measure it, for as long as a
        row.
        """
        ceiling: Ceiling | None = find_rate(self.ceilings, problem.dtype, regime.name)
        if ceiling is None or (kernel := self.references.get(ceiling.kernel)) is None:
            return None
        rule = self.make_rule(regime)
        if common is None:
            rule = replace(rule, seconds=rule.seconds and rule.seconds * _PRODUCT_SHARE)
        shape = common or ceiling.shape
        row = yield Step(kernel, ceiling.problem, shape, regime, rule, is_reference=True, is_reported=False)
        if row is None or not row.ok:
            return None
        yield row
        return row

    def _measure_reference(self, regime: Regime, problem: Problem) -> Steps:
        """Measure the plan's reference shape with the first kernel that supports it."""
        shape, rule = self.options.reference, self.make_rule(regime)
        for kernel in self.kernels.values():
            row = yield Step(kernel, problem, shape, regime, rule, is_reference=True, is_reported=False)
            if row is not None and row.ok:
                yield row
                return

    def make_rule(self, regime: Regime) -> StoppingRule:
        return StoppingRule(self.plan.precision, self.plan.seconds or regime.usual_seconds)

    def make_regime(self, name: str) -> Regime:
        return get_regime_class(name).make_from_plan(self.backend, self.plan)


class OneKernelStrategy(RowsStrategy):
    """Measures one kernel, on each shape with the fastest of its algorithms. Operands are allocated in advance, large
    enough for all shapes.
    """

    must_rank_algorithms = True

    def steps(self) -> Steps:
        """Yield the steps. Raises UnsupportedError before anything is allocated if the kernel does not support the
        problem.
        """
        (kernel,), problem = self.setup.kernel_objects, self.plan.problem
        if reason := kernel.unsupported(self.backend, problem):
            raise UnsupportedError(reason)
        if self.setup.remaining_steps:
            cache, free = self.backend.info.cache_bytes, self.backend.free_memory()
            self.run.preallocate_operands(problem, [compute_largest_buffers(self.plan, cache, free)])
        yield from super().steps()

    def make_rule(self, regime: Regime) -> StoppingRule:
        return StoppingRule(self.plan.precision, self.plan.seconds or regime.default_seconds)


def compute_largest_buffers(plan: Plan, cache_bytes: int | None, free_memory: int | None = None) -> dict[str, Buffer]:
    """Return buffers large enough for every shape and regime that fits in memory. Other shapes fail later, as rows."""
    largest: dict[str, Buffer] = {}
    reference = plan.options.reference
    for shape in sorted([*plan.shapes, *([] if reference is None else [reference])], key=plan.problem.nbytes):
        for kind in map(get_regime_class, plan.regimes):
            sets = kind.count_sets(plan.problem, shape, cache_bytes)
            wanted = dict(largest)
            for name, buffer in plan.problem.buffers(shape, sets, kind.must_rewrite_output).items():
                wanted[name] = max(buffer, wanted.get(name, buffer))
            total = sum(buffer.nbytes for buffer in wanted.values())
            if free_memory is None or total <= free_memory * _SHARE_OF_MEMORY:
                largest = wanted
    return largest


def add_matmul_details(row: Measurement, kernel: AnyKernel, *around: Measurement | None) -> Measurement:
    """Add to a row the dtypes of its matmuls, if they differ from its own, and the mean rate of the ceiling's matmul
    before and after it (``around``).
    """
    details = dict(row.details)
    if kernel.product_dtypes:
        details["product_dtypes"] = " ".join(kernel.product_dtypes)
    visits = [each.best_rate for each in around if each is not None]
    if visits and row.ok:
        details["reference_tflops"] = float(f"{sum(visits) / len(visits):.6g}")
    return replace(row, details=details)
