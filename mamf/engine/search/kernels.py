"""The ceilings of any operation: kernels over its shapes, and the best of each problem confirmed in fresh rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mamf.ceilings.ceiling import Candidate
from mamf.engine.clocks import ClockChoice
from mamf.engine.regimes import Regime, StoppingRule, Sustained
from mamf.engine.runner import Runner, Steps
from mamf.engine.search.rounds import Confirmation, Rounds
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.kernel import Problem
from mamf.logs.recording import Record
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.regime_names import BURST, SUSTAINED

_ROUNDS = {BURST: Rounds(choose=4, confirm=7), SUSTAINED: Rounds(choose=1, confirm=3)}
_CANDIDATES = {BURST: 4, SUSTAINED: 2}
_VISIT_SECONDS = 1.0
#: What measuring every row once may take of a budget, by when all regimes but the last have ended (a soak takes long),
#: and what choosing takes of the time that a problem has.
_SHARE_OF_ROWS, _SHARE_BEFORE_LAST, _SHARE_OF_CHOOSING = 0.2, 0.45, 0.35


@dataclass
class KernelsFind(KernelsSweep):
    """One run of a plan that ``confirms`` ceilings.

    ``rows``: of an interrupted run, in their order; those measured join them. What was best among them goes through
    rounds that choose, and fresh ones that confirm, in every regime of the plan.
    """

    rows: list[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._confirmations: dict[Problem, Confirmation] = {}
        # Rows of phases answer their steps again; the others are what candidates are taken from.
        self._answers = [row for row in self.rows if row.phase]
        self._seen = [row for row in self.rows if not row.phase]

    def results(self) -> Iterator[Measurement | Record]:
        """Measure every step that is not held, then choose and confirm."""
        self._run = Runner(
            self.backend, self.plan.budget_seconds, self._answers, self.on_phase, clocks=ClockChoice.of(self.plan)
        )
        yield from self._run.results(self._steps(self._run))

    def _steps(self, run: Runner) -> Steps:
        steps = self.plan.steps(self.held)
        for number, name in enumerate(self.plan.regimes):
            regime = run.start(self._regime(name))
            if steps and not number:
                yield from self._remembered(self._rows(run, regime, steps))
            is_last = number == len(self.plan.regimes) - 1
            yield from self._confirmed(run, regime, self._end(run, 1.0 if is_last else _SHARE_BEFORE_LAST))

    def _remembered(self, steps: Steps) -> Steps:
        """The same steps; the rows that are reported are kept."""
        answer: Measurement | None = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration:
                return
            if isinstance(asked, Measurement):
                self._seen.append(asked)
            answer = yield asked

    def _end(self, run: Runner, share: float) -> float:
        """The moment at which a share of the budget has passed."""
        return math.inf if self.plan.budget_seconds is None else run.begun + share * self.plan.budget_seconds

    def _confirmed(self, run: Runner, regime: Regime, end: float) -> Steps:
        """Every problem in one regime; each has its part of the time until its end."""
        cache = self.backend.info.cache_bytes
        for number, problem in enumerate(self.plan.problems):
            candidates = self._best(problem, _CANDIDATES[regime.name])
            if not candidates:
                continue
            shapes = [shape for shape, _ in candidates]
            run.reserve(problem, (problem.buffers(shape, regime.sets(problem, shape, cache)) for shape in shapes))
            now = run.now()
            part = max(end - now, 0.0) / (len(self.plan.problems) - number)
            confirmation = self._confirmation(run, problem)
            until = now + _SHARE_OF_CHOOSING * part, now + part
            yield from confirmation.rounds(regime, candidates, _ROUNDS[regime.name], *until)

    def _best(self, problem: Problem, count: int) -> list[Candidate]:
        """The fastest of the rows of a problem that may be a ceiling."""
        of, info = operation_called(self.plan.operation), self.backend.info
        own = (row for row in self._seen if row.ok and row.problem == problem and not row.is_reference)
        own = (row for row in own if of.may_be_ceiling(info, problem, row.shape))
        fastest = sorted(own, key=lambda row: row.best_rate, reverse=True)
        return list(dict.fromkeys((row.shape, row.kernel) for row in fastest))[:count]

    def _confirmation(self, run: Runner, problem: Problem) -> Confirmation:
        if problem not in self._confirmations:
            deadline = math.inf if run.deadline is None else run.deadline
            kernels = {kernel.name: kernel for kernel in self.kernels}
            self._confirmations[problem] = Confirmation(
                run, problem, kernels, self.plan.precision, random.Random(problem.seed), _VISIT_SECONDS, deadline
            )
        return self._confirmations[problem]

    def _regime(self, name: str) -> Regime:
        return Sustained(self.backend, _VISIT_SECONDS) if name == SUSTAINED else super()._regime(name)

    def _rule(self, regime: Regime) -> StoppingRule:
        """A row only has to say what is worth confirming."""
        usual = super()._rule(regime)
        if self.plan.seconds is not None or self.plan.budget_seconds is None or usual.seconds is None:
            return usual
        part = _SHARE_OF_ROWS * self.plan.budget_seconds / max(len(self.plan.steps()), 1)
        return replace(usual, seconds=min(usual.seconds, part))
