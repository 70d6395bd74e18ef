"""Kernels of one operation over shapes, each row beside the product that its ceiling was measured with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, Ceilings
from mamf.engine.clocks import ClockChoice
from mamf.engine.regimes import Burst, Regime, StoppingRule, Sustained, regime_class
from mamf.engine.runner import Runner, Step, Steps
from mamf.kernel import AnyKernel, Problem
from mamf.logs.recording import Record
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import COMMON_PRODUCT
from mamf.plans import Plan, StepKey
from mamf.rate import find_rate

#: Time for a visit of the reference product to the time for a row: it only has to show whether the card drifted.
_REFERENCE_SHARE = 0.25


@dataclass
class KernelsSweep:
    """One run of a plan. ``results`` yields rows of attention and, around each, visits of the reference product.

    ``ceilings`` may be empty: then there is no share and no reference. ``references`` are the kernels that the ceilings
    were measured with; a ceiling whose kernel is missing has no reference. ``kernels`` are the plan's, in its order.
    ``records``: what the log gets before the rows.
    Devices that share a run find their own ceilings, and visit common rows first that make their rows comparable.
    """

    plan: Plan
    kernels: Sequence[AnyKernel]
    backend: Backend
    ceilings: Ceilings = field(default_factory=dict)
    references: Mapping[str, AnyKernel] = field(default_factory=dict)
    held: Collection[StepKey] = ()
    on_phase: Callable[[str], None] = lambda text: None
    records: Iterable[Record] = ()

    def results(self) -> Iterator[Measurement | Record]:
        """Measure every step that is not held."""
        yield from self.records
        self._run = Runner(
            self.backend, self.plan.budget_seconds, on_phase=self.on_phase, clocks=ClockChoice.of(self.plan)
        )
        yield from self._run.results(self._steps(self._run))

    @property
    def left_out(self) -> int:
        """Rows that the end of the budget left out, once ``results`` has ended."""
        return self._run.left_out

    def _steps(self, run: Runner) -> Steps:
        for name, own in itertools.groupby(self.plan.steps(self.held), key=lambda step: step[0]):
            yield from self._rows(run, run.start(self._regime(name)), own)

    def _rows(self, run: Runner, regime: Regime, steps: Iterable[StepKey]) -> Steps:
        """Steps of one regime."""
        by_name = dict(zip(self.plan.kernels, self.kernels, strict=True))
        context: str | None = None
        before: Measurement | None = None
        for name, problem, shape, kernel_name in steps:
            if run.is_over():
                run.left_out += 1
                continue
            self.on_phase(f"{name} {shape} {kernel_name}")
            kernel = by_name[kernel_name]
            if problem.dtype != context:
                context = problem.dtype
                if self.plan.is_shared:
                    yield from self._common_rows(regime, problem)
                before = yield from self._reference(regime, problem)
            row = yield Step(kernel, problem, shape, regime, self._rule(regime), is_reported=False)
            if row is None:
                continue
            after = (yield from self._reference(regime, problem)) if row.ok else None
            yield with_state(with_products(row, kernel), before, after)
            before = after or before

    def _reference(
        self, regime: Regime, problem: Problem
    ) -> Generator[Step | Measurement, Measurement | None, Measurement | None]:
        """Measure the ceiling's product now, so that a row and its ceiling share the state of the card."""
        ceiling, kernel = self._ceiling_and_kernel(problem.dtype, regime.name)
        if kernel is None or ceiling is None:
            return None
        rule = self._rule(regime)
        brief = replace(rule, seconds=rule.seconds and rule.seconds * _REFERENCE_SHARE)
        row = yield Step(kernel, ceiling.problem, ceiling.shape, regime, brief, is_reference=True, is_reported=False)
        if row is None or not row.ok:
            return None
        yield row
        return row

    def _ceiling_and_kernel(self, dtype: str, regime: str) -> tuple[Ceiling | None, AnyKernel | None]:
        """The ceiling of a dtype in a regime, and its kernel."""
        ceiling = find_rate(self.ceilings, dtype, regime)
        return ceiling, None if ceiling is None else self.references.get(ceiling.kernel)

    def _common_rows(self, regime: Regime, problem: Problem) -> Steps:
        """A product by the ceiling's kernel, if there is one: rows are shares of a ceiling of products. Then the plan's
        reference by the first kernel that supports it.
        """
        visits = [(kernel, problem, self.plan.options.reference) for kernel in self.kernels]
        ceiling, kernel = self._ceiling_and_kernel(problem.dtype, regime.name)
        if ceiling and kernel:
            visits.insert(0, (kernel, ceiling.problem, COMMON_PRODUCT))
        for kernel, of, shape in visits:
            row = yield Step(kernel, of, shape, regime, self._rule(regime), is_reference=True, is_reported=False)
            if row is not None and row.ok:
                yield row
                if of is problem:
                    return

    def _rule(self, regime: Regime) -> StoppingRule:
        # In sustained a row is a visit of 2 s: the reference's visits beside it take as long again.
        usual = Sustained.shortest_seconds if regime.name == Sustained.name else regime.default_seconds
        return StoppingRule(self.plan.precision, self.plan.seconds or usual)

    def _regime(self, name: str) -> Regime:
        return Burst(self.backend, self.plan.flush) if name == Burst.name else regime_class(name)(self.backend)


def with_products(row: Measurement, kernel: AnyKernel) -> Measurement:
    """The row with the dtypes of its products, if they differ from its own."""
    if not kernel.product_dtypes:
        return row
    return replace(row, details={**row.details, "product_dtypes": " ".join(kernel.product_dtypes)})


def with_state(row: Measurement, before: Measurement | None, after: Measurement | None) -> Measurement:
    """The row with the mean rate of the reference visits before and after it."""
    around = [each.best_rate for each in (before, after) if each is not None]
    if not around or not row.ok:
        return row
    return replace(row, details={**row.details, "reference_tflops": float(f"{sum(around) / len(around):.6g}")})
