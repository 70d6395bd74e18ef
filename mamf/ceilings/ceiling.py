"""Ceilings: the confirmed best rate of a device for a dtype and a regime, and the shares of it that rows reach. Pure.

Separate measurements choose and confirm the winner: rounds of the phase ``choose`` decide which candidate is best, and
later rounds of the phase ``confirm`` give its figure. The highest of several noisy figures is biased upward (the
winner's curse), but a new measurement of the winner is not.
"""

from __future__ import annotations

import math
import statistics as stdlib_statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.calibration import find_calibration
from mamf.errors import IncomparableError, UsageError, is_number, require_seconds
from mamf.kernel import Problem
from mamf.measurement import (
    TERA,
    Conditions,
    Measurement,
    Rate,
    Rates,
    RateSource,
    RateT,
    Tabular,
    compute_relative_accuracy,
    find_rate,
    label_dtype,
)
from mamf.plans import SUSTAINED, Plan
from mamf.statistics import (
    FigureError,
    Interval,
    Repeatability,
    compute_known_median,
    compute_median_interval,
    compute_repeat_interval,
    compute_run_error,
)

#: Ceilings by (dtype, regime); ``label_dtype`` gives the dtype.
Ceilings = Mapping[tuple[str, str], "Ceiling"]
#: The largest share of a ceiling that changes of the card since its measurement can explain.
MAX_CEILING_SHARE = 1.1
#: Reports mention drift of the card's speed above this share.
DRIFT_TOLERANCE = 0.01
#: A candidate for the ceiling: a shape and a kernel.
Candidate = tuple[Any, str]
CHOOSE_PHASE, CONFIRM_PHASE = "choose", "confirm"
# The fewest rounds in which a candidate must have been measured to count as confirmed.
MIN_ROUNDS = 3
# A rate this many times higher cannot be drift: a card that warms up stays within 2 %.
_CLEARLY_FASTER_FACTOR = 1.1


@dataclass(frozen=True, kw_only=True)
class Ceiling(Tabular, Rate):
    """The confirmed highest rate of a device for one problem in one regime.

    - ``rate``: TFLOPS (TB/s if the operation counts bytes) over ``rounds`` confirming measurements: their median in
      burst, total work divided by total time in sustained. ``interval``: the 95 % repeat interval of the rate.
    - ``dtype``, ``unit``: derived from ``problem`` and ``shape``.
    - ``tied``: candidates that these rounds do not show to be slower than the winner.
    - ``gain_over_default``: how much faster the winning kernel is than the default kernel on the same shape, as a
      share; None if that was not measured, or if the default won.
    - ``repeatability``: the calibration behind the interval; None in converted logs, where the interval comes from the
      rounds only.
    """

    dtype: str = field(init=False)
    unit: str = field(init=False)
    source: RateSource = "measured"
    regime: str
    interval: Interval
    problem: Any
    kernel: str
    shape: Any
    rounds: int
    tied: tuple[Candidate, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    gain_over_default: float | None = None
    repeatability: Repeatability | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", label_dtype(self.problem))
        object.__setattr__(self, "unit", str(self.problem.work(self.shape).unit))

    def __repr__(self) -> str:
        figure = f"{self.rate:.4g} {self.unit} at {self.shape} by {self.kernel}"
        return f"Ceiling({self.device}, {self.dtype}, {self.regime}: {figure})"

    @property
    def seconds(self) -> float:
        """Seconds that one launch of the winner takes at this rate."""
        return float(self.problem.work(self.shape).amount) / (self.rate * TERA)

    @property
    def joules_per_tflop(self) -> float | None:
        """Joules per 1e12 FLOP; None in burst, where power is averaged over idle times."""
        return None if self.regime != "sustained" or not self.conditions.watts else self.conditions.watts / self.rate

    def utilization(self, *, flop: float, seconds: float, regime: str) -> float:
        """Return MAMFU: the rate ``flop / seconds`` as a share of this ceiling.

        Raises IncomparableError if ``regime`` differs from the ceiling's, because their clocks differ, or if the
        ceiling's interval is unknown, and UsageError for invalid seconds or FLOP.
        """
        require_seconds("seconds", seconds)
        if not is_number(flop) or not 0 <= flop < math.inf:
            raise UsageError(f"flop {flop}: it must be a finite number of at least 0")
        if regime != self.regime:
            raise IncomparableError(
                f"cannot divide a {regime} figure by a {self.regime} ceiling: measure both in the same regime"
            )
        if not self.interval.is_known:
            raise IncomparableError(
                "this ceiling is too noisy to compute shares of it: measure it again with 'mamf find'"
            )
        return flop / seconds / (self.rate * TERA)


def confirm_ceilings(
    rows: Iterable[Measurement],
    sought: Iterable[tuple[Problem, str, str | None]],
    device: str,
    uuid_hash: str | None = None,
) -> dict[tuple[Problem, str], Ceiling]:
    """Return the ceilings that the rows of a run confirm, by problem and regime.

    ``sought``: triples of problem, regime and default kernel. The interval of a ceiling is unknown if another visit was
    clearly faster (``has_faster_visit``).
    """
    rows = list(rows)
    found: dict[tuple[Problem, str], Ceiling] = {}
    for problem, regime, default in sought:
        same = [row for row in rows if (row.problem, row.regime) == (problem, regime)]
        ceiling = confirm_ceiling(same, device, uuid_hash, default)
        if ceiling is not None:
            unknown = replace(ceiling.interval, low=0.0)
            found[problem, regime] = replace(ceiling, interval=unknown) if has_faster_visit(ceiling, same) else ceiling
    return found


def confirm_plan_ceilings(
    plan: Plan, rows: Iterable[Measurement], info: DeviceInfo, default_kernel: str
) -> dict[tuple[Problem, str], Ceiling]:
    """Return the ceilings of a plan that the rows confirm, by problem and regime."""
    sought = [(problem, regime, default_kernel) for problem in plan.problems for regime in plan.regimes]
    return confirm_ceilings(rows, sought, info.name, info.uuid_hash)


def has_faster_visit(ceiling: Ceiling, rows: Iterable[Measurement]) -> bool:
    """Return whether another visit measured the winner clearly faster than its confirming rounds allow.

    Then something else used the device during these rounds. A slower visit says nothing, because it may have been
    disturbed itself. In the logs in results/ no visit reaches this limit.
    """
    winner = (ceiling.problem, ceiling.regime, ceiling.shape, ceiling.kernel)
    own = (row.best_rate for row in rows if row.ok and (row.problem, row.regime, row.shape, row.kernel) == winner)
    return max(own, default=0.0) > _CLEARLY_FASTER_FACTOR * max(ceiling.interval.high, ceiling.rate)


def explain_no_ceiling(rows: Sequence[Measurement]) -> str | None:
    """Return why no ceiling can be found: the first row's reason if all rows failed, or None."""
    return None if not rows or any(row.ok for row in rows) else f"{rows[0].status}, {rows[0].reason}"


def confirm_ceiling(
    rows: Iterable[Measurement], device: str, uuid_hash: str | None = None, default_kernel: str | None = None
) -> Ceiling | None:
    """Return the ceiling that the confirming rounds give, or None if there are fewer than MIN_ROUNDS.

    ``rows``: rows of one problem and regime; only those of the phases ``choose`` and ``confirm`` count. Every round
    measures each remaining candidate once, so comparisons within a round cancel the drift between rounds.
    """
    rows = [row for row in rows if row.phase in (CHOOSE_PHASE, CONFIRM_PHASE)]
    choosing = [row for row in rows if row.phase == CHOOSE_PHASE]
    fresh = group_rounds(row for row in rows if row.phase != CHOOSE_PHASE)
    # Converted logs have only one phase: its rounds both choose the winner and give its figure, with an upward bias.
    failed = {(row.shape, row.kernel) for row in rows if not row.ok}
    winner = next((each for each in rank_candidates(choosing or rows) if each not in failed), None)
    if winner is None or len(fresh.get(winner, ())) < MIN_ROUNDS:
        return None
    own = fresh[winner]
    shape, kernel = winner
    rate, interval = combine_rounds(list(own.values()))
    gain = None
    compared = group_rounds(choosing) or fresh
    if default_kernel is not None and kernel != default_kernel and (shape, default_kernel) in compared:
        gain = stdlib_statistics.median(compute_ratios(compared[winner], compared[shape, default_kernel])) - 1
    row = next(iter(own.values()))
    return Ceiling(
        device=device,
        uuid_hash=uuid_hash,
        problem=row.problem,
        regime=row.regime,
        kernel=kernel,
        shape=shape,
        rate=rate,
        interval=interval,
        rounds=len(own),
        tied=tuple(other for other in _find_finalists(fresh) if other != winner and is_tied(own, fresh[other])),
        conditions=summarize_conditions(own.values()),
        gain_over_default=gain,
        repeatability=find_median_repeatability(list(own.values())),
    )


def _find_finalists(fresh: Mapping[Candidate, Mapping[int, Measurement]]) -> list[Candidate]:
    """Return the candidates of all rounds, except that the last round may be incomplete. Dropped ones cannot win."""
    most = max(map(len, fresh.values()), default=0)
    return [candidate for candidate, found in fresh.items() if len(found) >= most - 1]


def rank_candidates(rows: Iterable[Measurement]) -> list[Candidate]:
    """Sort candidates by their median rate over rounds, best first. Candidates that were dropped come last."""
    found = group_rounds(rows)
    kept = set(_find_finalists(found))
    return sorted(found, key=lambda each: (each in kept, compute_median_rate(found[each].values())), reverse=True)


def combine_rounds(rounds: Sequence[Measurement]) -> tuple[float, Interval]:
    """Return the rate of a candidate over all rounds, in TFLOPS or TB/s, and its repeat interval.

    The rate is the median of the rounds or, if their figure is a mean, total work divided by total time. Without a
    calibration (converted logs) the interval comes from order statistics of the rounds.
    """
    known = find_median_repeatability(rounds)
    if known is None:
        rates = [row.best_rate for row in rounds]
        return stdlib_statistics.median(rates), compute_median_interval(rates)
    seconds, middle, errors = _combine_round_seconds(rounds)
    celsius = compute_known_median(row.conditions.celsius for row in rounds)
    interval, scale = compute_repeat_interval(seconds, middle, errors, known, celsius), rounds[0].amount / TERA
    return scale / middle, Interval(scale / interval.high, scale / interval.low, interval.coverage)


def compute_figure_error(rounds: Sequence[Measurement]) -> FigureError:
    """Return the error of the figure of ``combine_rounds``, relative to the mean of all runs."""
    return compute_run_error(*_combine_round_seconds(rounds), choose_repeatability(rounds))


def choose_repeatability(rounds: Sequence[Measurement]) -> Repeatability:
    """Return the calibration that the rounds name, or else the calibration of their regime."""
    return find_median_repeatability(rounds) or find_calibration("", rounds[0].regime, rounds[0].problem)


def _combine_round_seconds(rounds: Sequence[Measurement]) -> tuple[list[float], float, list[float]]:
    """Return the seconds per launch of each round, the seconds per launch over all rounds, and the relative standard
    error of each round.
    """
    seconds, errors = [row.seconds for row in rounds], [row.standard_error for row in rounds]
    if rounds[0].figure != "mean":
        return seconds, stdlib_statistics.median(seconds), errors
    launches = sum(row.launches for row in rounds)
    return seconds, sum(row.seconds * row.launches for row in rounds) / launches, errors


def find_median_repeatability(rounds: Iterable[Measurement]) -> Repeatability | None:
    """Return the median calibration of the rounds, or None if they have none.

    The median suffices because a kernel that varies between runs does so in most rounds.
    """
    known = sorted((row.repeatability for row in rounds if row.repeatability), key=lambda each: each.run)
    return known[len(known) // 2] if known else None


def group_rounds(rows: Iterable[Measurement]) -> dict[Candidate, dict[int, Measurement]]:
    """Group the valid rows by candidate and round."""
    found: dict[Candidate, dict[int, Measurement]] = {}
    for row in rows:
        if row.ok:
            found.setdefault((row.shape, row.kernel), {})[row.round] = row
    return found


def compute_median_rate(rows: Iterable[Measurement]) -> float:
    return stdlib_statistics.median(row.best_rate for row in rows)


def compute_ratios(own: Mapping[int, Measurement], other: Mapping[int, Measurement]) -> list[float]:
    """Return the ratio of the two candidates' rates in each round that measured both."""
    return [own[number].best_rate / other[number].best_rate for number in own if number in other]


def is_tied(own: Mapping[int, Measurement], other: Mapping[int, Measurement]) -> bool:
    """Return whether the other candidate may be as fast: the interval of the ratio of rates is not entirely above 1.

    Earlier rounds chose the winner, so a candidate that is faster in these rounds is tied too.
    """
    compared = compute_ratios(own, other)
    return bool(compared) and compute_median_interval(compared).low <= 1.0


def summarize_conditions(rows: Iterable[Measurement]) -> Conditions:
    """Summarize the conditions of the rounds: median sensor readings, and throttle reasons of at least half of them.

    The power of sustained rounds is total energy divided by total time.
    """
    rows = list(rows)
    seen = [row.conditions for row in rows]
    reasons = sorted({reason for each in seen for reason in each.throttle_reasons})
    return Conditions(
        clock_hz=compute_known_median(each.clock_hz for each in seen),
        watts=_compute_mean_watts(rows)
        if rows and rows[0].regime == SUSTAINED
        else compute_known_median(each.watts for each in seen),
        celsius=compute_known_median(each.celsius for each in seen),
        throttle_reasons=tuple(
            reason for reason in reasons if 2 * sum(reason in each.throttle_reasons for each in seen) >= len(seen)
        ),
        true_clock_hz=compute_known_median(each.true_clock_hz for each in seen),
        cycles_used=compute_known_median(each.cycles_used for each in seen),
    )


def _compute_mean_watts(rows: Iterable[Measurement]) -> float | None:
    metered = [(row.seconds * row.launches, row.conditions.watts) for row in rows if row.conditions.watts is not None]
    seconds = sum(lasted for lasted, _ in metered)
    return round(sum(lasted * watts for lasted, watts in metered) / seconds, 1) if seconds else None


# -- shares ------------------------------------------------------------------------------------------------------------


def find_row_ceiling(row: Measurement, rates: Mapping[tuple[str, str], RateT]) -> RateT | None:
    """Return the ceiling of a row's dtype and regime, or None."""
    return find_rate(rates, label_dtype(row.problem), row.regime)


def compute_mamfu(row: Measurement, ceilings: Ceilings) -> float | None:
    """Return MAMFU: the row's rate as a share of the ceiling of its dtype and regime. None without a ceiling, or if the
    ceiling's interval is unknown. Rows are normalized to the run's first device, to which the ceiling belongs.
    """
    ceiling = find_row_ceiling(row, ceilings)
    if ceiling is None or row.summary is None or not ceiling.interval.is_known:
        return None
    return ceiling.utilization(flop=row.flop, seconds=row.comparable_seconds, regime=row.regime)


def compute_share_accuracy(row: Measurement, ceilings: Ceilings) -> float:
    """Return the relative error of the share (``compute_mamfu``) that the timer may cause.

    It is the accuracies of row and ceiling, added in quadrature; 0 if one is unknown or there is no ceiling.
    """
    ceiling = find_row_ceiling(row, ceilings)
    if ceiling is None or row.summary is None or not row.timer_accuracy:
        return 0.0
    return math.hypot(row.accuracy, compute_relative_accuracy(row.timer_accuracy, ceiling.seconds))


def has_drifted(row: Measurement, ceilings: Ceilings) -> bool:
    """Return whether the reference matmul around a row differs from its ceiling by more than a steady card and the
    timer explain. Both are the same matmul, so only the accuracy of the ceiling counts.
    """
    drift, ceiling = compute_drift(row, ceilings), find_row_ceiling(row, ceilings)
    if drift is None or ceiling is None:
        return False
    return abs(drift) > DRIFT_TOLERANCE + compute_relative_accuracy(row.timer_accuracy, ceiling.seconds)


def compute_drift(row: Measurement, ceilings: Ceilings) -> float | None:
    """Return the drift of the card around a row: the rate of the reference matmul divided by its ceiling, minus 1.

    None if the reference was not measured or there is no ceiling.
    """
    ceiling, seen = find_row_ceiling(row, ceilings), row.details.get("reference_tflops")
    return None if ceiling is None or seen is None else float(seen) / (row.device_speed or 1.0) / ceiling.tflops - 1


def require_usable_ceiling(ceiling: Ceiling, backend: Backend) -> None:
    """Raise IncomparableError if a ceiling's interval is unknown, or if the ceiling is from another card: cards of one
    model differ by several percent.
    """
    if not ceiling.interval.is_known:
        raise IncomparableError(
            f"the {ceiling.regime} ceiling is too noisy to compute shares of it: measure it again with 'mamf find'"
        )
    info = backend.info
    same = ceiling.device == info.name and (
        ceiling.uuid_hash is None or info.uuid_hash is None or ceiling.uuid_hash == info.uuid_hash
    )
    if not same:
        other = "another device with that name" if ceiling.device == info.name else ceiling.device
        raise IncomparableError(f"the ceiling is from {other}, not this {info.name}: measure it here with 'mamf find'")


def compute_known_share(row: Measurement, known: Rates) -> float | None:
    """Return MAMFU from known ceilings: the row's rate as a share of the ceiling of its dtype and regime. None if there
    is no such ceiling or the row is not valid.
    """
    ceiling = find_row_ceiling(row, known)
    return row.comparable_rate / ceiling.rate if ceiling is not None and row.ok else None


def mark_as_from_option(ceiling: Ceiling) -> Ceiling:
    """Mark a ceiling as read from a log that --ceiling names."""
    return replace(ceiling, source="given", description=f"{ceiling.shape} by {ceiling.kernel}, from --ceiling")
