"""Compares kernels with a baseline: measures every row once, then repeats rows in doubt until they are decided."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.engine.regimes import Regime
from mamf.engine.runner import Setup, Step, Steps
from mamf.engine.strategies.rows import RowsStrategy
from mamf.logs.entries import Entry, by_step, visited_entry
from mamf.logs.judging import DEFAULT_TOLERANCE, is_in_doubt
from mamf.measurement import Measurement
from mamf.plans import StepKey


class GuardStrategy(RowsStrategy):
    """Visits every row once, then visits rows in doubt again, up to the plan's rounds.

    ``baseline``: its entries by key; None makes a baseline, and then every row goes through all rounds.
    """

    def __init__(
        self, setup: Setup, baseline: Mapping[object, Entry] | None = None, tolerance: float = DEFAULT_TOLERANCE
    ) -> None:
        super().__init__(setup, replayed=[row for row in setup.rows if row.phase])
        self.baseline, self.tolerance = baseline, tolerance
        self._visits = by_step(row for row in setup.rows if not row.phase)

    def steps(self) -> Steps:
        left = frozenset(self.setup.steps)
        for name in self.plan.regimes:
            regime = self.run.start(self.regime(name))
            steps = [step for step in self.plan.steps() if step.regime == name]
            yield from self._visited(regime, [step for step in steps if step in left], "", 1)
            confirmation_regime = regime.confirmation_regime(summarize_conditions(self._measured(name)), math.inf)
            for number in range(1, self.plan.options.rounds + 1):
                doubtful = [step for step in steps if self._is_in_doubt(step)]
                if not doubtful:
                    break
                due = add_another_row(doubtful, steps)
                random.Random(f"{name} {number}").shuffle(due)
                yield from self._visited(confirmation_regime, due, CONFIRM, number)

    def _visited(self, regime: Regime, steps: Sequence[StepKey], phase: str, number: int) -> Steps:
        for step in steps:
            name, problem, shape, kernel = step
            progress = f"round {number} of at most {self.plan.options.rounds}" if phase else ""
            self.setup.on_phase(f"{name} {shape} {kernel} {progress}".rstrip())
            row = yield Step(self.kernels[kernel], problem, shape, regime, self.rule(regime), phase, number)
            if row is not None:
                self._visits.setdefault(self._key(step), []).append(row)

    def _measured(self, regime: str) -> list[Measurement]:
        return [row for visits in self._visits.values() for row in visits if row.ok and row.regime == regime]

    def _is_in_doubt(self, step: StepKey) -> bool:
        visits = self._visits.get(self._key(step))
        if not visits:
            return False
        if self.baseline is None:
            return visits[-1].ok
        before = self.baseline.get(visited_entry(visits).key)
        return before is not None and is_in_doubt(before, visits, self.tolerance)

    def _key(self, step: StepKey) -> StepKey:
        """The step with the kernel's own name, as in rows."""
        regime, problem, shape, kernel = step
        return StepKey(regime, problem, shape, self.kernels[kernel].name)


def add_another_row(due: Sequence[StepKey], steps: Sequence[StepKey]) -> list[StepKey]:
    """The due steps, plus another one if there is only one, so that no row is measured twice in succession."""
    others = [step for step in steps if step not in due]
    return [*due, *(others[-1:] if len(due) == 1 else ())]
