"""Compute ceilings, and the share of a ceiling that a row (a measurement) reaches. A ceiling is the highest confirmed
rate of a device for a dtype in a regime. This module computes everything from rows; it measures nothing.

A candidate is a pair of a shape and a kernel. A search measures its candidates in rounds: each round measures every
remaining candidate once. A candidate remains until the search drops it. The rounds of the phase ``choose`` decide which
candidate wins. The later rounds of the phase ``confirm`` measure the winner again, and only they give its rate: the
highest of several noisy rates is biased upward (the winner's curse), but a new measurement of the winner is not.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import Backend
from mamf.calibration import look_up_repeatability
from mamf.errors import IncomparableError, UsageError, is_number, require_seconds
from mamf.kernel import Problem
from mamf.measurement import (
    TERA,
    Conditions,
    Measurement,
    NotebookTable,
    Rate,
    RatesByDtypeAndRegime,
    RateSource,
    RateT,
    compute_relative_timing_error,
    find_rate,
    group_pairs,
    make_dtype_label,
)
from mamf.plans import SUSTAINED
from mamf.statistics import (
    FigureUncertainty,
    Interval,
    Repeatability,
    compute_median_ignoring_none,
    compute_median_interval,
    compute_repeat_interval,
    compute_run_error,
)

#: The ceilings of matmuls by dtype (as ``make_dtype_label`` formats it) and regime.
Ceilings = Mapping[tuple[str, str], "Ceiling"]
#: A row can reach more than 100 % of a ceiling, because the speed of the card may have changed since the ceiling was
#: measured. A share above this limit means that the ceiling is too low.
MAX_SHARE_OF_CEILING = 1.1
#: Reports mention that the speed of a card has drifted if the speed has changed by more than MAX_DRIFT_SHARE. If it has
#: changed by more than MAX_COMPARABLE_DRIFT_SHARE, they also advise against comparing the row with others.
MAX_DRIFT_SHARE, MAX_COMPARABLE_DRIFT_SHARE = 0.01, 0.1
#: A candidate of a search for the ceiling: a shape and the name of a kernel.
Candidate = tuple[Any, str]
CHOOSE_PHASE, CONFIRM_PHASE = "choose", "confirm"
# A candidate's rate becomes a ceiling only after at least this many confirming rounds have measured the candidate.
MIN_CONFIRMING_ROUNDS = 3
# If a measurement of the winner is faster than the ceiling by more than this factor, the ceiling is too low. A cold
# card cannot explain the difference, because warming up changes the speed of a card by less than 2 %.
_CLEARLY_FASTER_FACTOR = 1.1


@dataclass(frozen=True, kw_only=True)
class Ceiling(NotebookTable, Rate):
    """The confirmed highest rate of a device for one problem in one regime.

    - ``rate``: the rate over all confirming rounds, in TFLOPS or, if the operation counts bytes, in TB/s. In the regime
      burst it is the median over rounds; in the regime sustained, total work divided by total time.
    - ``interval``: the 95 % interval in which the rate of another run of the same kernel is expected.
    - ``dtype``, ``unit``: the dtype of ``problem`` and the unit of ``rate``. mamf derives both from the other fields.
    - ``round_count``: the number of confirming rounds that measured the winner.
    - ``tied_candidates``: the other candidates that, judging by the confirming rounds, may be as fast as the winner.
    - ``gain_over_default``: how much faster the winning kernel is than the default kernel on the winning shape, as a
      share; None if the default kernel won or was not measured.
    - ``repeatability``: how much repeated runs differ. mamf computes the interval from this value and the rounds. None
      if the ceiling is a single row of a log converted from an older version: its interval contains only its scatter.
    """

    dtype: str = field(init=False)
    unit: str = field(init=False)
    source: RateSource = "measured"
    regime: str
    interval: Interval
    problem: Any
    kernel: str
    shape: Any
    round_count: int
    tied_candidates: tuple[Candidate, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    gain_over_default: float | None = None
    repeatability: Repeatability | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", make_dtype_label(self.problem))
        object.__setattr__(self, "unit", str(self.problem.compute_work(self.shape).unit))

    def __repr__(self) -> str:
        interval = f"{self.interval.low:.4g} to {self.interval.high:.4g}" if self.interval.is_known else "unknown"
        figure = f"{self.rate:.4g} {self.unit}, 95 % repeat interval: {interval}, at {self.shape} by {self.kernel}"
        return f"Ceiling({self.device}, {self.dtype}, {self.regime}: {figure})"

    @property
    def seconds(self) -> float:
        """The seconds that one launch of the winning kernel takes if the launch runs at the rate of the ceiling."""
        return float(self.problem.compute_work(self.shape).amount) / (self.rate * TERA)

    @property
    def joules_per_tflop(self) -> float | None:
        """The energy per 1e12 FLOP in joules; None in the regime burst, where the power sensor averages over idle time
        between launches.
        """
        return None if self.regime != "sustained" or not self.conditions.watts else self.conditions.watts / self.rate

    def compute_utilization(self, *, flop: float, seconds: float, regime: str) -> float:
        """Return MAMFU: the rate ``flop / seconds`` as a share of this ceiling.

        Raises IncomparableError if ``regime`` is not the regime of the ceiling, because the clocks of regimes differ,
        or if the interval of the ceiling is unknown. Raises UsageError if ``seconds`` or ``flop`` is not a valid
        number.
        """
        require_seconds("seconds", seconds)
        if not is_number(flop) or not 0 <= flop < math.inf:
            raise UsageError(f"flop must be a finite number of at least 0, not {flop}")
        if regime != self.regime:
            raise IncomparableError(
                f"a rate in the regime {regime} cannot be compared with a ceiling in the regime {self.regime}: "
                "compare rates of one regime"
            )
        if not self.interval.is_known:
            raise IncomparableError(
                "this ceiling is too noisy to compare rates with it: measure it again with 'mamf find'"
            )
        return flop / seconds / (self.rate * TERA)


def find_confirmed_ceilings(
    rows: Iterable[Measurement],
    requested_ceilings: Iterable[tuple[Problem, str, str | None]],
    device: str,
    uuid_hash: str | None = None,
) -> dict[tuple[Problem, str], Ceiling]:
    """Return the ceilings that the rows of a run confirm, by problem and regime.

    ``requested_ceilings``: the problem, the regime and the default kernel of each ceiling to compute. If another visit
    (one measurement) of the winner was clearly faster than the ceiling (``has_faster_visit``), mark the interval of the
    ceiling as unknown by setting ``low`` to 0.
    """
    rows = list(rows)
    ceilings: dict[tuple[Problem, str], Ceiling] = {}
    for problem, regime, default_kernel in requested_ceilings:
        rows_of_ceiling = [row for row in rows if (row.problem, row.regime) == (problem, regime)]
        ceiling = find_confirmed_ceiling(rows_of_ceiling, device, uuid_hash, default_kernel)
        if ceiling is not None:
            unknown_interval = replace(ceiling.interval, low=0.0)
            ceilings[problem, regime] = (
                replace(ceiling, interval=unknown_interval) if has_faster_visit(ceiling, rows_of_ceiling) else ceiling
            )
    return ceilings


def has_faster_visit(ceiling: Ceiling, rows: Iterable[Measurement]) -> bool:
    """Return whether a visit (one measurement) of the ceiling's winner was clearly faster than the confirming rounds.

    If so, another program probably slowed the device down during the confirming rounds, so the rate of the ceiling is
    too low. A visit that is slower than these rounds proves nothing: the program may have slowed down only that visit.
    """
    winner = (ceiling.problem, ceiling.regime, ceiling.shape, ceiling.kernel)
    winner_rates = (
        row.best_rate for row in rows if row.ok and (row.problem, row.regime, row.shape, row.kernel) == winner
    )
    return max(winner_rates, default=0.0) > _CLEARLY_FASTER_FACTOR * max(ceiling.interval.high, ceiling.rate)


def explain_missing_ceiling(rows: Sequence[Measurement]) -> str | None:
    """Return the status of the first row and the reason why it failed, if all rows failed. Return None if a row
    succeeded or ``rows`` is empty.
    """
    return None if not rows or any(row.ok for row in rows) else f"{rows[0].status}, {rows[0].reason}"


def find_confirmed_ceiling(
    rows: Iterable[Measurement], device: str, uuid_hash: str | None = None, default_kernel: str | None = None
) -> Ceiling | None:
    """Return the ceiling that the confirming rounds give, or None if fewer than MIN_CONFIRMING_ROUNDS rounds measured
    the winner.

    ``rows``: the rows of one problem and regime; rows of phases other than ``choose`` and ``confirm`` are ignored. The
    winner is compared with another candidate by the ratio of their rates in each round, because the speed of the device
    may change between rounds.
    """
    rows = [row for row in rows if row.phase in (CHOOSE_PHASE, CONFIRM_PHASE)]
    choosing_rows = [row for row in rows if row.phase == CHOOSE_PHASE]
    confirming_rounds = group_rounds_by_candidate(row for row in rows if row.phase != CHOOSE_PHASE)
    # Logs converted from an older version of mamf have only one phase. Its rounds choose the winner and also give the
    # winner's rate, which is therefore biased upward.
    failed_candidates = {(row.shape, row.kernel) for row in rows if not row.ok}
    winner = next(
        (candidate for candidate in rank_candidates(choosing_rows or rows) if candidate not in failed_candidates), None
    )
    if winner is None or len(confirming_rounds.get(winner, ())) < MIN_CONFIRMING_ROUNDS:
        return None
    winner_rounds = confirming_rounds[winner]
    shape, kernel = winner
    rate, interval = combine_rounds(list(winner_rounds.values()))
    gain = None
    compared_rounds = group_rounds_by_candidate(choosing_rows) or confirming_rounds
    if default_kernel is not None and kernel != default_kernel and (shape, default_kernel) in compared_rounds:
        gain = (
            stdlib_statistics.median(
                compute_rate_ratios(compared_rounds[winner], compared_rounds[shape, default_kernel])
            )
            - 1
        )
    row = next(iter(winner_rounds.values()))
    return Ceiling(
        device=device,
        uuid_hash=uuid_hash,
        problem=row.problem,
        regime=row.regime,
        kernel=kernel,
        shape=shape,
        rate=rate,
        interval=interval,
        round_count=len(winner_rounds),
        tied_candidates=tuple(
            other
            for other in _find_remaining_candidates(confirming_rounds)
            if other != winner and is_tied(winner_rounds, confirming_rounds[other])
        ),
        conditions=summarize_conditions(winner_rounds.values()),
        gain_over_default=gain,
        repeatability=choose_repeatability(list(winner_rounds.values())),
    )


def _find_remaining_candidates(
    rounds_by_candidate: Mapping[Candidate, Mapping[int, Measurement]],
) -> list[Candidate]:
    """Return the candidates that the search has not dropped: every round has measured them, or every round except the
    last one, which may be incomplete.
    """
    round_count = max(map(len, rounds_by_candidate.values()), default=0)
    return [candidate for candidate, rounds in rounds_by_candidate.items() if len(rounds) >= round_count - 1]


def rank_candidates(rows: Iterable[Measurement]) -> list[Candidate]:
    """Return the candidates of a search, sorted by median rate over rounds, fastest first. Candidates that the search
    has dropped come last.
    """
    rounds_by_candidate = group_rounds_by_candidate(rows)
    remaining_candidates = set(_find_remaining_candidates(rounds_by_candidate))
    return sorted(
        rounds_by_candidate,
        key=lambda candidate: (
            candidate in remaining_candidates,
            compute_median_rate(rounds_by_candidate[candidate].values()),
        ),
        reverse=True,
    )


def combine_rounds(rounds: Sequence[Measurement]) -> tuple[float, Interval]:
    """Return the rate of one candidate over all rounds, in TFLOPS or TB/s, and the interval in which the rate of
    another run is expected.

    The rate is the median of the rounds or, in regimes that report a mean (such as sustained), total work divided by
    total time. In logs converted from an older version of mamf, it is always the median of the rates. The interval
    depends on the calibration, which says how much repeated runs differ.
    """
    seconds, combined_seconds, errors = _combine_round_seconds(rounds)
    interval = compute_repeat_interval(
        *(seconds, combined_seconds, errors, choose_repeatability(rounds)),
        compute_median_ignoring_none(row.conditions.celsius for row in rounds),
    )
    scale = rounds[0].work_amount / TERA
    return scale / combined_seconds, interval.invert(scale)


def compute_combined_rate_error(rounds: Sequence[Measurement]) -> FigureUncertainty:
    """Compute the relative error of the rate that ``combine_rounds`` returns: how far the rate of this run may be from
    the mean rate of many runs.
    """
    return compute_run_error(*_combine_round_seconds(rounds), choose_repeatability(rounds))


def choose_repeatability(rounds: Sequence[Measurement]) -> Repeatability:
    """Return the calibration (how much repeated runs differ) that the rounds recorded or, if they recorded none,
    the current calibration of their regime.
    """
    return find_median_repeatability(rounds) or look_up_repeatability("", rounds[0].regime, rounds[0].problem)


def _combine_round_seconds(rounds: Sequence[Measurement]) -> tuple[list[float], float, list[float]]:
    """Return the seconds per launch of each round, the combined seconds per launch of all rounds, and the relative
    standard error of each round.
    """
    seconds, errors = [row.seconds for row in rounds], [row.relative_standard_error for row in rounds]
    if rounds[0].repeatability is None:
        return seconds, rounds[0].work_amount / TERA / compute_median_rate(rounds), errors
    if rounds[0].statistic != "mean":
        return seconds, stdlib_statistics.median(seconds), errors
    return (
        seconds,
        sum(row.seconds * row.launch_count for row in rounds) / sum(row.launch_count for row in rounds),
        errors,
    )


def find_median_repeatability(rounds: Iterable[Measurement]) -> Repeatability | None:
    """Return the calibration (how much repeated runs differ) of the round with the median run-to-run error. Return None
    if the rounds recorded no calibration.

    The run-to-run error may differ between rounds. If the speed of a kernel varies between runs, most rounds record a
    large error, so the median is large too.
    """
    repeatabilities = sorted((row.repeatability for row in rounds if row.repeatability), key=lambda each: each.run)
    return repeatabilities[len(repeatabilities) // 2] if repeatabilities else None


def group_rounds_by_candidate(rows: Iterable[Measurement]) -> dict[Candidate, dict[int, Measurement]]:
    """Group the rows that have a rate by candidate and, within a candidate, by the number of the round."""
    return {
        candidate: {row.round_number: row for row in rounds}
        for candidate, rounds in group_pairs(((row.shape, row.kernel), row) for row in rows if row.ok).items()
    }


def compute_median_rate(rows: Iterable[Measurement]) -> float:
    return stdlib_statistics.median(row.best_rate for row in rows)


def compute_rate_ratios(rounds: Mapping[int, Measurement], other_rounds: Mapping[int, Measurement]) -> list[float]:
    """Return the rate of one candidate divided by the rate of another, for each round that measured both candidates."""
    return [rounds[number].best_rate / other_rounds[number].best_rate for number in rounds if number in other_rounds]


def is_tied(winner_rounds: Mapping[int, Measurement], other_rounds: Mapping[int, Measurement]) -> bool:
    """Return whether another candidate may be as fast as the winner.

    In each round, divide the winner's rate by the other candidate's rate. The result is False only if the interval of
    the median ratio is entirely above 1. It is True if the other candidate is faster in these rounds, which can happen
    because earlier rounds chose the winner.
    """
    ratios = compute_rate_ratios(winner_rounds, other_rounds)
    return bool(ratios) and compute_median_interval(ratios).low <= 1.0


def summarize_conditions(rows: Iterable[Measurement]) -> Conditions:
    """Summarize sensor readings over rounds: the median of each sensor, and the throttle reasons that at least half of
    the rounds report.

    In the regime sustained, the power is not a median but total energy divided by total time.
    """
    rows = list(rows)
    conditions = [row.conditions for row in rows]
    reasons = sorted({reason for each in conditions for reason in each.throttle_reasons})
    return Conditions(
        clock_hz=compute_median_ignoring_none(each.clock_hz for each in conditions),
        watts=_compute_mean_watts(rows)
        if rows and rows[0].regime == SUSTAINED
        else compute_median_ignoring_none(each.watts for each in conditions),
        celsius=compute_median_ignoring_none(each.celsius for each in conditions),
        throttle_reasons=tuple(
            reason
            for reason in reasons
            if 2 * sum(reason in each.throttle_reasons for each in conditions) >= len(conditions)
        ),
        true_clock_hz=compute_median_ignoring_none(each.true_clock_hz for each in conditions),
        used_cycle_share=compute_median_ignoring_none(each.used_cycle_share for each in conditions),
    )


def _compute_mean_watts(rows: Iterable[Measurement]) -> float | None:
    seconds_and_watts = [
        (row.seconds * row.launch_count, row.conditions.watts) for row in rows if row.conditions.watts is not None
    ]
    total_seconds = sum(seconds for seconds, _ in seconds_and_watts)
    return (
        round(sum(seconds * watts for seconds, watts in seconds_and_watts) / total_seconds, 1)
        if total_seconds
        else None
    )


# -- shares of a ceiling that rows reach -------------------------------------------------------------------------------


def find_row_ceiling(row: Measurement, rates: Mapping[tuple[str, str], RateT]) -> RateT | None:
    """Return the rate in ``rates`` for a row's dtype and regime, or None if there is none."""
    return find_rate(rates, make_dtype_label(row.problem), row.regime)


def compute_mamfu(row: Measurement, ceilings: Ceilings) -> float | None:
    """Return MAMFU: the rate of a row as a share of the ceiling for its dtype and regime.

    Returns None if there is no such ceiling or its interval is unknown. If several devices measured the rows of a run,
    the rate is first divided by the speed of the row's device relative to the first device, because the ceiling was
    measured on the first device.
    """
    ceiling = find_row_ceiling(row, ceilings)
    if ceiling is None or row.summary is None or not ceiling.interval.is_known:
        return None
    return ceiling.compute_utilization(flop=row.flop, seconds=row.comparable_seconds, regime=row.regime)


def compute_mamfu_error(row: Measurement, ceilings: Ceilings) -> float:
    """Return the relative error of MAMFU (``compute_mamfu``) that the limited accuracy of the timer may cause.

    The result is the square root of the sum of the squared timer errors of the row and of its ceiling. It is 0 if the
    accuracy of the timer is unknown or there is no ceiling.
    """
    ceiling = find_row_ceiling(row, ceilings)
    if ceiling is None or row.summary is None or not row.timer_error_seconds:
        return 0.0
    return math.hypot(
        row.relative_timing_error, compute_relative_timing_error(row.timer_error_seconds, ceiling.seconds)
    )


def has_card_drifted(row: Measurement, ceilings: Ceilings, limit: float = MAX_DRIFT_SHARE) -> bool:
    """Return whether the card's speed has changed between the measurement of the ceiling and that of the row.

    The rate of the ceiling's matmul, measured again before and after the row, shows the speed. This rate must differ
    from the ceiling by more than ``limit`` (a share) and lie outside the ceiling's interval, both by more than the
    relative error of the timer for this matmul.
    """
    drift, ceiling = compute_card_drift(row, ceilings), find_row_ceiling(row, ceilings)
    return (
        drift is not None
        and ceiling is not None
        and abs(drift)
        > max(limit, abs((ceiling.interval.high if drift > 0 else ceiling.interval.low) / ceiling.rate - 1))
        + compute_relative_timing_error(row.timer_error_seconds, ceiling.seconds)
    )


def compute_card_drift(row: Measurement, ceilings: Ceilings) -> float | None:
    """Return how much the card's speed has changed since the ceiling was measured, as a share.

    mamf measures the matmul of the ceiling again before and after the row. The result is the mean of these two rates,
    divided by the ceiling, minus 1. It is None if the run did not measure this matmul or there is no ceiling.
    """
    ceiling, reference_tflops = find_row_ceiling(row, ceilings), row.details.get("reference_tflops")
    return (
        None
        if ceiling is None or reference_tflops is None
        else float(reference_tflops) / (row.device_speed or 1.0) / ceiling.tflops - 1
    )


def require_known_interval(ceiling: Ceiling, alternative: str = "leave out --ceiling") -> None:
    """Raise IncomparableError if the interval of a ceiling is unknown. ``alternative``: what the user can do instead of
    measuring the ceiling again.
    """
    if not ceiling.interval.is_known:
        raise IncomparableError(
            f"the {ceiling.regime} ceiling is too noisy to compare rates with it: measure it again with 'mamf find' "
            f"while nothing else runs, or {alternative}"
        )


def require_usable_ceiling(ceiling: Ceiling, backend: Backend) -> None:
    """Raise IncomparableError if the interval of a ceiling is unknown, or if the card of ``backend`` is not the card on
    which the ceiling was measured.
    """
    require_known_interval(ceiling)
    require_ceiling_of_card(ceiling, backend)


def require_ceiling_of_card(ceiling: Ceiling, backend: Backend) -> None:
    """Raise IncomparableError if the card of ``backend`` is not the card on which the ceiling was measured, because
    cards of one model differ by several percent.
    """
    info = backend.info
    if ceiling.device != info.name or (
        ceiling.uuid_hash is not None and info.uuid_hash is not None and ceiling.uuid_hash != info.uuid_hash
    ):
        other = "another card of this model" if ceiling.device == info.name else ceiling.device
        raise IncomparableError(
            f"the ceiling was measured on {other}, not on this {info.name}: measure it on this device with 'mamf find'"
        )


def compute_share_of_known_ceiling(row: Measurement, known_ceilings: RatesByDtypeAndRegime) -> float | None:
    """Return MAMFU for a run that did not measure a ceiling: the rate of a row as a share of the ceiling in
    ``known_ceilings`` for its dtype and regime.

    Returns None if there is no such ceiling or if the row has no rate.
    """
    ceiling = find_row_ceiling(row, known_ceilings)
    return row.comparable_rate / ceiling.rate if ceiling is not None and row.ok else None


def copy_as_given_ceiling(ceiling: Ceiling) -> Ceiling:
    """Return a copy of a ceiling whose ``source`` says that the ceiling comes from a log given with ``--ceiling``."""
    return replace(ceiling, source="given", description=f"{ceiling.shape} by {ceiling.kernel}, from --ceiling")
