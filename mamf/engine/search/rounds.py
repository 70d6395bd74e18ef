"""Measure candidates for a ceiling (the highest rate of a device) in interleaved rounds: some rounds choose the best
candidate, then separate rounds confirm its rate with new measurements. The rounds can measure any operation.

A *candidate* is a shape and the name of a kernel. A round measures each candidate once. A *visit* is one measurement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from mamf.ceilings.ceiling import (
    CHOOSE_PHASE,
    CONFIRM_PHASE,
    MIN_CONFIRMING_ROUNDS,
    Candidate,
    compute_median_rate,
    group_rounds_by_candidate,
    rank_candidates,
    summarize_conditions,
)
from mamf.engine.regimes import Regime, StoppingRule, SustainedRegime
from mamf.engine.runner import Runner, Step
from mamf.kernel import AnyKernel, Problem
from mamf.measurement import Conditions, Measurement, group_pairs


def find_best_candidate_per_size_pair(rows: Iterable[Measurement]) -> list[Candidate]:
    """For each pair of M and N, return the shape and kernel of its fastest row. The fastest pair comes first. Rows
    whose shapes differ only in K, or in the order of M and N, count as one pair, because such shapes have nearly equal
    rates.
    """
    fastest = [
        max(group, key=lambda row: row.best_rate)
        for group in group_pairs((tuple(sorted((row.shape.m, row.shape.n))), row) for row in rows if row.ok).values()
    ]
    return [(row.shape, row.kernel) for row in sorted(fastest, key=lambda row: row.best_rate, reverse=True)]


def list_default_kernel_candidates(
    candidates: Sequence[Candidate], rows: Iterable[Measurement], default_kernel: str
) -> list[Candidate]:
    """Return additional candidates with the default kernel, on its fastest shape in ``rows`` and on the shape of each
    candidate. If the same rounds measure them and the candidates, the log shows how much faster another kernel is than
    the default kernel. Return an empty list if all candidates have the default kernel.
    """
    if all(kernel == default_kernel for _, kernel in candidates):
        return []
    fastest_row = max(
        (row for row in rows if row.ok and row.kernel == default_kernel), key=lambda row: row.best_rate, default=None
    )
    shapes = [] if fastest_row is None else [fastest_row.shape]
    return [(shape, default_kernel) for shape in dict.fromkeys((*shapes, *(shape for shape, _ in candidates)))]


def choose_candidates_by_visits(visits: Sequence[Measurement], count: int) -> list[Candidate]:
    """Choose ``count`` candidates from the rows of short visits of the sustained regime. If the power is known, half of
    the candidates are those with the lowest energy per FLOP. The others are the fastest.
    """
    successful_visits = [row for row in visits if row.ok]
    fastest = sorted(successful_visits, key=lambda row: row.best_rate, reverse=True)
    frugal = sorted(
        (row for row in successful_visits if row.conditions.watts),
        key=lambda row: (row.conditions.watts or 0.0) / row.best_rate,
    )
    return list(dict.fromkeys((row.shape, row.kernel) for row in (*frugal[: (count + 1) // 2], *fastest)))[:count]


def drop_beaten_candidates(
    rows: Sequence[Measurement], candidates: Sequence[Candidate], max_slowdown_share: float
) -> list[Candidate]:
    """Return the ``candidates`` that are fast enough. Drop a candidate if its median rate over the rounds in ``rows``
    is lower than the best candidate's by more than the share ``max_slowdown_share``.
    """
    rounds_by_candidate = {
        candidate: rounds for candidate, rounds in group_rounds_by_candidate(rows).items() if candidate in candidates
    }
    if not rounds_by_candidate:
        return []
    median_rates = {
        candidate: compute_median_rate(rounds.values()) for candidate, rounds in rounds_by_candidate.items()
    }
    return [
        candidate
        for candidate in rounds_by_candidate
        if median_rates[candidate] >= (1 - max_slowdown_share) * max(median_rates.values())
    ]


#: How long the sustained regime measures a shape at each visit, in seconds.
SUSTAINED_VISIT_SECONDS = 1.0
#: A generator that yields steps to measure, receives their rows, and returns all these rows.
StepsReturningRows = Generator[Step | Measurement, Measurement | None, list[Measurement]]


class RoundCounts(NamedTuple):
    """The maximum numbers of rounds.

    - ``max_choosing_rounds``: rounds that choose the best candidate; 0: take the first candidate.
    - ``max_confirming_rounds``: later rounds that confirm the rate of this candidate.
    """

    max_choosing_rounds: int
    max_confirming_rounds: int


@dataclass
class _RoundsPhase:
    """One series of rounds, which choose a candidate or confirm its rate.

    - ``phase_name``: CHOOSE_PHASE or CONFIRM_PHASE.
    - ``end_time``: the backend time (``Backend.now``) at which the rounds must end.
    - ``rows``: the rows of the rounds so far.
    """

    regime: Regime
    phase_name: str
    max_rounds: int
    end_time: float
    rows: list[Measurement] = field(default_factory=list)

    @property
    def is_choosing(self) -> bool:
        return self.phase_name == CHOOSE_PHASE

    @property
    def min_rounds(self) -> int:
        return min(MIN_CONFIRMING_ROUNDS, self.max_rounds)


@dataclass
class ConfirmationRounds:
    """The rounds of one problem, in one or several regimes, that choose the best candidate and confirm its rate.

    - ``kernels``: the kernels of the candidates, by name.
    - ``precision``: the relative precision at which a measurement stops.
    - ``order_rng``: draws the order of candidates in each round.
    - ``deadline``: the backend time (``Backend.now``) at which the run must end.
    """

    runner: Runner
    problem: Problem
    kernels: Mapping[str, AnyKernel]
    precision: float
    order_rng: random.Random
    deadline: float
    #: For each regime: the seconds of the shortest step so far. A step is the preparation and measurement of one
    #: candidate.
    _min_step_seconds: dict[str, float] = field(default_factory=dict, init=False)
    #: By regime: the shortest and the longest time, in seconds, to prepare and verify the kernel of a step.
    _preparation_seconds_by_regime: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    #: After MIN_CONFIRMING_ROUNDS rounds, and at the end of a series of rounds, drop candidates whose median rate is
    #: more than this share below the best median rate.
    max_slowdown_share: ClassVar[float] = 0.005
    #: After any earlier round, drop candidates whose median rate is more than this share below the best median rate.
    max_early_slowdown_share: ClassVar[float] = 0.1

    def run_rounds(
        self,
        regime: Regime,
        candidates: Sequence[Candidate],
        round_counts: RoundCounts,
        choosing_end_time: float,
        confirming_end_time: float,
    ) -> StepsReturningRows:
        """Measure rounds that choose a candidate, then separate rounds that confirm its rate. Return the rows of all
        rounds.

        ``round_counts``: the maximum numbers of rounds. ``choosing_end_time``, ``confirming_end_time``: the backend
        times (``Backend.now``) by which choosing and confirming must end.
        """
        choosing, best_first = (
            _RoundsPhase(regime, CHOOSE_PHASE, round_counts.max_choosing_rounds, choosing_end_time),
            list(candidates),
        )
        if round_counts.max_choosing_rounds:
            self.runner.report_phase(f"{regime.name}: comparing the fastest shapes and kernels")
            remaining = yield from self._repeat_rounds(choosing, candidates)
            if choosing.rows:  # Put the best first, because a slow device has no time to confirm all candidates.
                best_first = [candidate for candidate in rank_candidates(choosing.rows) if candidate in remaining]
        self.runner.report_phase(f"{regime.name}: measuring the fastest again")
        if regime.name != SustainedRegime.name:
            confirming = _RoundsPhase(regime, CONFIRM_PHASE, round_counts.max_confirming_rounds, confirming_end_time)
            yield from self._repeat_rounds(confirming, best_first)
            return choosing.rows + confirming.rows
        rows = choosing.rows
        conditions = summarize_conditions(row for row in rows if [(row.shape, row.kernel)] == best_first[:1])
        # A visit of the sustained regime takes seconds, so visit the next candidate only if the one before it failed.
        for candidate in best_first:
            visits = yield from self._confirm_candidate_by_visits(
                regime, conditions, candidate, round_counts.max_confirming_rounds, confirming_end_time
            )
            rows += visits
            if all(row.ok for row in visits):
                break
        return rows

    def measure_step(self, step: Step) -> Generator[Step, Measurement | None, Measurement | None]:
        """Measure a step, store its time in order to predict the time of later steps, and return its row. Return None
        if the budget of the run has ended.
        """
        start_time, is_replayed = self.runner.now(), self.runner.is_replaying
        row = yield step
        if row is not None and row.ok and not is_replayed:
            regime, step_seconds = step.regime, self.runner.now() - start_time
            self._min_step_seconds[regime.name] = min(step_seconds, self._min_step_seconds.get(regime.name, math.inf))
            preparation_seconds = max(0.0, step_seconds - (regime.fixed_visit_seconds or regime.last_visit_seconds))
            min_seconds, max_seconds = self._preparation_seconds_by_regime.get(
                regime.name, (preparation_seconds, preparation_seconds)
            )
            self._preparation_seconds_by_regime[regime.name] = (
                min(preparation_seconds, min_seconds),
                max(preparation_seconds, max_seconds),
            )
        return row

    def has_time_to_confirm(self) -> bool:
        """Return whether there is time in the sustained regime for one more visit that chooses a candidate, and then
        for the confirmation. The launches that the visit leaves in the queue take time too. While rows of an
        interrupted run answer the steps, return True.
        """
        needed = (
            self._min_step_seconds.get(SustainedRegime.name, 0.0)
            + self.runner.backend.sustained_traits.bridge_seconds
            + self.estimate_confirmation_seconds()
        )
        return self.runner.is_replaying or self.deadline - self.runner.now() >= needed

    def estimate_confirmation_seconds(self) -> float:
        """Return the seconds that the shortest confirmation of a candidate in the sustained regime takes, with its
        preparation.
        """
        return MIN_CONFIRMING_ROUNDS * (
            SustainedRegime.compute_min_visit_seconds_with_rest(self.runner.backend)
            + self._estimate_preparation_seconds(SustainedRegime.name)
        )

    def _estimate_preparation_seconds(self, regime: str) -> float:
        """Estimate the seconds to prepare and verify the kernel of the next visit. Before the first visit in a regime,
        return the longest time in any other regime, because large shapes take the longest and the candidates are large.
        """
        min_and_max = self._preparation_seconds_by_regime.get(regime)
        return (
            min_and_max[0]
            if min_and_max
            else max((longest for _, longest in self._preparation_seconds_by_regime.values()), default=0.0)
        )

    def _confirm_candidate_by_visits(
        self, regime: Regime, chosen_conditions: Conditions, candidate: Candidate, max_visits: int, end_time: float
    ) -> StepsReturningRows:
        """Confirm a candidate: measure it in up to ``max_visits`` visits of the sustained regime, and return the rows.
        ``chosen_conditions``: the clock and other conditions of the device when the candidate was chosen.
        """
        phase, visit_seconds = _RoundsPhase(regime, CONFIRM_PHASE, max_visits, end_time), math.inf
        for number in range(1, max_visits + 1):
            # If little time is left, make the required visits shorter, so that all of them fit. The first visit shows
            # how long preparation takes.
            if (required_visits := phase.min_rounds + 1 - number) > 0:
                preparation_seconds = self._estimate_preparation_seconds(regime.name)
                phase.regime = regime.make_confirmation_regime(
                    chosen_conditions,
                    min(visit_seconds, (end_time - self.runner.now()) / required_visits - preparation_seconds),
                )
                visit_seconds = phase.regime.fixed_visit_seconds
                phase.end_time = end_time - visit_seconds - preparation_seconds if visit_seconds else end_time
            yield from self._run_round(phase, number, [candidate])
            if len(phase.rows) < number or not phase.rows[-1].ok:
                break
        return phase.rows

    def _repeat_rounds(
        self, phase: _RoundsPhase, candidates: Sequence[Candidate]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate]]:
        """Measure rounds until time runs out or one candidate is left, drop slow candidates after each round, and
        return the remaining candidates. In rounds that confirm, the first candidate is dropped only if it fails.
        """
        remaining, rows = list(candidates), phase.rows
        confirmed = [] if phase.is_choosing else remaining[:1]
        start_time = self.runner.now()
        for number in range(1, phase.max_rounds + 1):
            unmeasured = yield from self._run_round(phase, number, remaining)
            if unmeasured is None:
                return remaining
            seconds_per_measurement = (self.runner.now() - start_time) / max(len(rows), 1)
            if phase.is_choosing:  # Leave time for the rounds that confirm.
                phase.end_time = min(
                    phase.end_time, self.deadline - MIN_CONFIRMING_ROUNDS * len(remaining) * seconds_per_measurement
                )
            if not self._has_next_step(phase, number + 1, is_required=number < phase.min_rounds):
                break
            remaining = [candidate for candidate in remaining if candidate not in unmeasured]
            remaining = drop_beaten_candidates(
                rows,
                remaining,
                self.max_slowdown_share if number >= phase.min_rounds else self.max_early_slowdown_share,
            )
            if number < phase.min_rounds and remaining and not self.runner.is_replaying:
                rounds = phase.min_rounds - number + (MIN_CONFIRMING_ROUNDS if phase.is_choosing else 0)
                remaining = self._select_affordable_candidates(rows, remaining, seconds_per_measurement, rounds)
            failed = {(row.shape, row.kernel) for row in rows if not row.ok}
            remaining = [candidate for candidate in dict.fromkeys((*confirmed, *remaining)) if candidate not in failed]
            if len(remaining) <= (1 if phase.is_choosing else 0):  # There is nothing left to choose or to confirm.
                break
        return drop_beaten_candidates(rows, remaining, self.max_slowdown_share)

    def _run_round(
        self, phase: _RoundsPhase, number: int, candidates: Sequence[Candidate]
    ) -> Generator[Step | Measurement, Measurement | None, list[Candidate] | None]:
        """Measure each candidate once, in random order. Return the candidates for which there was no time, or None if
        the budget of the run has ended.
        """
        regime, visits = phase.regime, (phase.max_rounds + 1 - number) * len(candidates)
        # In the sustained regime, use spare time for more rounds, not for longer visits, because more rounds make the
        # rate more precise.
        seconds_left = min(1.0, max(0.05, (phase.end_time - self.runner.now()) / max(visits, 1)))
        rule = StoppingRule(
            self.precision, SUSTAINED_VISIT_SECONDS if regime.name == SustainedRegime.name else seconds_left
        )
        # Visits of the sustained regime take seconds, so a round that chooses may not get to all candidates. Measure
        # them in the given order, the most promising first.
        is_choosing_by_visits = phase.is_choosing and regime.name == SustainedRegime.name
        unmeasured = list(candidates) if is_choosing_by_visits else self.order_rng.sample(candidates, len(candidates))
        while unmeasured:
            can_wait = is_choosing_by_visits and phase.rows and not self.has_time_to_confirm()
            if not self._has_next_step(phase, number, is_required=number <= phase.min_rounds and not can_wait):
                break
            shape, kernel = unmeasured[0]
            row = yield from self.measure_step(
                Step(self.kernels[kernel], self.problem, shape, regime, rule, phase.phase_name, number)
            )
            if row is None:
                return None
            phase.rows.append(row)
            # The row may come from an interrupted run, in which another candidate was measured at this point.
            unmeasured = [candidate for candidate in unmeasured if candidate != (row.shape, row.kernel)]
        return unmeasured

    def _has_next_step(self, phase: _RoundsPhase, number: int, is_required: bool) -> bool:
        return self.runner.has_next_step(
            phase.regime, phase.phase_name, phase.end_time, number, is_required=is_required, problem=self.problem
        )

    def _select_affordable_candidates(
        self, rows: Sequence[Measurement], candidates: Sequence[Candidate], seconds_per_measurement: float, rounds: int
    ) -> list[Candidate]:
        """Return the best candidates so far: as many as can be measured in ``rounds`` more rounds before the deadline,
        but at least one.
        """
        count = (self.deadline - self.runner.now()) / max(seconds_per_measurement, 1e-9) / rounds
        rounds_by_candidate = group_rounds_by_candidate(rows)
        best_first = sorted(
            candidates, key=lambda each: compute_median_rate(rounds_by_candidate[each].values()), reverse=True
        )
        return best_first[: max(1, int(min(count, len(candidates))))]
