"""Both ceilings of a device in about a minute: a search, and a proof in the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.grid import Shares
from mamf.ceilings.strategy import FindStrategy, Step
from mamf.errors import DeviceError, first_line
from mamf.kernel import Buffer
from mamf.measure import cut_short, measure
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulKernel
from mamf.peaks import fastest_possible_flops
from mamf.plans import FindPlan
from mamf.regimes import Regime, Sustained


@dataclass
class Find:
    """One run of a plan on an opened backend. ``results`` yields what it measures; ``ceilings`` fills as it goes.

    ``held`` are the rows of an interrupted run, in their order: they answer the search in place of measuring, and it
    goes on where it was. Whether a phase had ended then is read off them, because it may have been time that ended it.
    ``kernels`` are those of the plan.
    """

    plan: FindPlan
    kernels: Sequence[MatmulKernel]
    backend: Backend
    held: Collection[Measurement] = ()
    on_phase: Callable[[str], None] = lambda text: None
    left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._left = deque(self.held)
        self._limit = fastest_possible_flops(self.backend.info, self.plan.problem.dtype)
        self._strategy = FindStrategy(self.plan, self.kernels, self.backend, self)

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        return self._strategy.ceilings

    def results(self) -> Iterator[Measurement]:
        """Search and confirm. Breaking off loses the measurement in flight; ``ceilings`` holds what is confirmed."""
        self._begun = self.backend.now()
        self._pool = self.backend.operand_pool(self.plan.problem.data, self.plan.problem.seed)
        steps = self._strategy.steps()
        try:
            step = next(steps)
            while True:
                row = self._replayed(step)
                if row is None:
                    row = self._measured(step)
                    if cut_short(row, self.deadline, self.backend):
                        self.left_out = 1
                        return
                    yield row
                step = steps.send(row)
        except StopIteration:
            return
        finally:
            steps.close()
            self._pool.release()

    def _replayed(self, step: Step) -> Measurement | None:
        """The held row that answered this step; it decides what was measured then."""
        return self._left.popleft() if self._left and self._left[0].phase == step.phase else None

    def _measured(self, step: Step) -> Measurement:
        row = measure(step.kernel, self.plan.problem, step.shape, step.regime, self._pool, step.rule, self._limit)
        return replace(row, phase=step.phase, round=step.round)

    # -- the pace that the search keeps ------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        return self._begun + self.plan.budget_seconds

    def now(self) -> float:
        return self.backend.now()

    def until(self, share: float) -> float:
        """The moment by which a phase ends; burst alone has the whole budget."""
        scale = 1.0 if Sustained.name in self.plan.regimes else 1 / Shares.burst
        return self._begun + share * scale * self.plan.budget_seconds

    def goes_on(self, regime: Regime, phase: str, until: float, number: int = 0, is_due: bool = False) -> bool:
        """Whether a phase has another step: as the held rows say while there are any, then as time allows.

        ``number``: of the round. ``is_due``: it is too early for time to end the phase.
        """
        if self._left:
            held = self._left[0]
            return (held.regime, held.phase) == (regime.name, phase) and (not number or held.round <= number)
        if self.backend.now() >= self.deadline:
            self.left_out = 1
        return not self.left_out and (is_due or self.backend.now() < until)

    def started(self, regime: Regime) -> Regime:
        try:
            regime.start()
        except Exception as error:
            raise DeviceError(f"the device failed before the first shape: {first_line(error)}") from error
        return regime

    def reserve(self, needed: Iterable[Mapping[str, Buffer]]) -> None:
        """One buffer per operand, large enough for all: growing it between visits would let the device go cold."""
        self.on_phase("allocating operands")
        largest: dict[str, Buffer] = {}
        for buffers in needed:
            for name, buffer in buffers.items():
                largest[name] = max(buffer, largest.get(name, buffer))
        try:
            for name, buffer in largest.items():
                self._pool.take(name, *buffer, fill=name != "c")
        except Exception as error:
            if not self.backend.is_out_of_memory(error):
                raise DeviceError(f"the device failed while allocating: {first_line(error)}") from error
            self._pool.release()
            self.backend.release_memory()
