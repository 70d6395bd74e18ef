"""Measures claims again, with repeated visits until each claim is decided."""

from __future__ import annotations

import math

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.engine.regimes import Regime
from mamf.engine.runner import Step, Steps
from mamf.engine.strategies.rows import RowsStrategy
from mamf.logs.judging import UNDECIDED, judge_claims

#: The most visits to a claim.
_MAX_VISITS = 5


class ReproduceStrategy(RowsStrategy):
    """Measures the claims of a plan again."""

    def steps(self) -> Steps:
        self._seen, self._held = list(self.setup.rows), {(row.step, row.round) for row in self.setup.rows}
        for name in self.plan.regimes:
            yield from self._visits(self.run.start(self.regime(name)))

    def _visits(self, regime: Regime) -> Steps:
        # Claims take turns. Later visits follow a rest if the device would otherwise stay in one state.
        by_name = {kernel.name: kernel for kernel in self.kernels.values()}
        for visit in range(1, _MAX_VISITS + 1):
            judged = judge_claims(self.plan.options, self._seen)
            for step in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if step.regime == regime.name and (step, visit) not in self._held:
                    _, problem, shape, name = step
                    self.setup.on_phase(f"{regime.name} {shape} {name} {CONFIRM} {visit}")
                    row = yield Step(by_name[name], problem, shape, regime, self.rule(regime), CONFIRM, visit)
                    self._seen += [row] if row is not None else []
            seen = [row for row in self._seen if row.ok and row.regime == regime.name]
            regime = regime.confirmation_regime(summarize_conditions(seen), math.inf) if visit == 1 else regime
