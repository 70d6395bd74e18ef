"""Measures claims again: visits until each is decided, then other settings for those that are not reproduced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.engine.regimes import Burst, Classic, Regime
from mamf.engine.runner import Runner, Step, Steps
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.kernel import AnyKernel
from mamf.logs.reproducing import MOST_VISITS, Judged, Setting, judge_claim, settings_of
from mamf.measurement import Measurement
from mamf.plans import ReproduceOptions
from mamf.regime_names import BURST, CLASSIC


@dataclass
class ReproduceSweep(KernelsSweep):
    """One run of a plan with claims. ``rows``: of an interrupted run."""

    rows: Sequence[Measurement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen = list(self.rows)
        self._started: Regime | None = None
        self._held = {(row.step, row.phase, row.round): row for row in self.rows}
        self._named: Mapping[str, AnyKernel] = {each.name: each for each in self.kernels}
        self._named = {**self._named, **dict(zip(self.plan.kernels, self.kernels, strict=True))}

    @property
    def _options(self) -> ReproduceOptions:
        return self.plan.options  # type: ignore[no-any-return]

    def _steps(self, run: Runner) -> Steps:
        numbers = range(1, len(self._options.claims) + 1)
        for name in self.plan.regimes:
            yield from self._visits(run, name, [each for each in numbers if self._judged(each).claim.regime == name])
        if self._options.explains:
            unexplained = [each for each in numbers if self._judged(each).verdict != "reproduced"]
            claims = [(each, self._judged(each).claim) for each in unexplained]
            due = [(number, setting) for number, claim in claims for setting in settings_of(claim, self.plan)]
            # The warm-up of classic takes half a minute, so it comes last.
            for number, setting in sorted(due, key=lambda each: (each[1].name == CLASSIC, each[0])):
                yield from self._explain(run, number, setting)

    def _visits(self, run: Runner, name: str, numbers: Sequence[int]) -> Steps:
        """Visits in one regime, by turns; those after the first start anew where the device's state would stay."""
        regime = self._made(Setting("", name, None, "", self.plan.flush))
        for visit in range(1, MOST_VISITS + 1):
            for number in (each for each in numbers if visit == 1 or self._judged(each).verdict == "undecided"):
                _, problem, shape, kernel = self._judged(number).claim.step
                rule = self._rule(regime)
                step = Step(self._named[kernel], problem, shape, regime, rule, CONFIRM, visit)
                yield from self._measured(run, step, f"visit {visit}")
            seen = [row for row in self._seen if row.ok and row.regime == name]
            regime = regime.confirming(summarize_conditions(seen), math.inf) if visit == 1 else regime

    def _explain(self, run: Runner, number: int, setting: Setting) -> Steps:
        regime, kernel = self._made(setting), self._named[setting.kernel]
        shape, rule = self._judged(number).claim.shape, self._rule(regime)
        step = Step(kernel, setting.problem, shape, regime, rule, setting.name, number)
        yield from self._measured(run, step, setting.name)

    def _measured(self, run: Runner, step: Step, what: str) -> Steps:
        """Measure a step, unless the resumed log holds its row."""
        if self._key(step) in self._held:
            return
        if self._started is not step.regime:
            self._started = run.start(step.regime)
        self.on_phase(f"{step.regime.name} {step.shape} {step.kernel.name} {what}")
        row = yield step
        if row is not None:
            self._seen.append(row)

    def _key(self, step: Step) -> object:
        return (step.regime.name, step.problem, step.shape, step.kernel.name), step.phase, step.round

    def _judged(self, number: int) -> Judged:
        return judge_claim(self._options, number, self._seen)

    def _made(self, setting: Setting) -> Regime:
        if setting.regime == BURST:
            return Burst(self.backend, setting.flush)
        if setting.regime == CLASSIC:
            launches = self._options.warmup_launches, self._options.timed_launches
            return Classic(self.backend, *launches, Classic.warmup_seconds if setting.is_warm else 0.0)
        return self._regime(setting.regime)
