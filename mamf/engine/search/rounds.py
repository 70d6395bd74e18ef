"""Interleaved rounds for any operation: choose among candidates, then confirm the choice with new measurements."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from mamf.ceilings.ceiling import (
    CHOOSE_PHASE,
    CONFIRM_PHASE,
    MIN_ROUNDS,
    Candidate,
    compute_median_rate,
    group_rounds,
    rank_candidates,
    summarize_conditions,
)
from mamf.engine.regimes import Regime, StoppingRule, Sustained
from mamf.engine.runner import Runner, Step
from mamf.kernel import AnyKernel, Problem
from mamf.measurement import Conditions, Measurement
from mamf.operations.matmul.shapes import MatmulShape


def find_best_by_shape(rows: Iterable[Measurement]) -> list[Candidate]:
    """Return the fastest kernel of each shape."""
    best: dict[MatmulShape, Measurement] = {}
    for row in rows:
        if row.ok and (row.shape not in best or row.best_rate > best[row.shape].best_rate):
            best[row.shape] = row
    return [(shape, row.kernel) for shape, row in best.items()]


def find_best_per_size_pair(rows: Iterable[Measurement]) -> list[Candidate]:
    """Return the fastest row of each pair of M and N, fastest first. Shapes that differ only in K, or by exchanging M
    and N, perform alike.
    """
    best: dict[tuple[int, ...], Measurement] = {}
    for row in rows:
        kind = tuple(sorted((row.shape.m, row.shape.n)))
        if row.ok and (kind not in best or row.best_rate > best[kind].best_rate):
            best[kind] = row
    fastest = sorted(best.values(), key=lambda row: row.best_rate, reverse=True)
    return [(row.shape, row.kernel) for row in fastest]


def list_default_candidates(
    candidates: Sequence[Candidate], rows: Iterable[Measurement], default: str
) -> list[Candidate]:
    """Return the default kernel on its best shape and on each shape where another kernel is a candidate. To know the
    gain over the default, both must be measured in the same rounds.
    """
    if all(kernel == default for _, kernel in candidates):
        return []
    own = max((row for row in rows if row.ok and row.kernel == default), key=lambda row: row.best_rate, default=None)
    shapes = [] if own is None else [own.shape]
    return [(shape, default) for shape in dict.fromkeys((*shapes, *(shape for shape, _ in candidates)))]


def choose_finalists(visits: Sequence[Measurement], count: int) -> list[Candidate]:
    """Choose finalists by short visits: half by the lowest energy per FLOP if power is known, the rest by speed."""
    seen = [row for row in visits if row.ok]
    fastest = sorted(seen, key=lambda row: row.best_rate, reverse=True)
    metered = [row for row in seen if row.conditions.watts]
    frugal = sorted(metered, key=lambda row: (row.conditions.watts or 0.0) / row.best_rate)
    chosen = dict.fromkeys((row.shape, row.kernel) for row in (*frugal[: (count + 1) // 2], *fastest))
    return list(chosen)[:count]


def drop_beaten_candidates(rows: Sequence[Measurement], left: Sequence[Candidate], hopeless: float) -> list[Candidate]:
    """Return the candidates with a median rate at most ``hopeless`` (a share) below that of the best candidate."""
    found = {candidate: rounds for candidate, rounds in group_rounds(rows).items() if candidate in left}
    if not found:
        return []
    middle = {candidate: compute_median_rate(rounds.values()) for candidate, rounds in found.items()}
    return [candidate for candidate in found if middle[candidate] >= (1 - hopeless) * max(middle.values())]


#: Steps, as a generator that returns the rows which answered them.
StepsWithRows = Generator[Step | Measurement, Measurement | None, list[Measurement]]


class Rounds(NamedTuple):
    """How many rounds ``choose`` the best candidate (0: take the first one), and how many then ``confirm`` it."""

    choose: int
    confirm: int


@dataclass
class _Phase:
    """Rounds that choose or rounds that confirm. ``until``: the backend time at which they end."""

    regime: Regime
    name: str
    max_rounds: int
    until: float
    rows: list[Measurement] = field(default_factory=list)

    @property
    def is_choosing(self) -> bool:
        return self.name == CHOOSE_PHASE

    @property
    def min_rounds(self) -> int:
        return min(MIN_ROUNDS, self.max_rounds)


@dataclass
class Confirmation:
    """Confirms the best candidate of a problem, in one regime at a time.

    ``kernels``: by name. ``visit_seconds``: the length of a visit in sustained. ``deadline``: when the run must end, in
    the backend's time.
    """

    runner: Runner
    problem: Problem
    kernels: Mapping[str, AnyKernel]
    precision: float
    chooser: random.Random
    visit_seconds: float
    deadline: float
    #: By regime, the seconds of the shortest step, including its preparation. Below, the shortest and the longest
    #: seconds that a step spent outside its visit.
    _shortest_step: dict[str, float] = field(default_factory=dict, init=False)
    _preparing: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    #: A candidate this far below the leader is dropped after MIN_ROUNDS, and when the choice is made.
    hopeless: ClassVar[float] = 0.005
    #: A candidate this far below the leader is dropped in any round.
    far_behind: ClassVar[float] = 0.1

    def run_rounds(
        self, regime: Regime, candidates: Sequence[Candidate], counts: Rounds, chosen_by: float, confirmed_by: float
    ) -> StepsWithRows:
        """Measure rounds that choose, then separate rounds that confirm the choice. Returns all their rows.

        ``chosen_by`` and ``confirmed_by``: the backend times by which choosing and confirming must end.
        """
        choosing, best_first = _Phase(regime, CHOOSE_PHASE, counts.choose, chosen_by), list(candidates)
        if counts.choose:
            self.runner.on_phase(f"{regime.name}: choosing")
            left = yield from self._repeat_rounds(choosing, candidates)
            if choosing.rows:  # the best first, because a slow device cannot confirm all
                best_first = [candidate for candidate in rank_candidates(choosing.rows) if candidate in left]
        self.runner.on_phase(f"{regime.name}: confirming")
        if regime.name != Sustained.name:
            confirming = _Phase(regime, CONFIRM_PHASE, counts.confirm, confirmed_by)
            yield from self._repeat_rounds(confirming, best_first)
            return choosing.rows + confirming.rows
        rows = choosing.rows
        chosen = [row for row in rows if best_first and (row.shape, row.kernel) == best_first[0]]
        conditions = summarize_conditions(chosen) if chosen else Conditions()
        # These visits take seconds, so try the next candidate only if the one before it failed.
        for candidate in best_first:
            visits = yield from self._confirm_by_visits(regime, conditions, candidate, counts.confirm, confirmed_by)
            rows += visits
            if all(row.ok for row in visits):
                break
        return rows

    def measure_step(self, step: Step) -> Generator[Step, Measurement | None, Measurement | None]:
        """Measure a step, and note how long it took, to predict later ones. Returns its row."""
        asked, is_held = self.runner.now(), self.runner.is_replaying
        row = yield step
        if row is not None and row.ok and not is_held:
            regime, took = step.regime, self.runner.now() - asked
            self._shortest_step[regime.name] = min(took, self._shortest_step.get(regime.name, math.inf))
            aside = max(0.0, took - (regime.fixed_visit_seconds or regime.last_visit_seconds))
            shortest, longest = self._preparing.get(regime.name, (aside, aside))
            self._preparing[regime.name] = (min(aside, shortest), max(aside, longest))
        return row

    def has_time_to_confirm(self) -> bool:
        """Return whether there is time for one more choosing visit in sustained, for the launches that it leaves
        queued, and for the visits that confirm. Always True while rows of an interrupted run answer the steps.
        """
        bridge = self.runner.backend.sustained_traits.bridge_seconds
        needed = self._shortest_step.get(Sustained.name, 0.0) + bridge + self.estimate_confirm_seconds()
        return self.runner.is_replaying or self.deadline - self.runner.now() >= needed

    def estimate_confirm_seconds(self) -> float:
        """Return the minimum time, in seconds, of the visits that confirm a candidate in sustained."""
        return MIN_ROUNDS * (
            Sustained.compute_min_reset_visit_seconds(self.runner.backend)
            + self._estimate_preparing_seconds(Sustained.name)
        )

    def _estimate_preparing_seconds(self, regime: str) -> float:
        """Return the expected seconds to prepare and verify a visit. Before the first visit in a regime, return the
        longest time in any other regime, because the best shapes are not the smallest.
        """
        if known := self._preparing.get(regime):
            return known[0]
        return max((longest for _, longest in self._preparing.values()), default=0.0)

    def _confirm_by_visits(
        self, regime: Regime, chosen: Conditions, candidate: Candidate, max_visits: int, until: float
    ) -> StepsWithRows:
        """Visit a candidate in sustained to confirm it. ``chosen``: the device's conditions when it was chosen."""
        phase, longest = _Phase(regime, CONFIRM_PHASE, max_visits, until), math.inf
        for number in range(1, max_visits + 1):
            # The first visit shows how long preparation takes; shorten the remaining required visits if necessary.
            if (due := phase.min_rounds + 1 - number) > 0:
                aside = self._estimate_preparing_seconds(regime.name)
                phase.regime = regime.make_confirmation_regime(
                    chosen, min(longest, (until - self.runner.now()) / due - aside)
                )
                longest = phase.regime.fixed_visit_seconds
                phase.until = until - longest - aside if longest else until
            yield from self._run_round(phase, number, [candidate])
            if len(phase.rows) < number or not phase.rows[-1].ok:
                break
        return phase.rows

    def _repeat_rounds(
        self, phase: _Phase, candidates: Sequence[Candidate]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate]]:
        """Measure rounds until time runs out or the choice is made, and return the remaining candidates. In rounds that
        confirm, the first candidate is dropped only if it fails.
        """
        left, own = list(candidates), phase.rows
        confirmed = [] if phase.is_choosing else left[:1]
        begun = self.runner.now()
        for number in range(1, phase.max_rounds + 1):
            due = yield from self._run_round(phase, number, left)
            if due is None:
                return left
            seconds_each = (self.runner.now() - begun) / max(len(own), 1)
            if phase.is_choosing:  # leave time for the rounds that confirm
                phase.until = min(phase.until, self.deadline - MIN_ROUNDS * len(left) * seconds_each)
            if not self._has_next_step(phase, number + 1, is_due=number < phase.min_rounds):
                break
            left = [each for each in left if each not in due]
            left = drop_beaten_candidates(own, left, self.hopeless if number >= phase.min_rounds else self.far_behind)
            if number < phase.min_rounds and left and not self.runner.is_replaying:
                rounds = phase.min_rounds - number + (MIN_ROUNDS if phase.is_choosing else 0)
                left = self._select_affordable(own, left, seconds_each, rounds)
            failed = {(row.shape, row.kernel) for row in own if not row.ok}
            left = [each for each in dict.fromkeys((*confirmed, *left)) if each not in failed]
            if len(left) <= (1 if phase.is_choosing else 0):  # nothing left to choose
                break
        return drop_beaten_candidates(own, left, self.hopeless)

    def _run_round(
        self, phase: _Phase, number: int, candidates: Sequence[Candidate]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate] | None]:
        """Measure each candidate once. Return those for which there was no time, or None if the run has ended."""
        regime, visits = phase.regime, (phase.max_rounds + 1 - number) * len(candidates)
        rule = StoppingRule(self.precision, self._compute_max_visit_seconds(regime, phase.until, visits))
        # Visits take seconds, so there are few of them. Keep the order of the candidates, the most promising first.
        is_choice_of_visits = phase.is_choosing and regime.name == Sustained.name
        due = list(candidates) if is_choice_of_visits else self.chooser.sample(candidates, len(candidates))
        while due:
            can_wait = is_choice_of_visits and phase.rows and not self.has_time_to_confirm()
            if not self._has_next_step(phase, number, is_due=number <= phase.min_rounds and not can_wait):
                break
            shape, kernel = due[0]
            step = Step(self.kernels[kernel], self.problem, shape, regime, rule, phase.name, number)
            row = yield from self.measure_step(step)
            if row is None:
                return None
            phase.rows.append(row)
            # The row may come from an interrupted run, which had measured another candidate at this point.
            due = [each for each in due if each != (row.shape, row.kernel)]
        return due

    def _has_next_step(self, phase: _Phase, number: int, is_due: bool) -> bool:
        return self.runner.has_next_step(
            phase.regime, phase.name, phase.until, number, is_due=is_due, problem=self.problem
        )

    def _compute_max_visit_seconds(self, regime: Regime, until: float, visits: int) -> float:
        if regime.name == Sustained.name:
            return self.visit_seconds  # rounds give the precision
        return min(1.0, max(0.05, (until - self.runner.now()) / max(visits, 1)))

    def _select_affordable(
        self, rows: Sequence[Measurement], left: Sequence[Candidate], seconds_each: float, rounds: int
    ) -> list[Candidate]:
        """Return the best candidates so far: as many as ``rounds`` more rounds can measure within the budget."""
        count = (self.deadline - self.runner.now()) / max(seconds_each, 1e-9) / rounds
        found = group_rounds(rows)
        best_first = sorted(left, key=lambda each: compute_median_rate(found[each].values()), reverse=True)
        return best_first[: max(1, int(min(count, len(left))))]
