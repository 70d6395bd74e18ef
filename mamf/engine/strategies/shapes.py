"""Measures given shapes in an order in which drift does not look like a trend."""

from __future__ import annotations

import statistics as stdlib_statistics
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mamf.backend import Backend
from mamf.engine.clocks import ClockChoice
from mamf.engine.regimes import Burst, Classic, Regime, StoppingRule, regime_class
from mamf.engine.runner import Runner, Step, Steps
from mamf.errors import UnsupportedError
from mamf.kernel import AnyKernel, Buffer
from mamf.measurement import Measurement
from mamf.plans import ALGORITHM, Plan, StepKey

# What operands may take of the free memory: the flush buffer and the libraries' workspaces need the rest.
_SHARE_OF_MEMORY = 0.9
# Time for ranking one of a kernel's algorithms to the time for a row.
_RANKING_SHARE = 0.25
# Whose speed foretells the next shape's.
_RECENT_SHAPES = 32


def operand_bytes(plan: Plan, shape: Any, cache_bytes: int | None) -> int:
    """Device memory that a shape's operands take in the most demanding of the regimes."""
    return max(sum(b.nbytes for b in _buffers(plan, shape, regime, cache_bytes).values()) for regime in plan.regimes)


def measured_shapes(plan: Plan) -> tuple[Any, ...]:
    """Those of the plan, and its reference."""
    reference = plan.options.reference
    return plan.shapes if reference is None else (*plan.shapes, reference)


def _buffers(plan: Plan, shape: Any, regime: str, cache_bytes: int | None) -> dict[str, Buffer]:
    kind, problem = regime_class(regime), plan.problem
    found: dict[str, Buffer] = problem.buffers(shape, kind.sets(problem, shape, cache_bytes), kind.needs_rewrite)
    return found


def largest_buffers(plan: Plan, cache_bytes: int | None, free_memory: int | None) -> dict[str, Buffer]:
    """Buffers that serve every shape; shapes too large for the memory are left to fail on their own."""
    largest: dict[str, Buffer] = {}
    for shape in sorted(measured_shapes(plan), key=plan.problem.nbytes):
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

    The algorithms of a kernel with cheap variants are ranked on each shape in the regime itself: each has a row of the
    phase ALGORITHM. The row of the step is a fresh measurement of the fastest, because the fastest of several rows is
    also the luckiest.
    """

    plan: Plan
    kernel: AnyKernel
    backend: Backend
    held: Collection[StepKey] = ()
    on_phase: Callable[[str], None] = lambda text: None

    def results(self) -> Iterator[Measurement]:
        """Measure every step of the plan that is not held.

        Raises UnsupportedError before anything is allocated when the kernel cannot do this dtype and layout here.
        """
        if reason := self.kernel.unsupported(self.backend, self.plan.problem):
            raise UnsupportedError(reason)
        self._run = Runner(
            self.backend, self.plan.budget_seconds, on_phase=self.on_phase, clocks=ClockChoice.of(self.plan)
        )
        yield from self._run.results(self._steps(self._run))

    @property
    def left_out(self) -> int:
        """Steps that the end of the budget left out, once ``results`` has ended."""
        return self._run.left_out

    def _steps(self, run: Runner) -> Steps:
        plan, options = self.plan, self.plan.options
        regime: Regime | None = None
        speeds: deque[float] = deque(maxlen=_RECENT_SHAPES)
        done = 0
        for name, _, shape, _ in plan.steps(self.held):
            if regime is None:
                largest = largest_buffers(plan, self.backend.info.cache_bytes, self.backend.free_memory())
                run.reserve(plan.problem, [largest])
            if regime is None or regime.name != name:
                self.on_phase(name)
                regime, done = run.start(self._regime(name)), 0
            if self._would_overrun(run, shape, speeds):
                run.left_out += 1
                continue
            if options.reference is not None and done % options.reference_every == 0:
                yield self._step(options.reference, regime)._replace(is_reference=True)
            kernel = yield from self._fastest_algorithm(shape, regime)
            if kernel is None:
                continue
            row = yield self._step(shape, regime)._replace(kernel=kernel)
            if row is not None:
                done += 1
                speeds += [] if row.summary is None else [row.amount / row.seconds]

    def _step(self, shape: Any, regime: Regime) -> Step:
        rule = StoppingRule(self.plan.precision, self.plan.seconds or regime.default_seconds)
        return Step(self.kernel, self.plan.problem, shape, regime, rule)

    def _fastest_algorithm(
        self, shape: Any, regime: Regime
    ) -> Generator[Step | Measurement, Measurement | None, AnyKernel | None]:
        """The fastest algorithm for a shape; the kernel itself if it has only one, if the others would have to be
        compiled, or if none works. None if the budget ended.
        """
        if not self.kernel.has_cheap_variants:
            return self.kernel
        found = list(self.kernel.variants(self.backend, self.plan.problem, shape))
        fastest, best_rate = self.kernel, 0.0
        for variant in found if len(found) > 1 else ():
            step = self._step(shape, regime)
            brief = replace(step.rule, seconds=step.rule.seconds and step.rule.seconds * _RANKING_SHARE)
            row = yield step._replace(kernel=variant, rule=brief, phase=ALGORITHM)
            if row is None:
                return None
            if row.ok and row.best_rate > best_rate:
                fastest, best_rate = variant, row.best_rate
        return fastest

    def _regime(self, name: str) -> Regime:
        kind = regime_class(name)
        if kind is Classic:
            return Classic(self.backend, self.plan.options.warmup_launches, self.plan.options.timed_launches)
        return Burst(self.backend, self.plan.flush) if kind is Burst else kind(self.backend)

    def _would_overrun(self, run: Runner, shape: Any, speeds: Collection[float]) -> bool:
        """Whether even the verification and the fewest launches would outlast the budget, at the speed seen so far."""
        if run.deadline is None or not speeds:
            return run.is_over()
        fewest = 1 + StoppingRule.fewest
        return bool(fewest * shape.flop / stdlib_statistics.median(speeds) > run.deadline - run.now())
