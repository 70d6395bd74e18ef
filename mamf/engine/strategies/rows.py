"""Measure the kernels of a plan on given shapes. Just before and just after each row, measure the matmul that reached
the ceiling (the highest rate of the device). It shows how fast the card is at this time.
"""

from __future__ import annotations

import itertools
import statistics as stdlib_statistics
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from mamf.ceilings.ceiling import Ceiling, Ceilings
from mamf.engine.regimes import Regime, StoppingRule, get_regime_class
from mamf.engine.runner import PlanStrategy, RunSetup, Step, StepGenerator
from mamf.errors import UnsupportedError
from mamf.kernel import AnyKernel, Buffer, Problem
from mamf.logs.recording import LogRecord
from mamf.measurement import Measurement, find_rate
from mamf.operations.matmul.shapes import COMMON_MATMUL_SHAPE
from mamf.plans import ALGORITHM_PHASE, SWEEP, Plan, RowKey, SweepOptions

#: The time to measure the ceiling's matmul, as a share of the time of a row. A short measurement is enough to show
#: whether the card's speed has drifted.
_CEILING_VISIT_TIME_SHARE = 0.25
#: The maximum share of free memory for operands. The rest is for the buffer that flushes the cache and for workspaces
#: of the libraries.
_MAX_FREE_MEMORY_SHARE = 0.9
#: The time to measure one of a kernel's algorithms in order to find the fastest, as a share of the time of a row.
_ALGORITHM_VISIT_TIME_SHARE = 0.25
#: The number of recent rows from whose rates mamf predicts the time of the next row.
_RECENT_ROW_COUNT = 32
#: A generator that yields steps to measure, receives their rows, and returns a row or something derived from rows.
StepsReturningResult = Generator[Step | Measurement, Measurement | None, Any]


class RowsStrategy(PlanStrategy):
    """A strategy that measures every step (regime, problem, shape and kernel) of a plan that no row answers yet.

    - ``ceilings``: the highest rates of the device, with which reports compare rows; may be empty. The strategy
      measures the matmul of a row's ceiling before and after the row.
    - ``reference_kernels``: the kernels with which the ceilings were measured, by name. The strategy does not measure
      the matmul of a ceiling whose kernel is missing.
    - ``records``: records to write to the log before the rows.

    If several devices share a run, each device finds its own ceilings. All devices first measure the same shape, so
    that reports can compare rows of different devices.
    """

    #: True to measure each row with the fastest of its kernel's algorithms.
    must_rank_algorithms: ClassVar[bool] = False

    def __init__(
        self,
        setup: RunSetup,
        ceilings: Ceilings | None = None,
        reference_kernels: Mapping[str, AnyKernel] | None = None,
        records: Iterable[LogRecord] = (),
        replayed_rows: Iterable[Measurement] = (),
    ) -> None:
        super().__init__(setup, replayed_rows)
        self.ceilings = {} if ceilings is None else ceilings
        self.reference_kernels, self.records = reference_kernels or {}, records
        self.kernels: dict[str, AnyKernel] = dict(setup.kernels)
        self.options: SweepOptions = self.plan.options if self.plan.kind == SWEEP else SweepOptions()
        #: The FLOP or bytes per second of the latest rows, by kernel name and problem.
        self._recent_rates: dict[tuple[str, Problem], deque[float]] = {}

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        yield from self.records
        yield from super().yield_results()

    def yield_steps(self) -> StepGenerator:
        places = {shape: place for place, shape in enumerate(self.plan.list_assigned_shapes())}
        for name, keys_of_regime in itertools.groupby(self.setup.remaining_row_keys, key=lambda key: key.regime):
            keys = list(keys_of_regime)
            # In a run with a time budget, measure all problems (such as dtypes) on one shape and kernel before any
            # problem on the next shape or kernel.
            if self.plan.budget_seconds is not None:
                keys.sort(key=lambda key: (places[key.shape], self.plan.kernels.index(key.kernel)))
            yield from self.measure_rows(self.runner.prepare_regime(self.make_regime(name)), keys)

    def measure_rows(self, regime: Regime, keys: Iterable[RowKey]) -> StepGenerator:
        """Measure the rows with these keys, and yield them. Add to each row the rate of its ceiling's matmul."""
        dtype, before, measured_count = "", None, 0
        for key in keys:
            _, problem, shape, name = key
            if self._would_exceed_budget(key):
                self.runner.skipped_step_count += 1
                continue
            self.setup.report_phase(f"{regime.name} {shape} {name}")
            if problem.dtype != dtype:
                dtype, measured_count = problem.dtype, 0
                if self.plan.is_shared:
                    yield from self._measure_ceiling_matmul(regime, problem, COMMON_MATMUL_SHAPE)
                before = yield from self._measure_ceiling_matmul(regime, problem)
            if self.options.reference is not None and measured_count % self.options.reference_every == 0:
                yield from self._measure_reference_shape(regime, problem)
            kernel = yield from self._find_fastest_algorithm(self.kernels[name], problem, shape, regime)
            if kernel is None:
                continue
            row = yield Step(kernel, problem, shape, regime, self.make_stopping_rule(regime), is_reported=False)
            if row is None:
                continue
            measured_count += 1
            if row.summary is not None:
                self._recent_rates.setdefault((name, problem), deque(maxlen=_RECENT_ROW_COUNT)).append(
                    row.work_amount / row.seconds
                )
            after = (yield from self._measure_ceiling_matmul(regime, problem)) if row.ok else None
            yield add_matmul_details(row, kernel, before, after)
            before = after or before

    def _find_fastest_algorithm(
        self, kernel: AnyKernel, problem: Problem, shape: Any, regime: Regime
    ) -> StepsReturningResult:
        """Measure the kernel's algorithms on a shape, and return the kernel with its fastest algorithm. Return the
        kernel unchanged if this strategy ranks no algorithms, if the kernel has only one algorithm, if its algorithms
        must be compiled, or if none of them works. Return None if the budget of the run ended.

        Each algorithm gets a row with the phase ALGORITHM_PHASE. The caller must measure the fastest algorithm again,
        because the highest of several noisy rates is biased upward.
        """
        if not (self.must_rank_algorithms and kernel.has_cheap_variants):
            return kernel
        variants, rule = kernel.list_variants(self.backend, problem, shape), self.make_stopping_rule(regime)
        brief_rule = replace(rule, max_seconds=rule.max_seconds and rule.max_seconds * _ALGORITHM_VISIT_TIME_SHARE)
        fastest, best_rate = kernel, 0.0
        for variant in variants if len(variants) > 1 else ():
            row = yield Step(variant, problem, shape, regime, brief_rule, ALGORITHM_PHASE)
            if row is None:
                return None
            if row.ok and row.best_rate > best_rate:
                fastest, best_rate = variant, row.best_rate
        return fastest

    def _would_exceed_budget(self, key: RowKey) -> bool:
        """Return whether verifying and measuring a row with the minimum number of launches would exceed the run's
        budget, if the kernel reaches the rate of recent rows.
        """
        speeds, run = self._recent_rates.get((key.kernel, key.problem)), self.runner
        if run.deadline is None or not speeds:
            return run.is_budget_over()
        amount = (1 + StoppingRule.min_samples) * key.problem.compute_work(key.shape).amount
        return bool(amount / stdlib_statistics.median(speeds) > run.deadline - run.now())

    def _measure_ceiling_matmul(
        self, regime: Regime, problem: Problem, common_shape: Any = None
    ) -> StepsReturningResult:
        """Measure the matmul of the ceiling for this problem and regime, and return its row. Return None if the ceiling
        or its kernel is missing, or if the measurement fails.

        ``common_shape``: a shape to measure instead of the ceiling's shape. All devices of a shared run measure this
        shape, with the time limit of a row.
        """
        ceiling: Ceiling | None = find_rate(self.ceilings, problem.dtype, regime.name)
        if ceiling is None or (kernel := self.reference_kernels.get(ceiling.kernel)) is None:
            return None
        rule = self.make_stopping_rule(regime)
        if common_shape is None:
            rule = replace(rule, max_seconds=rule.max_seconds and rule.max_seconds * _CEILING_VISIT_TIME_SHARE)
        row = yield Step(
            kernel,
            ceiling.problem,
            common_shape or ceiling.shape,
            regime,
            rule,
            is_reference=True,
            is_reported=False,
        )
        if row is None or not row.ok:
            return None
        yield row
        return row

    def _measure_reference_shape(self, regime: Regime, problem: Problem) -> StepGenerator:
        """Measure the plan's reference shape, which shows drift of the device, with the first kernel that succeeds."""
        shape, rule = self.options.reference, self.make_stopping_rule(regime)
        for kernel in self.kernels.values():
            row = yield Step(kernel, problem, shape, regime, rule, is_reference=True, is_reported=False)
            if row is not None and row.ok:
                yield row
                return

    def make_stopping_rule(self, regime: Regime) -> StoppingRule:
        return StoppingRule(self.plan.precision, self.plan.seconds or regime.default_row_seconds)

    def make_regime(self, name: str) -> Regime:
        return get_regime_class(name).make_from_plan(self.backend, self.plan)


class OneKernelStrategy(RowsStrategy):
    """A strategy that measures one kernel, on each shape with the fastest of the kernel's algorithms. It allocates the
    operands in advance, large enough for all shapes.
    """

    must_rank_algorithms = True

    def yield_steps(self) -> StepGenerator:
        """Allocate the operands, then yield the steps of the plan. Raise UnsupportedError before anything is allocated
        if the kernel does not support the plan's problem.
        """
        (kernel,), problem = self.setup.plan_kernels, self.plan.problem
        if reason := kernel.explain_unsupported_problem(self.backend, problem):
            raise UnsupportedError(reason)
        if self.setup.remaining_row_keys:
            cache, free = self.backend.info.cache_bytes, self.backend.read_free_memory_bytes()
            self.runner.allocate_largest_operands(problem, [compute_largest_buffers(self.plan, cache, free)])
        yield from super().yield_steps()

    def make_stopping_rule(self, regime: Regime) -> StoppingRule:
        return StoppingRule(self.plan.precision, self.plan.seconds or regime.default_sweep_row_seconds)


def compute_largest_buffers(plan: Plan, cache_bytes: int | None, free_bytes: int | None = None) -> dict[str, Buffer]:
    """Return one buffer per operand, by the operand's name. The buffers are large enough for all shapes and regimes of
    the plan whose operands fit in ``free_bytes`` (None: unknown). The rows of larger shapes fail later.
    """
    largest_buffers: dict[str, Buffer] = {}
    reference = plan.options.reference
    for shape in sorted([*plan.shapes, *([] if reference is None else [reference])], key=plan.problem.count_bytes):
        for regime_class in map(get_regime_class, plan.regimes):
            sets = regime_class.choose_operand_set_count(plan.problem, shape, cache_bytes)
            buffers = plan.problem.list_buffers(shape, sets, regime_class.must_rewrite_output)
            larger_buffers = largest_buffers | {
                name: max(each, largest_buffers.get(name, each)) for name, each in buffers.items()
            }
            total = sum(buffer.nbytes for buffer in larger_buffers.values())
            if free_bytes is None or total <= free_bytes * _MAX_FREE_MEMORY_SHARE:
                largest_buffers = larger_buffers
    return largest_buffers


def add_matmul_details(row: Measurement, kernel: AnyKernel, *ceiling_visits: Measurement | None) -> Measurement:
    """Return a row with additional details: the dtypes of its kernel's matmuls, if they differ from the problem's, and
    the mean rate of the ceiling's matmul before and after the row (``ceiling_visits``).
    """
    details = dict(row.details)
    if kernel.matmul_dtypes:
        details["product_dtypes"] = " ".join(kernel.matmul_dtypes)
    visits = [each.best_rate for each in ceiling_visits if each is not None]
    if visits and row.ok:
        details["reference_tflops"] = float(f"{sum(visits) / len(visits):.6g}")
    return replace(row, details=details)
