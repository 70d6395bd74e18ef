"""Interleaved rounds that choose among candidates, and fresh ones that confirm what was chosen: of any operation."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from mamf.ceilings.candidates import not_beaten
from mamf.ceilings.ceiling import (
    CHOOSE,
    CONFIRM,
    FEWEST_ROUNDS,
    Candidate,
    figures,
    median_rate,
    ranked,
    typical,
)
from mamf.engine.runner import Runner, Step
from mamf.kernel import AnyKernel, Problem
from mamf.measurement import Conditions, Measurement
from mamf.regimes import Regime, StoppingRule, Sustained

#: Steps that end in the rows which answered them.
Answering = Generator[Step | Measurement, Measurement | None, list[Measurement]]


class Rounds(NamedTuple):
    """How often candidates are measured: to choose the best of them, at 0 they are as good as they are ordered; and
    then afresh to confirm it.
    """

    choose: int
    confirm: int


@dataclass
class Confirmation:
    """Confirms the best of a problem in each regime that it is asked for.

    ``kernels``: by name. ``visit_seconds``: of a visit in sustained. ``deadline``: of the
    run, in seconds of its clock.
    """

    run: Runner
    problem: Problem
    kernels: Mapping[str, AnyKernel]
    precision: float
    chooser: random.Random
    visit_seconds: float
    deadline: float
    #: By regime the shortest step, with all that is prepared for it, and what a step takes beside its visit at least.
    _shortest_step: dict[str, float] = field(default_factory=dict, init=False)
    _preparing: dict[str, float] = field(default_factory=dict, init=False)

    #: A candidate this far below the leader after FEWEST_ROUNDS, or when a choice is made, is not measured again.
    hopeless: ClassVar[float] = 0.005

    def rounds(
        self, regime: Regime, candidates: Sequence[Candidate], most: Rounds, chosen_by: float, confirmed_by: float
    ) -> Answering:
        """Interleaved rounds of fresh measurements that choose, then others that confirm what was chosen; all of them.

        ``chosen_by`` and ``confirmed_by``: moments by which time ends them.
        """
        rows: list[Measurement] = []
        best_first = list(candidates)
        if most.choose:
            self.run.on_phase(f"{regime.name}: choosing")
            left = yield from self._round_after_round(regime, CHOOSE, candidates, most.choose, chosen_by, rows)
            # The best of them first: a slow device confirms what it can.
            best_first = [candidate for candidate in ranked(rows) if candidate in left]
        self.run.on_phase(f"{regime.name}: confirming")
        if regime.name != Sustained.name:
            yield from self._round_after_round(regime, CONFIRM, best_first, most.confirm, confirmed_by, rows)
            return rows
        # Visits of seconds are dear: the next candidate has them only where the one before it failed.
        confirming = self._confirming(regime, best_first, rows, confirmed_by)
        until = confirmed_by - confirming.visit_takes
        for candidate in best_first:
            yield from self._round_after_round(confirming, CONFIRM, [candidate], most.confirm, until, rows)
            if all(row.ok for row in rows if row.phase == CONFIRM and (row.shape, row.kernel) == candidate):
                break
        return rows

    def time_step(self, regime: Regime, took: float) -> None:
        """What a step of so many seconds says of those to come."""
        name, aside = regime.name, max(0.0, took - regime.visit_took)
        self._shortest_step[name] = min(took, self._shortest_step.get(name, math.inf))
        self._preparing[name] = min(aside, self._preparing.get(name, math.inf))

    def leaves_time_to_confirm(self) -> bool:
        """Whether sustained may have one more visit that chooses, by what steps took: those that confirm start anew."""
        name = Sustained.name
        confirming = FEWEST_ROUNDS * (Sustained.shortest_anew(self.run.backend) + self._aside(name))
        return self.deadline - self.run.now() >= self._shortest_step.get(name, 0.0) + confirming

    def _aside(self, regime: str) -> float:
        """Seconds that preparing and verifying a visit are expected to take."""
        return self._preparing.get(regime, max(self._preparing.values(), default=0.0))

    def _confirming(
        self, regime: Regime, best_first: Sequence[Candidate], rows: Sequence[Measurement], until: float
    ) -> Regime:
        """The regime that confirms, by how the device ran what was chosen."""
        chosen = [row for row in rows if best_first and (row.shape, row.kernel) == best_first[0]]
        seconds = (until - self.run.now()) / FEWEST_ROUNDS - self._aside(regime.name)
        return regime.confirming(typical(chosen) if chosen else Conditions(), seconds)

    def _round_after_round(
        self,
        regime: Regime,
        phase: str,
        candidates: Sequence[Candidate],
        most: int,
        until: float,
        rows: list[Measurement],
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate]]:
        """Returns what is still in the running. What is confirmed, the first of them, stays while it is right."""
        left, own = list(candidates), list[Measurement]()
        confirmed = left[:1] if phase == CONFIRM else []
        fewest = min(FEWEST_ROUNDS, most)
        precision = StoppingRule(self.precision)
        begun = self.run.now()
        for number in range(1, most + 1):
            longest = self._longest_visit(regime, until, (most + 1 - number) * len(left))
            # Visits of seconds are few: the likeliest have theirs first.
            is_choice_of_visits = phase == CHOOSE and regime.name == Sustained.name
            due = list(left) if is_choice_of_visits else self.chooser.sample(left, len(left))
            while due:
                can_wait = is_choice_of_visits and own and not self.leaves_time_to_confirm()
                if not self._goes_on(regime, phase, until, number, is_due=number <= fewest and not can_wait):
                    break
                shape, kernel = due[0]
                rule = replace(precision, seconds=longest)
                asked = self.run.now()
                row = yield Step(self.kernels[kernel], self.problem, shape, regime, rule, phase, number)
                if row is None:
                    return left
                self.time_step(regime, self.run.now() - asked)
                own.append(row)
                rows.append(row)
                # What an interrupted run had time for, its rows know and the clock of this one does not: a held row may
                # be of another candidate.
                due = [each for each in due if each != (row.shape, row.kernel)]
            seconds_each = (self.run.now() - begun) / max(len(own), 1)
            if phase == CHOOSE:  # what confirms them is due
                until = min(until, self.deadline - FEWEST_ROUNDS * len(left) * seconds_each)
            if not self._goes_on(regime, phase, until, number + 1, is_due=number < fewest):
                break
            left = [each for each in left if each not in due]
            left = not_beaten(own, left, self.hopeless if number >= fewest else 1.0)
            if number < fewest and left:
                rounds = fewest - number + (FEWEST_ROUNDS if phase == CHOOSE else 0)
                left = self._affordable(own, left, seconds_each, rounds)
            failed = {(row.shape, row.kernel) for row in own if not row.ok}
            left = [each for each in dict.fromkeys((*confirmed, *left)) if each not in failed]
            if len(left) <= (1 if phase == CHOOSE else 0):  # there is no more to choose
                break
        return not_beaten(own, left, self.hopeless)

    def _goes_on(self, regime: Regime, phase: str, until: float, number: int, is_due: bool) -> bool:
        return self.run.goes_on(regime, phase, until, number, is_due=is_due, problem=self.problem)

    def _longest_visit(self, regime: Regime, until: float, visits: int) -> float:
        if regime.name == Sustained.name:
            return self.visit_seconds  # precision is had from rounds
        return min(1.0, max(0.05, (until - self.run.now()) / max(visits, 1)))

    def _affordable(
        self, rows: Sequence[Measurement], left: Sequence[Candidate], seconds_each: float, rounds: int
    ) -> list[Candidate]:
        """The best so far, as many as the budget still lets have so many rounds: a slow device confirms few."""
        count = (self.deadline - self.run.now()) / max(seconds_each, 1e-9) / rounds
        found = figures(rows)
        best_first = sorted(left, key=lambda each: median_rate(found[each].values()), reverse=True)
        return best_first[: max(1, int(min(count, len(left))))]
