"""Attention kernels over shapes, each row beside the product that the ceiling was measured with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.attention import AttentionProblem, AttentionShape
from mamf.attention_kernel import AttentionKernel
from mamf.backend import Backend, OperandPool
from mamf.ceiling import Ceiling
from mamf.errors import DeviceError, IncomparableError, UsageError, first_line
from mamf.finding_plan import FindPlan
from mamf.kernel import MatmulKernel
from mamf.measure import Measurement, cut_short, measure
from mamf.peaks import fastest_possible_flops
from mamf.regimes import Burst, Regime, StoppingRule, Sustained, regime_class

#: A kernel on a shape in a direction, dtype and regime: what a log holds, so that a resumed run can skip it.
Step = tuple[str, AttentionProblem, AttentionShape, str]
#: Ceilings by dtype and regime.
Ceilings = Mapping[tuple[str, str], Ceiling]
REGIMES = (Burst.name, Sustained.name)
#: How far the reference product may be from its ceiling before a row says so.
STATE_TOLERANCE = 0.01
#: Time for a visit of the reference product to the time for a row: it only has to tell whether the card strayed.
_REFERENCE_SHARE = 0.25
#: The schema of the run log from which on peak memory is of the kernel alone.
_MEMORY_OF_LAUNCH = 4


@dataclass(frozen=True)
class AttentionPlan:
    """Everything a sweep of attention kernels needs, and all that resuming it needs.

    ``kernels``: as they were asked for (``package.module:Class`` for one tried without installing it). ``flush``: evict
    the operands between launches (burst). ``seconds`` limits a row's measuring, ``budget_seconds`` the whole run.
    ``searches``: for the ceiling of each dtype, before all rows; none where ceilings are given, or left out.
    """

    shapes: tuple[AttentionShape, ...]
    problems: tuple[AttentionProblem, ...]
    kernels: tuple[str, ...]
    regimes: tuple[str, ...] = (Burst.name,)
    precision: float = 0.003
    seconds: float | None = None
    budget_seconds: float | None = None
    flush: bool = True
    searches: tuple[FindPlan, ...] = ()

    def __post_init__(self) -> None:
        for name in self.regimes:
            regime_class(name)
            if name not in REGIMES:
                raise UsageError(f"attention is measured in {' or '.join(REGIMES)}, not {name}: no ceiling is of it")

    def steps(self, held: Collection[Step] = ()) -> list[Step]:
        """What is left to measure; kernels of one shape follow one another."""
        done = frozenset(held)
        everything = (
            (regime, problem, shape, kernel)
            for regime in self.regimes
            for problem in self.problems
            for shape in self.shapes
            for kernel in self.kernels
        )
        return [step for step in everything if step not in done]


@dataclass
class AttentionSweep:
    """One run of a plan. ``results`` yields rows of attention and, around each, visits of the reference product.

    ``ceilings`` may be empty: then there is no share and no reference. ``references`` are the kernels that the ceilings
    were measured with; ``kernels`` are the plan's, in its order.
    """

    plan: AttentionPlan
    kernels: Sequence[AttentionKernel]
    backend: Backend
    ceilings: Ceilings = field(default_factory=dict)
    references: Mapping[str, MatmulKernel] = field(default_factory=dict)
    held: Collection[Step] = ()
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
                self.on_phase(f"{name} {problem.direction} {shape} {kernel_name}")
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
        kernel: AttentionKernel,
        problem: AttentionProblem,
        shape: AttentionShape,
        regime: Regime,
        pool: OperandPool,
        deadline: float | None,
    ) -> Measurement:
        return measure(kernel, problem, shape, regime, pool, self._rule(regime, deadline), self._limit(kernel, problem))

    def _limit(self, kernel: AttentionKernel, problem: AttentionProblem) -> float | None:
        """FLOP/s that cannot be; none for kernels that skip or approximate work, whose FLOP are counted as if dense."""
        return fastest_possible_flops(self.backend.info, problem.dtype) if kernel.is_exact else None

    def _reference(
        self, regime: Regime, problem: AttentionProblem, deadline: float | None, pools: dict[object, OperandPool]
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


def with_products(row: Measurement, kernel: AttentionKernel) -> Measurement:
    """A row that says what its products were computed in, where that is not its dtype."""
    if not kernel.product_dtypes:
        return row
    return replace(row, details={**row.details, "product_dtypes": " ".join(kernel.product_dtypes)})


def with_state(row: Measurement, before: Measurement | None, after: Measurement | None) -> Measurement:
    """A row that says what the reference product gave around it."""
    around = [each.best_tflops for each in (before, after) if each is not None]
    if not around or not row.ok:
        return row
    return replace(row, details={**row.details, "reference_tflops": float(f"{sum(around) / len(around):.6g}")})


def is_attention(row: Measurement) -> bool:
    """Whether a row is of attention, and not of a product measured for its ceiling."""
    return isinstance(row.shape, AttentionShape)


def has_memory_of_process(header: Mapping[str, Any], rows: Iterable[Measurement]) -> bool:
    """Whether the rows' memory holds everything that the process held, as in logs of before schema 4.

    ``header``: of a log, or of the run that goes on, which has no schema yet.
    """
    is_early = header.get("schema", _MEMORY_OF_LAUNCH) < _MEMORY_OF_LAUNCH
    return is_early and any(row.peak_memory_bytes is not None for row in rows)


def step_of(row: Measurement) -> Step:
    return row.regime, row.problem, row.shape, row.kernel


def mamfu(row: Measurement, ceilings: Ceilings) -> float | None:
    """A row as a share of the ceiling of its dtype and regime; None where there is no such ceiling."""
    ceiling = ceilings.get((row.problem.dtype, row.regime))
    if ceiling is None or row.summary is None:
        return None
    return ceiling.utilization(flop=row.flop, seconds=row.seconds, regime=row.regime)


def state(row: Measurement, ceilings: Ceilings) -> float | None:
    """How far the card was from its ceiling around a row: the reference product's figure to the ceiling's, less 1."""
    ceiling, seen = ceilings.get((row.problem.dtype, row.regime)), row.details.get("reference_tflops")
    return None if ceiling is None or seen is None else float(seen) / ceiling.tflops - 1


def require_same_card(ceiling: Ceiling, backend: Backend) -> None:
    """Raises IncomparableError when a ceiling is of another device: cards of one model differ by percents."""
    info = backend.info
    same = ceiling.device == info.name and (
        ceiling.uuid_hash is None or info.uuid_hash is None or ceiling.uuid_hash == info.uuid_hash
    )
    if not same:
        other = "another card of that name" if ceiling.device == info.name else ceiling.device
        raise IncomparableError(f"the ceiling is of {other}, not of this {info.name}: measure it here with 'mamf find'")
