"""Which rows also have their true clock measured: in burst that takes trains of their own, in sustained it is free."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from mamf.ceilings.ceiling import CONFIRM
from mamf.plans import ALL_CLOCKS, BEST_CLOCK, FIND, NO_CLOCK, SWEEP, Plan

#: Whether to measure the clock of a row with this rate (FLOP per second).
WantsClock = Callable[[float], bool]


@dataclass
class ClockChoice:
    """Chooses rows as they are measured: the best so far, so that the best of all is among them.

    ``which``: BEST_CLOCK, ALL_CLOCKS or NO_CLOCK. ``by_shape``: the best of each shape, of a run that compares kernels;
    else the best of each problem.
    """

    which: str = NO_CLOCK
    by_shape: bool = False
    _best: dict[Hashable, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, plan: Plan) -> ClockChoice:
        """Runs that compare rows with others need the clock of each."""
        compares = plan.kind not in (SWEEP, FIND) and plan.clock == BEST_CLOCK
        return cls(ALL_CLOCKS if compares else plan.clock, by_shape=len(plan.kernels) > 1)

    def wants(self, phase: str, regime: str, problem: Any, shape: Any, kernel: str) -> WantsClock:
        """Rows that only choose what is confirmed later are left out."""
        if self.which == NO_CLOCK or phase not in ("", CONFIRM):
            return lambda rate: False
        # Any of those that are confirmed may become the best one by its median.
        of_shape = (shape, kernel) if phase == CONFIRM else (shape,) if self.by_shape else ()
        key = (regime, problem, *of_shape)

        def is_wanted(rate: float) -> bool:
            is_best = rate > self._best.get(key, 0.0)
            self._best[key] = max(rate, self._best.get(key, 0.0))
            return is_best or self.which == ALL_CLOCKS

        return is_wanted
