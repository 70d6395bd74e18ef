"""Turns time samples into a figure with an interval. Pure; all times are in seconds.

Launch times in burst are skewed and have outliers, so the figure is the median, with a distribution-free interval from
order statistics: the number of samples below the true median is Binomial(n, 1/2) for any distribution (Hahn & Meeker,
Statistical Intervals, 2017, section 5.2). In sustained the figure is total work divided by total time, the mean of
blocks of equal work. Successive blocks are not independent, so the interval uses batch means (Law, Simulation Modeling
and Analysis, 2015, section 9.5.3).

Both intervals describe a single visit (one measurement of one kernel and shape), but repeated visits differ by more.
``compute_repeat_interval`` computes the interval that mamf prints: a 95 % prediction interval for one more run. It adds
the variance between runs from ``Repeatability``, which is calibrated on pairs of runs (tools/coverage.py). The maximum
of noisy samples is biased upward, more so with more samples, so mamf reports it but never uses it as a ceiling.
"""

from __future__ import annotations

import functools
import math
import statistics as _stdlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_BATCHES = 5
_WIDEST_LOGARITHM = 700.0  # its exponential is still finite; a crafted log may contain any width
# The half-width of a 95 % interval of the difference of two figures, in standard deviations of one: 2.77.
_REPEAT = math.sqrt(2) * _stdlib.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MAX_CELSIUS = 200
# A run counts as cold if it is this much colder than usual: the coldest 5 % of bursts in results/ (2 % in sustained).
_COLD_DEGREES = 5.0
# With more degrees of freedom, Student's t differs from the normal distribution by at most 0.6 %.
_MANY_DEGREES = 200
# Two levels need at least this many samples, at most this share of the variance within the levels, and at least this
# relative distance.
_MIN_FOR_LEVELS, _UNEXPLAINED, _MIN_GAP = 10, 0.15, 0.01
# An interval of -50 % to +50 %: 1.5 / 0.5.
_WIDEST_RATIO = 3.0


@dataclass(frozen=True)
class Interval:
    """A confidence interval. ``coverage``: its actual probability, for a median of fewer than 6 samples below 95 %."""

    low: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_known(self) -> bool:
        """Whether the interval is narrow enough to be useful: both ends are within 50 % of the middle."""
        return self.high <= _WIDEST_RATIO * self.low

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Repeatability:
    """How much the figures of separate runs differ.

    - ``run``: the relative standard deviation between runs. ``launch_seconds``: an additional one in seconds per
      launch, which makes short launches less repeatable.
    - ``ignores_within``: whether to ignore the scatter within a visit, because a power controller that oscillates
      regularly makes it meaningless.
    - ``usual_celsius``, ``per_degree``: the usual temperature, and the relative loss of speed per degree.

    Measured for NVIDIA GPUs and a CPU (repeatability.csv); other devices use the GPUs' values. Raises ValueError for
    values outside their range.
    """

    run: float
    launch_seconds: float = 0.0
    ignores_within: bool = False
    usual_celsius: float = 0.0
    per_degree: float = 0.0

    def __post_init__(self) -> None:
        are_small = all(0 <= each < 1 for each in (self.run, self.launch_seconds, self.per_degree))
        if not (are_small and 0 <= self.usual_celsius < _MAX_CELSIUS):
            raise ValueError(
                f"repeatability of {self.run:g}, {self.launch_seconds:g} s and {self.per_degree:g} per degree below "
                f"{self.usual_celsius:g} C: the first three must be below 1, the temperature below {_MAX_CELSIUS} C"
            )

    def is_cold(self, celsius: float | None) -> bool:
        """Whether a run at this temperature is colder than about 95 % of all runs."""
        return bool(self.per_degree) and celsius is not None and celsius < self.usual_celsius - _COLD_DEGREES

    def compute_cold_gain(self, celsius: float | None) -> float:
        """Return the share by which a run at this temperature is faster than at the usual one; 0 if it is not colder or
        the temperature is unknown.
        """
        return 0.0 if celsius is None else self.per_degree * max(0.0, self.usual_celsius - celsius)


@dataclass(frozen=True)
class FigureError:
    """The relative standard deviations of one run's figure: the part that all rows of the run share (``common``) and
    the rest (``own``). ``degrees``: degrees of freedom for Student's t.
    """

    common: float
    own: float
    degrees: int

    @property
    def total(self) -> float:
        return math.hypot(self.common, self.own)


@dataclass(frozen=True)
class Summary:
    """Statistics of samples, in seconds except ``count``. ``interval``: that of the figure, within the visit."""

    count: int
    mean: float
    median: float
    fastest: float
    slowest: float
    interval: Interval


def summarize(samples: Sequence[float], figure: str = "median") -> Summary:
    """Summarize samples, with the interval of ``figure`` (mean or median). Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples to summarize")
    return Summary(
        count=len(samples),
        mean=_stdlib.fmean(samples),
        median=_stdlib.median(samples),
        fastest=min(samples),
        slowest=max(samples),
        interval=compute_interval(samples, figure),
    )


def compute_standard_deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of samples; 0 for a single one. In floats, because exact fractions are 50 times
    slower.
    """
    return math.sqrt(_sum_squared_deviations(samples) / (len(samples) - 1)) if len(samples) > 1 else 0.0


def compute_exact_standard_deviation(samples: Sequence[float]) -> float:
    """Compute the standard deviation with exact fractions, for reports that must reproduce every digit of old logs."""
    return _stdlib.stdev(samples) if len(samples) > 1 else 0.0


def _sum_squared_deviations(samples: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    mean = _stdlib.fmean(samples)
    return math.fsum((sample - mean) ** 2 for sample in samples)


def compute_figure(samples: Sequence[float], figure: str) -> float:
    """Return the mean of the samples if ``figure`` is "mean", else their median."""
    return _stdlib.fmean(samples) if figure == "mean" else _stdlib.median(samples)


def compute_interval(samples: Sequence[float], figure: str) -> Interval:
    """Return the interval of a figure within the visit."""
    return compute_batch_means_interval(samples) if figure == "mean" else compute_median_interval(samples)


def compute_median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the narrowest symmetric order-statistic interval of the median with at least this confidence; the range of
    the samples if there are too few.
    """
    ordered = sorted(samples)
    rank, coverage = _find_median_rank(len(ordered), confidence)
    return Interval(ordered[rank], ordered[len(ordered) - 1 - rank], coverage)


@functools.lru_cache(1024)  # called after each train of launches, and for each row of a log
def _find_median_rank(count: int, confidence: float) -> tuple[int, float]:
    """Return the rank, from either end, of the samples that bound the interval of the median, and its coverage."""
    if count > 10_000:  # normal approximation: the rank is off by at most 1, and exact integers take quadratic time
        rank = math.floor(_stdlib.NormalDist(count / 2, math.sqrt(count) / 2).inv_cdf((1 - confidence) / 2) - 0.5)
        return rank, math.erf((count - 2 * rank - 1) / math.sqrt(2 * count))
    # below: how many of the 2**count outcomes have the true median below the sample of this rank; exact integers.
    rank, below, at_rank, total = 0, 1, 1, 2**count
    while True:
        at_rank = at_rank * (count - rank) // (rank + 1)
        if 1 - 2 * (below + at_rank) / total < confidence:
            return rank, 1 - 2 * below / total
        rank, below = rank + 1, below + at_rank


def compute_batch_means_interval(samples: Sequence[float], batches: int = _BATCHES) -> Interval:
    """Return the interval of the mean, from the means of equal batches of consecutive samples. The range for few
    samples.
    """
    batches = min(batches, len(samples) // 2)
    if batches < 2:
        return Interval(min(samples), max(samples), compute_median_interval(samples).coverage)
    size = len(samples) // batches
    # Drop the samples that do not fill a batch at the start, where the earlier state may persist.
    whole = samples[len(samples) - batches * size :]
    means = [_stdlib.fmean(whole[start : start + size]) for start in range(0, len(whole), size)]
    half = compute_student_t_quantile(batches - 1) * compute_standard_deviation(means) / math.sqrt(batches)
    middle = _stdlib.fmean(samples)
    return Interval(middle - half, middle + half, CONFIDENCE)


def compute_standard_error(interval: Interval, figure: float) -> float:
    """Return the relative standard error of a normally distributed figure with this interval.

    For a mean it is 42 % too large (more with fewer batches), because with Student's t and 5 batches the half-width is
    2.776 standard errors, not 1.960. The calibration depends on this, so it stays.
    """
    coverage = min(max(interval.coverage, 0.5), 0.999)
    return interval.half_width / _stdlib.NormalDist().inv_cdf((1 + coverage) / 2) / figure


def compute_run_error(
    figures: Sequence[float], middle: float, within: Sequence[float], known: Repeatability
) -> FigureError:
    """Return the error of a run's figure relative to the mean of all runs. ``middle``: the figure in seconds, combined
    from the ``figures`` of the run's visits. ``within``: the relative standard error of each visit.

    It has three terms: the relative deviation between runs, the deviation in seconds, and the standard error of the
    visits. All rows of a run share half of the variance between runs.
    """
    count = len(figures)
    inside = 0.0 if known.ignores_within else _stdlib.fmean(error**2 for error in within)
    of_visits = max(inside, (compute_standard_deviation(figures) / middle) ** 2) / count
    shared = known.run**2 / 2
    own = math.sqrt(shared + (known.launch_seconds / middle) ** 2 + of_visits)
    return FigureError(math.sqrt(shared), own, _MANY_DEGREES)


def compute_repeat_interval(
    figures: Sequence[float],
    middle: float,
    within: Sequence[float],
    known: Repeatability,
    celsius: float | None = None,
) -> Interval:
    """Return the 95 % repeat interval, in seconds. With a probability of 95 % it contains the figure of one more run of
    the same measurement in a new process, on the same card with the same software.

    ``compute_run_error`` explains the first four parameters. This is a prediction interval (Hahn & Meeker, Statistical
    Intervals, 2017, section 4.8): the repeated run has as large an error as this run, so the variance counts twice. If
    the card was cold (``celsius``), the interval is wider by the speed that a warm card loses. The interval does not
    include errors that all runs share, such as the bias of the timer (see Measurement.accuracy).
    """
    error = compute_run_error(figures, middle, within, known)
    half = _REPEAT * error.total + known.compute_cold_gain(celsius)
    # For small scatter this is nearly symmetric; for large scatter the lower end stays positive.
    return Interval(middle * max(1 - half, (1 + half) ** -2), middle * (1 + half), CONFIDENCE)


def widen_interval(interval: Interval, middle: float, half_width: float) -> Interval:
    """Return the interval of a positive figure after multiplication by a factor whose relative half-width is
    ``half_width``. Relative widths of independent errors add in quadrature. An interval that reaches 0 is returned
    unchanged.
    """
    if interval.low <= 0 or not half_width:
        return interval
    below, above = (
        min(math.hypot(math.log(end / middle), half_width), _WIDEST_LOGARITHM) for end in (interval.low, interval.high)
    )
    return Interval(middle * math.exp(-below), middle * math.exp(above), interval.coverage)


@functools.cache
def compute_student_t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the half-width, in standard errors, of the interval that covers ``confidence`` of Student's t
    distribution.
    """
    low, high = 0.0, 1e4
    while high - low > 1e-9 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_coverage(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _compute_t_coverage(t: float, degrees: int) -> float:
    """P(-t < T < t), in closed form for a whole number of degrees (Abramowitz & Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, is_odd = math.cos(angle), degrees % 2
    term, total = (cosine, cosine) if is_odd else (1.0, 1.0)
    for step in range(2 + is_odd, degrees - 1, 2):
        term *= cosine**2 * (step - 1) / step
        total += term
    if is_odd:
        return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))
    return math.sin(angle) * total


def compute_relative_slope(samples: Collection[float]) -> float:
    """Return the total rise of a straight line through equally spaced samples, as a share of their mean."""
    count = len(samples)
    if count < 2:
        return 0.0
    slope, _ = _stdlib.linear_regression(range(count), samples)
    return slope * (count - 1) / _stdlib.fmean(samples)


def find_two_levels(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the two levels, low and high, that samples alternate between; None if they scatter around one level.

    Samples are split at the middle of their range. Two levels then explain nearly all of the variance, but only 64 % of
    normal scatter and 75 % of uniform scatter.
    """
    if len(samples) < _MIN_FOR_LEVELS:
        return None
    middle = (min(samples) + max(samples)) / 2
    below, above = [x for x in samples if x < middle], [x for x in samples if x >= middle]
    if min(len(below), len(above)) < len(samples) / 5:
        return None
    low, high = _stdlib.fmean(below), _stdlib.fmean(above)
    rest = sum((x - low) ** 2 for x in below) + sum((x - high) ** 2 for x in above)
    is_parted = rest <= _UNEXPLAINED * _sum_squared_deviations(samples) and high - low >= _MIN_GAP * low
    return (low, high) if is_parted else None


def compute_known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are None."""
    known = [value for value in values if value is not None]
    return _stdlib.median(known) if known else None


def compute_geometric_mean(values: Sequence[float]) -> float:
    return _stdlib.geometric_mean(values)


def compute_arithmetic_mean(values: Sequence[float]) -> float:
    return _stdlib.fmean(values)
