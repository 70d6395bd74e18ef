"""Decides whether two sets of runs differ by more than equal runs do: errors of figures, a test of all rows. Pure.

Two runs of the same kernels differ by a shift that all rows of a run share, and by an error of each row. Both are
estimated from pairs of equal runs in results/; ``tools/rates.py compare`` prints them. More rows do not reduce the
shift. Only more runs do, if those of both sides take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, NamedTuple

from mamf.logs.run_log import RunLog
from mamf.plans import SUSTAINED
from mamf.statistics import FigureError, Interval, geometric_mean, student_t

#: The chance of a false alarm in a whole comparison: half of it for single rows, half for all rows together.
FALSE_ALARMS = 0.01
#: A loss of all rows together is a regression above this share of the tolerance.
TOGETHER = 0.25
#: The largest exponent with a finite exponential. It is a limit because a crafted log may state any error.
WIDEST = 700.0
_LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)
# Runs with more than this gap between them differ by this factor more than runs without.
_APART, _VISIT_GAP = 1.5, timedelta(minutes=10)
# Degrees of freedom of the shift of a run: 26 pairs in results/, taken as 20 because of heavy tails. If the runs of a
# side differ by more than twice the calibrated shift, their own spread replaces the calibration.
_COMMON_DEGREES, _CONTRADICTION = 20, 2.0
# Standard deviation of the timer correction between runs, in seconds, in logs timed by device events.
_TIMER_SECONDS = 2.8e-7
# Degrees of freedom of Student's t that match the tails of row errors: in sustained (True) and elsewhere (False).
_DEGREES = {True: 16, False: 8}
# In sustained a visit is in one of two states of the power controller that differ by 1.1 %: an error of half of that.
_STATES = 0.0055
# The shift that all rows of a sustained run share.
_SUSTAINED_SHIFT = 0.0012


def decision_error(known: FigureError, regime: str, visits: int) -> FigureError:
    """Return the error of a figure from ``visits`` visits, for decisions: with tails as heavy as measured ones."""
    is_sustained = regime == SUSTAINED
    own = max(known.own, _STATES / math.sqrt(visits) if is_sustained else 1e-6)
    own = min(own, 10.0)  # a crafted log may state any error
    common = max(known.common, _SUSTAINED_SHIFT) if is_sustained else known.common
    return FigureError(common, own, _DEGREES[is_sustained])


class Design(NamedTuple):
    """How the runs of both sides were interleaved.

    ``factor``: the shift between the sides, as a multiple of the shift of one run. ``spare``: the number of runs beyond
    the first of each side.
    """

    label: str
    factor: float
    spare: int


#: The default for two runs.
SEPARATE = Design("separate visits", math.sqrt(2) * _APART, 0)


def design_of(a: Sequence[RunLog], b: Sequence[RunLog]) -> Design:
    """Find the design from the start times and durations in the logs. Only runs that take turns average out drift."""
    runs = sorted((_span(log), side) for side, logs in enumerate((a, b)) for log in logs)
    if any(after[0] - before[1] > _VISIT_GAP for (before, _), (after, _) in pairwise(runs)):
        return SEPARATE._replace(spare=len(runs) - 2)
    sides = [side for _, side in runs]
    if len(a) == len(b) and all(one != two for one, two in zip(sides[::2], sides[1::2], strict=True)):
        return Design(f"{len(a)} + {len(b)} runs in turns", math.sqrt(2 / len(a)), len(runs) - 2)
    return Design(f"{len(a)} + {len(b)} runs in one visit", math.sqrt(2), len(runs) - 2)


def _span(log: RunLog) -> tuple[datetime, datetime]:
    """Return when a run began and ended; in the distant past if the log does not say."""
    try:
        begun = datetime.fromisoformat(log.header["started"]).astimezone(timezone.utc)
        return begun, begun + timedelta(seconds=float((log.summary or {})["elapsed_seconds"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return _LONG_AGO, _LONG_AGO


class Together(NamedTuple):
    """All rows of a regime together: ``ratio`` is the weighted geometric mean of B/A.

    ``deviation``, ``degrees``: the standard deviation of its logarithm, with degrees of freedom. ``chance``: the chance
    of a false alarm. ``by_temperature``: the relative difference that the temperatures may explain.
    """

    regime: str
    rows: int
    ratio: float
    deviation: float
    degrees: int
    chance: float
    by_temperature: float = 0.0

    @property
    def interval(self) -> Interval:
        """The interval of B/A. Each end misses the true value with probability ``chance``."""
        half_width = student_t(self.degrees, 1 - 2 * self.chance) * self.deviation + self.by_temperature
        factor = math.exp(min(half_width, WIDEST))
        return Interval(self.ratio / factor, self.ratio * factor, 1 - 2 * self.chance)

    def is_regression(self, tolerance: float) -> bool:
        """Return whether B is certainly slower, and by more than a quarter of the tolerance."""
        return self.interval.high < 1 and self.ratio < 1 - TOGETHER * tolerance

    def smallest_loss(self, tolerance: float) -> float:
        """Return the smallest loss of all rows, as a share, that would be detected with a probability of 95 %."""
        needed = min(1 - TOGETHER * tolerance, self.ratio / self.interval.high)
        return 1 - needed * math.exp(-student_t(self.degrees, 0.9) * self.deviation)

    def flat(self, tolerance: float) -> dict[str, Any]:
        """Return the figure and its verdict as named columns."""
        return {
            **self._asdict(),
            "ratio_interval_low": self.interval.low,
            "ratio_interval_high": self.interval.high,
            "is_regression": self.is_regression(tolerance),
            "smallest_loss": self.smallest_loss(tolerance),
        }


class Change(NamedTuple):
    """The change of a row between A and B.

    ``logarithm``: of B/A. ``common``: the shift that all rows of a run share. ``own``: the error of the row, with
    ``degrees`` of freedom. ``seconds``: per launch. ``rates``: those of the runs on each side. ``by_temperature``: the
    relative difference that the temperatures may explain.
    """

    logarithm: float
    common: float
    own: float
    degrees: int
    seconds: float
    rates: tuple[Sequence[float], Sequence[float]]
    by_temperature: float = 0.0


def pool_rows(regime: str, changes: Sequence[Change], design: Design, chance: float) -> Together:
    """Combine the rows of a regime, weighted by their inverse variances. ``chance``: the chance of a false alarm.

    The spread of the runs on each side is averaged with the calibrated shift, weighted by degrees of freedom. If it is
    much larger than the calibration, it replaces it.
    """
    total = math.fsum(each.own**-2 for each in changes)
    weights = [each.own**-2 / total for each in changes]
    mean = math.fsum(weight * each.logarithm for weight, each in zip(weights, changes, strict=True))
    timer = math.fsum(weight * _TIMER_SECONDS / each.seconds for weight, each in zip(weights, changes, strict=True))
    common, seen = max(timer, *(each.common for each in changes)), 0.0
    for side in (0, 1):
        rows = [[math.log(rate / geometric_mean(each.rates[side])) for rate in each.rates[side]] for each in changes]
        seen += math.fsum(
            math.fsum(weight * each for weight, each in zip(weights, run, strict=True)) ** 2
            for run in zip(*rows, strict=True)
        )
    prior = 0 if seen > design.spare * (_CONTRADICTION * common) ** 2 else _COMMON_DEGREES
    shift = design.factor * math.sqrt((prior * common**2 + seen) / (prior + design.spare))
    deviation = math.hypot(shift, total**-0.5)
    by_temperature = max(each.by_temperature for each in changes)
    return Together(regime, len(changes), math.exp(mean), deviation, prior + design.spare, chance, by_temperature)
