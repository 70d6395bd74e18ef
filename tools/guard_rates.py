"""Rates of false alarms and of detected slowdowns of mamf guard: its real decisions on drawn visits.

    python tools/guard_rates.py                         # 10,000 guards of 20 rows, of each kind: minutes
    python tools/guard_rates.py --guards 1000 --cards sustained

The strategy, the doubts and the verdicts are those of the guard; only the figures of visits are drawn, as on H200s:

- burst: 0.1 % from visit to visit (standard deviation), 0.1 % from run to run.
- sustained: every visit falls into one of two states 1.1 % apart, how often into which is the row's own; 0.1 % beside
  that, 0.1 % from run to run.
- stuck: as sustained, but a row stays in its state for a whole run: no number of visits shows it. The worst case.
- everywhere the card drifts by up to 0.3 % over a guard, either way.

Each guard has a separate baseline, drawn as --update measures it. One row of the twenty is slower by
3 %.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mamf.calibration import find_calibration
from mamf.engine.regimes import Regime
from mamf.engine.runner import Step
from mamf.engine.strategies.guard import GuardSweep
from mamf.logs.compare import Pair
from mamf.logs.entries import Entry, by_step, visited_entry
from mamf.logs.judging import DEFAULT_ROUNDS, DEFAULT_TOLERANCE, outcome_of
from mamf.measurement import Measurement
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.plans import GUARD, GuardOptions, Plan
from mamf.regime_names import BEST_BY, BURST, SUSTAINED
from mamf.statistics import Interval, Summary
from mamf.testing import SimulatedAttention, SimulatedBackend

ROWS = 20
SLOWER = 0.03
_WITHIN = 0.001
_DRIFT = 0.003


@dataclass(frozen=True)
class Card:
    """How visits scatter, as shares of a launch's time. ``states``: how far apart two states of a visit lie."""

    regime: str
    visit: float = 0.001
    run: float = 0.001
    states: float = 0.0
    is_stuck: bool = False


CARDS = {
    "burst": Card(BURST),
    "sustained": Card(SUSTAINED, states=0.011),
    "stuck": Card(SUSTAINED, states=0.011, is_stuck=True),
}
_REPEATABILITY = {regime: find_calibration("", regime, MatmulProblem()) for regime in (BURST, SUSTAINED)}


class Seen(NamedTuple):
    """What a guard of drawn visits made of its rows: what failed, how many are undecided, how many visits it took."""

    regressions: set[AttentionShape]
    undecided: int
    visits: int


class _Run:
    """What a strategy asks of a runner before it measures."""

    def start(self, regime: Regime) -> Regime:
        return regime


class Guards:
    """Guards of one card, of rows that nothing but their shape sets apart."""

    def __init__(self, card: Card, rounds: int = DEFAULT_ROUNDS, tolerance: float = DEFAULT_TOLERANCE) -> None:
        self.card, self.tolerance = card, tolerance
        self.shapes = tuple(AttentionShape(1, 16, 16, n, n, 128, 128) for n in range(512, 512 * (ROWS + 1), 512))
        options = GuardOptions(rounds)
        problems, regimes = (AttentionProblem(),), (card.regime,)
        self.plan = Plan(GUARD, "attention", problems, ("drawn",), self.shapes, regimes, options=options)
        self.backend = SimulatedBackend()

    def guard(self, seed: int, slower: float = 0.0) -> Seen:
        """One guard with its baseline; the first row got slower by a share."""
        chooser = random.Random(seed)
        # How often a row's visits fall into the slow state is the row's own, the same in both runs.
        odds = {shape: chooser.random() for shape in self.shapes}
        before = self._entries(self._visits(chooser, odds, None, {}))
        visits = list(self._visits(chooser, odds, before, {self.shapes[0]: slower}))
        now = self._entries(iter(visits))
        pairs = [Pair(entry.fields, before[key], entry) for key, entry in now.items()]
        outcomes = {pair.b.shape: outcome_of(pair, self.tolerance) for pair in pairs}
        failing = {shape for shape in self.shapes if outcomes[str(shape)] == "regression"}
        return Seen(failing, list(outcomes.values()).count("undecided"), len(visits))

    def _entries(self, rows: Iterator[Measurement]) -> dict[object, Entry]:
        found = (visited_entry(visits) for visits in by_step(rows).values())
        return {entry.key: entry for entry in found}

    def _visits(
        self,
        chooser: random.Random,
        odds: dict[AttentionShape, float],
        baseline: dict[object, Entry] | None,
        slower: dict[AttentionShape, float],
    ) -> Iterator[Measurement]:
        """Every visit that the guard's strategy asks for, drawn."""
        card, sweep = self.card, GuardSweep(self.plan, [SimulatedAttention()], self.backend)
        sweep.baseline, sweep.tolerance = baseline, self.tolerance
        level, drift = chooser.gauss(0, card.run), chooser.uniform(-_DRIFT, _DRIFT)
        states = {shape: chooser.random() < odds[shape] for shape in self.shapes}
        steps, number = sweep._steps(_Run()), 0  # type: ignore[arg-type]
        asked = next(steps, None)
        while isinstance(asked, Step):
            shape = asked.shape
            is_slow = states[shape] if card.is_stuck else chooser.random() < odds[shape]
            share = level + drift * min(1.0, number / ROWS) + is_slow * card.states
            share += chooser.gauss(0, card.visit)
            row = _visit(asked, card.regime, 1e-3 * (1 + share) / (1 - slower.get(shape, 0.0)))
            yield row
            number += 1
            try:
                asked = steps.send(row)
            except StopIteration:
                return


def _visit(asked: Step, regime: str, seconds: float) -> Measurement:
    interval = Interval(seconds * (1 - _WITHIN), seconds * (1 + _WITHIN), 0.95)
    summary = Summary(20, seconds, seconds, seconds, seconds, interval)
    return Measurement(
        asked.shape,
        SimulatedAttention.name,
        asked.problem,
        regime,
        BEST_BY[regime],
        "ok",
        summary=summary,
        launches=20,
        phase=asked.phase,
        round=asked.round,
        repeatability=_REPEATABILITY[regime],
    )


def false_alarms(name: str, count: int) -> tuple[int, int, float]:
    """Guards of unchanged kernels that fail, and that are undecided, of so many; and visits per row."""
    guards = Guards(CARDS[name])
    seen = [guards.guard(seed) for seed in range(count)]
    failed, undecided = sum(bool(each.regressions) for each in seen), sum(bool(each.undecided) for each in seen)
    return failed, undecided, sum(each.visits for each in seen) / (count * ROWS)


def caught(name: str, count: int) -> int:
    """Guards that fail, of so many in which one row got slower."""
    guards = Guards(CARDS[name])
    return sum(guards.shapes[0] in guards.guard(seed, SLOWER).regressions for seed in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guards", type=int, default=10_000)
    parser.add_argument("--cards", nargs="+", choices=list(CARDS), default=list(CARDS))
    options = parser.parse_args()
    count = options.guards
    for name in options.cards:
        alarms, undecided, visits = false_alarms(name, count)
        share = 100 * caught(name, count) / count
        print(
            f"{name}: {alarms} of {count} guards of {ROWS} unchanged rows failed, {undecided} were undecided "
            f"({visits:.2f} visits per row); "
            f"a row slower by {100 * SLOWER:g} % was caught in {share:.2f} %",
            flush=True,
        )


if __name__ == "__main__":
    main()
