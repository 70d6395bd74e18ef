"""Given shapes -> a stream of measurements, in an order that drift cannot pose as a trend in."""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from mamf.backend import Backend, OperandPool
from mamf.errors import DeviceError, UnsupportedError, first_line
from mamf.kernel import Buffer
from mamf.measure import cut_short, measure
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.operations.matmul.shapes import MatmulShape
from mamf.peaks import fastest_possible_flops
from mamf.plans import Held, Plan
from mamf.regimes import Classic, Regime, StoppingRule, regime_class

# What operands may take of the free memory: the flush buffer and the libraries' workspaces need the rest.
_SHARE_OF_MEMORY = 0.9
# Whose speed foretells the next shape's.
_RECENT_SHAPES = 32


def operand_bytes(plan: Plan, shape: MatmulShape, cache_bytes: int | None) -> int:
    """Device memory that a shape's operands take in the most demanding of the regimes."""
    return max(sum(b.nbytes for b in _buffers(plan, shape, regime, cache_bytes).values()) for regime in plan.regimes)


def _buffers(plan: Plan, shape: MatmulShape, regime: str, cache_bytes: int | None) -> dict[str, Buffer]:
    kind = regime_class(regime)
    return plan.problem.buffers(shape, kind.sets(plan.problem, shape, cache_bytes), kind.needs_rewrite)


def largest_buffers(plan: Plan, cache_bytes: int | None, free_memory: int | None) -> dict[str, Buffer]:
    """Buffers that serve every shape; shapes too large for the memory are left to fail on their own."""
    largest: dict[str, Buffer] = {}
    for shape in sorted(plan.measured_shapes(), key=plan.problem.nbytes):
        for regime in plan.regimes:
            wanted = {**largest}
            for name, buffer in _buffers(plan, shape, regime, cache_bytes).items():
                wanted[name] = max(buffer, wanted.get(name, buffer))
            total = sum(buffer.nbytes for buffer in wanted.values())
            if free_memory is None or total <= free_memory * _SHARE_OF_MEMORY:
                largest = wanted
    return largest


@dataclass
class Sweep:
    """One run of a plan on an opened backend. ``results`` yields as it measures; breaking off loses only the shape in
    flight.
    """

    plan: Plan
    kernel: MatmulKernel
    backend: Backend
    held: Collection[Held] = ()
    on_phase: Callable[[str], None] = lambda text: None
    #: Steps that the end of the budget left out, once ``results`` has ended.
    left_out: int = field(default=0, init=False)

    def results(self) -> Iterator[Measurement]:
        """Measure every step of the plan that is not held.

        Raises UnsupportedError before anything is allocated when the kernel cannot do this dtype and layout here.
        """
        reason = self.kernel.unsupported(self.backend, self.plan.problem)
        if reason:
            raise UnsupportedError(reason)
        steps = self.plan.steps(self.held)
        begun = self.backend.now()
        budget = self.plan.budget_seconds
        deadline = None if budget is None else begun + budget
        pool = self.backend.operand_pool(self.plan.problem.data, self.plan.problem.seed)
        try:
            self._reserve(pool)
            yield from self._walk(steps, pool, deadline)
        finally:
            pool.release()

    def _reserve(self, pool: OperandPool) -> None:
        self.on_phase("allocating operands")
        largest = largest_buffers(self.plan, self.backend.info.cache_bytes, self.backend.free_memory())
        try:
            for name, buffer in largest.items():
                pool.take(name, *buffer, fill=name != "c")
        except Exception as error:
            if not self.backend.is_out_of_memory(error):
                raise DeviceError(f"the device failed while allocating: {first_line(error)}") from error
            pool.release()
        self.backend.release_memory()

    def _walk(self, steps: Sequence[Held], pool: OperandPool, deadline: float | None) -> Iterator[Measurement]:
        regime: Regime | None = None
        speeds: list[float] = []
        done = 0
        for name, shape in steps:
            if regime is None or regime.name != name:
                regime = self._start(name)
            if self._would_overrun(shape, speeds, deadline):
                self.left_out += 1
                continue
            if self.plan.reference is not None and done % self.plan.reference_every == 0:
                yield replace(self._measure(self.plan.reference, regime, pool, deadline), is_reference=True)
            result = self._measure(shape, regime, pool, deadline)
            if cut_short(result, deadline, self.backend):
                self.left_out += 1
                continue
            if result.summary is not None:
                speeds.append(shape.flop / result.seconds)
            done += 1
            yield result

    def _start(self, name: str) -> Regime:
        self.on_phase(name)
        kind = regime_class(name)
        if kind is Classic:
            regime: Regime = Classic(self.backend, self.plan.warmup_launches, self.plan.timed_launches)
        else:
            regime = kind(self.backend)
        try:
            regime.start()
        except Exception as error:
            raise DeviceError(f"the device failed before the first shape in {name}: {first_line(error)}") from error
        return regime

    def _measure(self, shape: MatmulShape, regime: Regime, pool: OperandPool, deadline: float | None) -> Measurement:
        rule = StoppingRule(self.plan.precision, self.plan.seconds or regime.default_seconds, deadline=deadline)
        limit = fastest_possible_flops(self.backend.info, self.plan.problem.dtype)
        return measure(self.kernel, self.plan.problem, shape, regime, pool, rule, limit)

    def _would_overrun(self, shape: MatmulShape, speeds: Sequence[float], deadline: float | None) -> bool:
        """Whether even the verification and the fewest launches would outlast the budget, at the speed seen so far."""
        if deadline is None:
            return False
        left = deadline - self.backend.now()
        fewest = 1 + StoppingRule.fewest
        recent = speeds[-_RECENT_SHAPES:]
        return left <= 0 or (bool(recent) and fewest * shape.flop / stdlib_statistics.median(recent) > left)
