"""Samples of time -> a summary that says how sure it is. Pure; seconds in, seconds out.

Launch times are skewed and have outliers, so the median carries the figure, with a distribution-free
interval from order statistics: the number of samples below the true median is Binomial(n, 1/2), whatever the
distribution (Hahn & Meeker, Statistical Intervals, 2017, section 5.2). A maximum over noisy samples is biased
upwards, and the more so the more samples there are: it is reported, and never a ceiling.
"""

from __future__ import annotations

import math
import statistics as _stdlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """The confidence interval of a median. ``coverage`` is what these samples could give: fewer than 6 fall short of
    95 %.
    """

    low: float
    high: float
    coverage: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Summary:
    """Samples in short; everything in seconds but ``count``."""

    count: int
    mean: float
    median: float
    fastest: float
    slowest: float
    stdev: float
    interval: Interval

    @property
    def relative_half_width(self) -> float:
        """Half the width of the median's interval, as a share of the median."""
        return (self.interval.high - self.interval.low) / 2 / self.median


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest symmetric order-statistic interval of the median that covers ``confidence``, else the whole
    range.
    """
    ordered = sorted(samples)
    count, total = len(ordered), 2 ** len(ordered)
    # below: outcomes (of 2**count) in which the true median lies under the sample of this rank; exact integers.
    rank, below = 0, 1
    while True:
        below_next = below + math.comb(count, rank + 1)
        if 1 - 2 * below_next / total < confidence:
            return Interval(ordered[rank], ordered[count - 1 - rank], 1 - 2 * below / total)
        rank, below = rank + 1, below_next


def summarize(samples: Sequence[float]) -> Summary:
    """Summary of at least one sample. Raises ValueError when there is none."""
    if not samples:
        raise ValueError("no samples to summarize")
    return Summary(
        count=len(samples),
        mean=_stdlib.fmean(samples),
        median=_stdlib.median(samples),
        fastest=min(samples),
        slowest=max(samples),
        stdev=_stdlib.stdev(samples) if len(samples) > 1 else 0.0,
        interval=median_interval(samples),
    )


def relative_slope(samples: Collection[float]) -> float:
    """How much a straight line through the samples (equally spaced) rises from first to last, as a share of their
    mean.
    """
    count = len(samples)
    if count < 2:
        return 0.0
    slope, _ = _stdlib.linear_regression(range(count), samples)
    return slope * (count - 1) / _stdlib.fmean(samples)


def geometric_mean(values: Sequence[float]) -> float:
    return _stdlib.geometric_mean(values)


def arithmetic_mean(values: Sequence[float]) -> float:
    return _stdlib.fmean(values)
