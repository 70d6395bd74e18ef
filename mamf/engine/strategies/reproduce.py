"""Measures claims again: visits until each is decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.engine.regimes import Regime
from mamf.engine.runner import Runner, Step, Steps
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.logs.judging import UNDECIDED, judge_claims
from mamf.measurement import Measurement

#: Visits to a claim until it is decided.
_MAX_VISITS = 5


@dataclass
class ReproduceSweep(KernelsSweep):
    """One run of a plan with claims. ``rows``: of an interrupted run, with figures or reasons that last."""

    rows: Sequence[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen = list(self.rows)
        self._held = {(row.step, row.round) for row in self.rows}
        self._by_name = {each.name: each for each in self.kernels}

    def _steps(self, run: Runner) -> Steps:
        for name in self.plan.regimes:
            yield from self._visits(run.start(self._regime(name)))

    def _visits(self, regime: Regime) -> Steps:
        # By turns; visits after the first start anew where the device's state would stay.
        for visit in range(1, _MAX_VISITS + 1):
            judged = judge_claims(self.plan.options, self._seen)
            for step in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if step[0] == regime.name and (step, visit) not in self._held:
                    self.on_phase(f"{regime.name} {step[2]} {step[3]} {CONFIRM} {visit}")
                    kernel = self._by_name[step[3]]
                    row = yield Step(kernel, step[1], step[2], regime, self._rule(regime), CONFIRM, visit)
                    self._seen += [row] if row is not None else []
            seen = [row for row in self._seen if row.ok and row.regime == regime.name]
            regime = regime.confirming(summarize_conditions(seen), math.inf) if visit == 1 else regime
