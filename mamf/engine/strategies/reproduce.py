"""Measures claims again: visits until each is decided, then other settings for those that are not reproduced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.engine.regimes import Burst, Classic, Regime
from mamf.engine.runner import Runner, Step, Steps
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.logs.reproducing import REPRODUCED, UNDECIDED, judge_claims, settings_of
from mamf.measurement import Measurement
from mamf.plans import StepKey
from mamf.regime_names import BURST, CLASSIC

#: Visits to a claim until it is decided.
_MOST_VISITS = 5


@dataclass
class ReproduceSweep(KernelsSweep):
    """One run of a plan with claims. ``rows``: of an interrupted run, with figures or reasons that last."""

    rows: Sequence[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen = list(self.rows)
        self._held = {(row.step, row.phase, row.round) for row in self.rows}
        self._by_name = {each.name: each for each in self.kernels}

    def _steps(self, run: Runner) -> Steps:
        for name in self.plan.regimes:
            yield from self._visits(run.start(self._made(name, self.plan.flush, True)))
        due = [
            (number, *setting)
            for number, each in enumerate(judge_claims(self.plan.options, self._seen), start=1)
            if self.plan.options.explains and each.verdict != REPRODUCED
            for setting in settings_of(each.claim, self.plan, self._by_name).items()
        ]
        # The warm-up of classic takes half a minute, so it comes last.
        for number, name, (step, flush, is_warm) in sorted(due, key=lambda each: each[1] == CLASSIC):
            if (step, name, number) not in self._held:
                yield from self._measured(run.start(self._made(step[0], flush, is_warm)), step, name, number)

    def _visits(self, regime: Regime) -> Steps:
        # By turns; visits after the first start anew where the device's state would stay.
        for visit in range(1, _MOST_VISITS + 1):
            judged = judge_claims(self.plan.options, self._seen)
            for step in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if step[0] == regime.name and (step, CONFIRM, visit) not in self._held:
                    yield from self._measured(regime, step, CONFIRM, visit)
            seen = [row for row in self._seen if row.ok and row.regime == regime.name]
            regime = regime.confirming(summarize_conditions(seen), math.inf) if visit == 1 else regime

    def _measured(self, regime: Regime, step: StepKey, phase: str, number: int) -> Steps:
        self.on_phase(f"{regime.name} {step[2]} {step[3]} {phase} {number}")
        row = yield Step(self._by_name[step[3]], step[1], step[2], regime, self._rule(regime), phase, number)
        self._seen += [row] if row is not None else []

    def _made(self, name: str, flush: bool, is_warm: bool) -> Regime:
        if is_warm:
            return Burst(self.backend, flush) if name == BURST else self._regime(name)
        return Classic(self.backend, warmup_seconds=0.0)
