"""Finds the ceilings of any operation: measures kernels on its shapes, then confirms the best of each problem."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from mamf.ceilings.ceiling import Candidate
from mamf.engine.regimes import Regime, StoppingRule, Sustained
from mamf.engine.runner import Runner, Setup, Steps
from mamf.engine.search.rounds import Confirmation, Rounds
from mamf.engine.strategies.rows import RowsStrategy
from mamf.kernel import Problem
from mamf.operations.unknown import operation_called
from mamf.regime_names import BURST, SUSTAINED

_ROUNDS = {BURST: Rounds(choose=4, confirm=7), SUSTAINED: Rounds(choose=1, confirm=3)}
_CANDIDATES = {BURST: 4, SUSTAINED: 2}
_VISIT_SECONDS = 1.0
#: Shares of the budget: for measuring every row once, and until all regimes but the last have ended (a soak takes
#: long). Share of a problem's time for choosing.
_SHARE_OF_ROWS, _SHARE_BEFORE_LAST, _SHARE_OF_CHOOSING = 0.2, 0.45, 0.35


class KernelsFindStrategy(RowsStrategy):
    """Measures every row of a plan, then takes the best ones of each problem through rounds that choose and separate
    rounds that confirm, in every regime.
    """

    def __init__(self, setup: Setup) -> None:
        # Rows that have a phase answer the same steps again; candidates come from the other rows.
        super().__init__(setup, replayed=[row for row in setup.rows if row.phase])
        self._confirmations: dict[Problem, Confirmation] = {}

    def steps(self) -> Steps:
        """Measure every step that no row answers yet, then choose and confirm."""
        run, left = self.run, self.setup.steps
        for number, name in enumerate(self.plan.regimes):
            regime = run.start(self.regime(name))
            if left and not number:
                yield from self.measure_rows(regime, left)
            is_last = number == len(self.plan.regimes) - 1
            yield from self._confirmed(run, regime, self._end(run, 1.0 if is_last else _SHARE_BEFORE_LAST))

    def _end(self, run: Runner, share: float) -> float:
        """The moment at which this share of the budget has passed."""
        return math.inf if self.plan.budget_seconds is None else run.begun + share * self.plan.budget_seconds

    def _confirmed(self, run: Runner, regime: Regime, end: float) -> Steps:
        """Choose and confirm for every problem in one regime; the time until ``end`` is divided among them."""
        cache = self.backend.info.cache_bytes
        for number, problem in enumerate(self.plan.problems):
            candidates = self._best(problem, _CANDIDATES[regime.name])
            if not candidates:
                continue
            shapes = [shape for shape, _ in candidates]
            run.preallocate_operands(
                problem, (problem.buffers(shape, regime.sets(problem, shape, cache)) for shape in shapes)
            )
            now = run.now()
            part = max(end - now, 0.0) / (len(self.plan.problems) - number)
            confirmation = self._confirmation(run, problem)
            until = now + _SHARE_OF_CHOOSING * part, now + part
            yield from confirmation.rounds(regime, candidates, _ROUNDS[regime.name], *until)

    def _best(self, problem: Problem, count: int) -> list[Candidate]:
        """The fastest rows of a problem that may be a ceiling."""
        of, info = operation_called(self.plan.operation), self.backend.info
        rows = [row for row in self.setup.rows if row.problem == problem and not (row.phase or row.is_reference)]
        own = (row for row in rows if row.ok and of.may_be_ceiling(info, problem, row.shape))
        fastest = sorted(own, key=lambda row: row.best_rate, reverse=True)
        return list(dict.fromkeys((row.shape, row.kernel) for row in fastest))[:count]

    def _confirmation(self, run: Runner, problem: Problem) -> Confirmation:
        if problem not in self._confirmations:
            deadline = math.inf if run.deadline is None else run.deadline
            kernels = {kernel.name: kernel for kernel in self.kernels.values()}
            self._confirmations[problem] = Confirmation(
                run, problem, kernels, self.plan.precision, random.Random(problem.seed), _VISIT_SECONDS, deadline
            )
        return self._confirmations[problem]

    def regime(self, name: str) -> Regime:
        return Sustained(self.backend, _VISIT_SECONDS) if name == SUSTAINED else super().regime(name)

    def rule(self, regime: Regime) -> StoppingRule:
        """Stop a row early if the budget is short: it only has to show what is worth confirming."""
        usual = super().rule(regime)
        if self.plan.seconds is not None or self.plan.budget_seconds is None or usual.seconds is None:
            return usual
        part = _SHARE_OF_ROWS * self.plan.budget_seconds / max(len(self.plan.steps()), 1)
        return replace(usual, seconds=min(usual.seconds, part))
