"""Pool the changes of all rows of a regime from side A to side B into one ratio, to find losses that all rows share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from mamf.logs.compared_rows import MAX_EXPONENT, RunOrder
from mamf.statistics import Interval, compute_student_t_quantile

#: The tolerance for the mean loss of all rows is this share of the tolerance for the loss of a single row.
POOLED_TOLERANCE_SHARE = 0.25
# All rows of a run shift together. The size of this common shift comes from the 26 pairs of equal runs in results/. A t
# distribution with _SHIFT_DEGREES_OF_FREEDOM degrees of freedom fits the differences of these pairs. If the runs of a
# side differ by more than _CONTRADICTION_FACTOR times the common shift, mamf uses the spread of these runs instead.
_SHIFT_DEGREES_OF_FREEDOM, _CONTRADICTION_FACTOR = 20, 2.0
# Timing with device events adds some time to each launch. This is the standard deviation of that time between runs, in
# seconds.
_TIMER_DEVIATION_SECONDS = 2.8e-7
# If the changes of the rows scatter by more than this factor more than their errors explain (as a variance), mamf
# assumes that the rows really changed by different amounts.
_MAX_EXPLAINED_SCATTER = 4.0


class PooledRows(NamedTuple):
    """All rows of one regime in a comparison, pooled into one ratio of the rates, B/A.

    - ``ratio``: the weighted geometric mean of B/A over all rows. ``deviation``: the standard deviation of log(ratio).
    - ``false_alarm_chance``: the chance that the comparison of equal runs finds a regression in this regime.
    - ``temperature_effect``: the largest relative rate difference that the temperatures of A and B can explain.
    """

    regime: str
    row_count: int
    ratio: float
    deviation: float
    degrees_of_freedom: int
    false_alarm_chance: float
    temperature_effect: float = 0.0

    @property
    def interval(self) -> Interval:
        """The interval of the ratio B/A. The true ratio is beyond each end with probability ``false_alarm_chance``."""
        coverage = 1 - 2 * self.false_alarm_chance
        half_width = (
            compute_student_t_quantile(self.degrees_of_freedom, coverage) * self.deviation + self.temperature_effect
        )
        factor = math.exp(min(half_width, MAX_EXPONENT))
        return Interval(self.ratio / factor, self.ratio * factor, coverage)

    def is_regression(self, tolerance: float) -> bool:
        """Return whether B is certainly slower than A, and by more than POOLED_TOLERANCE_SHARE of the tolerance."""
        return self.interval.high < 1 and self.ratio < 1 - POOLED_TOLERANCE_SHARE * tolerance

    def compute_smallest_detectable_loss(self, tolerance: float) -> float:
        """Suppose that all rows lose the same share of their speed. Compute the smallest share that is detected with a
        probability of 95 %.
        """
        needed = min(1 - POOLED_TOLERANCE_SHARE * tolerance, self.ratio / self.interval.high)
        return 1 - needed * math.exp(-compute_student_t_quantile(self.degrees_of_freedom, 0.9) * self.deviation)

    def make_table_row(self, tolerance: float) -> dict[str, Any]:
        """Return one row of a table, by column: the fields, the ends of the interval, and the verdict."""
        return {
            **dict(
                zip(("regime", "rows", "ratio", "deviation", "degrees", "chance", "by_temperature"), self, strict=True)
            ),
            "ratio_interval_low": self.interval.low,
            "ratio_interval_high": self.interval.high,
            "is_regression": self.is_regression(tolerance),
            "smallest_loss": self.compute_smallest_detectable_loss(tolerance),
        }


class RowChange(NamedTuple):
    """How the rate of one row changed from A to B. ``pool_rows`` combines the changes of all rows of a regime.

    - ``log_ratio``: the logarithm of the ratio of the rates, B/A.
    - ``common_deviation``: the standard deviation of the shift that all rows of a run share.
    - ``row_deviation``, ``degrees_of_freedom``: the standard deviation of the error that only this row has, and its
      degrees of freedom.
    - ``run_rates``: the rate in each run of A, and the rate in each run of B.
    - ``temperature_effect``: the largest relative rate difference that the temperatures of A and B can explain.
    """

    log_ratio: float
    common_deviation: float
    row_deviation: float
    degrees_of_freedom: int
    seconds_per_launch: float
    run_rates: tuple[Sequence[float], Sequence[float]]
    temperature_effect: float = 0.0


def pool_rows(regime: str, changes: Sequence[RowChange], run_order: RunOrder, false_alarm_chance: float) -> PooledRows:
    """Pool the changes of all rows of a regime into one ratio, weighted by the inverse variances of the rows.

    The common shift of a run is estimated from two figures, weighted by their degrees of freedom: the calibrated shift,
    and the spread between equal runs of each side. If the spread is much larger, only the spread counts. If the rows
    changed by different amounts, the variances of the rows include the variance between rows.
    """
    spread = _estimate_spread_between_rows(changes)
    variances = [each.row_deviation**2 + spread**2 for each in changes]
    total = math.fsum(1 / variance for variance in variances)
    weights = [1 / variance / total for variance in variances]
    timer = math.fsum(
        weight * _TIMER_DEVIATION_SECONDS / each.seconds_per_launch
        for weight, each in zip(weights, changes, strict=True)
    )
    common, observed = max(timer, *(each.common_deviation for each in changes)), 0.0
    for side in (0, 1):
        rows = [
            [math.log(rate / geometric_mean(each.run_rates[side])) for rate in each.run_rates[side]] for each in changes
        ]
        observed += math.fsum(
            math.fsum(weight * each for weight, each in zip(weights, run, strict=True)) ** 2
            for run in zip(*rows, strict=True)
        )
    prior = (
        0 if observed > run_order.extra_run_count * (_CONTRADICTION_FACTOR * common) ** 2 else _SHIFT_DEGREES_OF_FREEDOM
    )
    shift = run_order.shift_factor * math.sqrt((prior * common**2 + observed) / (prior + run_order.extra_run_count))
    return PooledRows(
        regime,
        row_count=len(changes),
        ratio=math.exp(math.fsum(weight * each.log_ratio for weight, each in zip(weights, changes, strict=True))),
        deviation=math.hypot(shift, total**-0.5),
        degrees_of_freedom=prior + run_order.extra_run_count,
        false_alarm_chance=false_alarm_chance,
        temperature_effect=max(each.temperature_effect for each in changes),
    )


def _estimate_spread_between_rows(changes: Sequence[RowChange]) -> float:
    """Estimate the standard deviation of the true changes of the rows around their mean (DerSimonian & Laird,
    Meta-analysis in clinical trials, 1986). Return 0 if the errors of the rows explain the scatter.
    """
    weights = [each.row_deviation**-2 for each in changes]
    total, degrees = math.fsum(weights), len(changes) - 1
    mean = math.fsum(weight * each.log_ratio for weight, each in zip(weights, changes, strict=True)) / total
    scatter = math.fsum(weight * (each.log_ratio - mean) ** 2 for weight, each in zip(weights, changes, strict=True))
    scale = total - math.fsum(weight**2 for weight in weights) / total
    if scatter <= _MAX_EXPLAINED_SCATTER * degrees or scale <= 0:
        return 0.0
    return math.sqrt((scatter - degrees) / scale)
