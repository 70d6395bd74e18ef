"""Kernels of one operation over shapes, each row beside the product that its ceiling was measured with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import Backend, OperandPool
from mamf.ceilings.share import Ceilings
from mamf.discovery import operation
from mamf.errors import DeviceError, first_line
from mamf.kernel import AnyKernel, Problem
from mamf.measure import cut_short, measure
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.peaks import fastest_possible_flops
from mamf.plans import KernelsPlan, Row
from mamf.regimes import Burst, Regime, StoppingRule, Sustained, regime_class

#: Time for a visit of the reference product to the time for a row: it only has to tell whether the card strayed.
_REFERENCE_SHARE = 0.25


@dataclass
class KernelsSweep:
    """One run of a plan. ``results`` yields rows of attention and, around each, visits of the reference product.

    ``ceilings`` may be empty: then there is no share and no reference. ``references`` are the kernels that the ceilings
    were measured with; ``kernels`` are the plan's, in its order.
    """

    plan: KernelsPlan
    kernels: Sequence[AnyKernel]
    backend: Backend
    ceilings: Ceilings = field(default_factory=dict)
    references: Mapping[str, MatmulKernel] = field(default_factory=dict)
    held: Collection[Row] = ()
    on_phase: Callable[[str], None] = lambda text: None
    left_out: int = field(default=0, init=False)

    def results(self) -> Iterator[Measurement]:
        """Measure every step that is not held."""
        by_name = dict(zip(self.plan.kernels, self.kernels, strict=True))
        budget = self.plan.budget_seconds
        deadline = None if budget is None else self.backend.now() + budget
        regime: Regime | None = None
        context: tuple[object, ...] | None = None
        before: Measurement | None = None
        pools: dict[object, OperandPool] = {}
        try:
            for name, problem, shape, kernel_name in self.plan.steps(self.held):
                if regime is None or regime.name != name:
                    regime = self._start(name)
                    context = None
                if deadline is not None and self.backend.now() >= deadline:
                    self.left_out += 1
                    continue
                self.on_phase(f"{name} {shape} {kernel_name}")
                pool = self._pool(pools, problem)
                if (name, problem.dtype) != context:
                    context = (name, problem.dtype)
                    before = self._reference(regime, problem, deadline, pools)
                    if before is not None:
                        yield before
                row = self._measure(by_name[kernel_name], problem, shape, regime, pool, deadline)
                if cut_short(row, deadline, self.backend):
                    self.left_out += 1
                    continue
                after = self._reference(regime, problem, deadline, pools) if row.ok else None
                if after is not None:
                    yield after
                yield with_state(with_products(row, by_name[kernel_name]), before, after)
                before = after or before
        finally:
            for each in pools.values():
                each.release()

    def _pool(self, pools: dict[object, OperandPool], problem: Any) -> OperandPool:
        key = (type(problem), problem.data, problem.seed)
        if key not in pools:
            pools[key] = self.backend.operand_pool(problem.data, problem.seed)
        return pools[key]

    def _measure(
        self,
        kernel: AnyKernel,
        problem: Problem,
        shape: Any,
        regime: Regime,
        pool: OperandPool,
        deadline: float | None,
    ) -> Measurement:
        return measure(kernel, problem, shape, regime, pool, self._rule(regime, deadline), self._limit(kernel, problem))

    def _limit(self, kernel: AnyKernel, problem: Problem) -> float | None:
        """FLOP/s that cannot be; none for kernels that skip or approximate work, whose FLOP are counted as if dense."""
        return operation(self.plan.operation).fastest_possible(self.backend.info, problem) if kernel.is_exact else None

    def _reference(
        self, regime: Regime, problem: Problem, deadline: float | None, pools: dict[object, OperandPool]
    ) -> Measurement | None:
        """The ceiling's own product, now: numerator and denominator share the card's state."""
        ceiling = self.ceilings.get((problem.dtype, regime.name))
        if ceiling is None:
            return None
        kernel, pool = self.references[ceiling.kernel], self._pool(pools, ceiling.problem)
        limit = fastest_possible_flops(self.backend.info, ceiling.problem.dtype)
        rule = self._rule(regime, deadline)
        brief = replace(rule, seconds=rule.seconds and rule.seconds * _REFERENCE_SHARE)
        row = measure(kernel, ceiling.problem, ceiling.shape, regime, pool, brief, limit)
        return replace(row, is_reference=True) if row.ok else None

    def _rule(self, regime: Regime, deadline: float | None) -> StoppingRule:
        # In sustained a row is a visit of 2 s: the reference's visits beside it take as long again.
        usual = Sustained.shortest_seconds if regime.name == Sustained.name else regime.default_seconds
        return StoppingRule(self.plan.precision, self.plan.seconds or usual, deadline=deadline)

    def _start(self, name: str) -> Regime:
        regime: Regime = (
            Burst(self.backend, self.plan.flush) if name == Burst.name else regime_class(name)(self.backend)
        )
        try:
            regime.start()
        except Exception as error:
            raise DeviceError(f"the device failed before the first shape in {name}: {first_line(error)}") from error
        return regime


def with_products(row: Measurement, kernel: AnyKernel) -> Measurement:
    """A row that says what its products were computed in, where that is not its dtype."""
    if not kernel.product_dtypes:
        return row
    return replace(row, details={**row.details, "product_dtypes": " ".join(kernel.product_dtypes)})


def with_state(row: Measurement, before: Measurement | None, after: Measurement | None) -> Measurement:
    """A row that says what the reference product gave around it."""
    around = [each.best_rate for each in (before, after) if each is not None]
    if not around or not row.ok:
        return row
    return replace(row, details={**row.details, "reference_tflops": float(f"{sum(around) / len(around):.6g}")})
