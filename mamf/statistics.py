"""Compute a figure and its interval from samples of launch times in seconds. This file uses no device.

In the burst regime, launch times are skewed and have outliers, so the figure is the median. Its interval comes from
order statistics and is valid for any distribution: the number of samples below the true median always has the
distribution Binomial(n, 1/2) (Hahn & Meeker, Statistical Intervals, 2017, section 5.2).

In the sustained regime, each sample is the mean time of a block of launches. All blocks have the same number of
launches. The figure is the mean of the samples, so the rate is total work divided by total time. Successive blocks are
not independent, so the interval uses batch means (Law, Simulation Modeling and Analysis, 2015, section 9.5.3).

Both intervals describe a single visit (one measurement of one kernel and shape), but repeated visits differ by more.
``compute_repeat_interval`` computes the interval that mamf prints: a 95 % prediction interval for one more run. It adds
the variance between runs from ``Repeatability``, which is calibrated on pairs of runs (tools/coverage.py).

mamf reports the maximum of the samples, but never uses it as a ceiling. The maximum of noisy samples is too high, and
it becomes higher with more samples.
"""

from __future__ import annotations

import functools
import math
import statistics as _stdlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

#: The probability that an interval that mamf prints contains the true figure.
CONFIDENCE = 0.95
_MAX_BATCHES = 5
# The maximum logarithm of a ratio. Without this maximum, a log that contains an extremely wide interval could make
# math.exp overflow, which happens at 710.
_MAX_LOG_RATIO = 700.0
# With a probability of 95 %, the figures of two runs differ by at most 2.77 times the standard deviation of one run's
# figure.
_REPEAT_HALF_WIDTH = math.sqrt(2) * _stdlib.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MAX_CELSIUS = 200
# A run counts as cold if its device is this much colder than usual. In results/, 5 % of the burst runs and 2 % of
# the sustained runs were cold.
_COLD_DIFFERENCE_CELSIUS = 5.0
# With this many degrees of freedom, the interval of Student's t is at most 0.6 % wider than the normal distribution's.
_NORMAL_DEGREES_OF_FREEDOM = 200
# Samples count as alternating between two levels only if there are at least _MIN_LEVEL_SAMPLES samples. The levels must
# differ by at least _MIN_RELATIVE_GAP, and leave at most _MAX_UNEXPLAINED_SHARE of the variance unexplained.
_MIN_LEVEL_SAMPLES, _MAX_UNEXPLAINED_SHARE, _MIN_RELATIVE_GAP = 10, 0.15, 0.01
# The maximum ratio of the ends of a useful interval. An interval of -50 % to +50 % has a ratio of 1.5 / 0.5.
_MAX_USEFUL_RATIO = 3.0


@dataclass(frozen=True)
class Interval:
    """A confidence interval from ``low`` to ``high``. ``coverage``: the probability that the interval contains the true
    value. It is below 95 % for a median of fewer than 6 samples.
    """

    low: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_known(self) -> bool:
        """Whether the interval is narrow enough to be useful: both ends are within 50 % of the middle. Reports call
        other intervals unknown.
        """
        return self.high <= _MAX_USEFUL_RATIO * self.low

    @property
    def known_ends(self) -> tuple[float | None, float | None]:
        """``low`` and ``high``, or None twice if the interval is unknown: reports leave these cells empty."""
        return (self.low, self.high) if self.is_known else (None, None)

    def scale(self, factor: float) -> Interval:
        return replace(self, low=factor * self.low, high=factor * self.high)

    def invert(self, amount: float) -> Interval:
        """Convert an interval of seconds to one of rates. ``amount``: the work of these seconds."""
        return replace(self, low=amount / self.high, high=amount / self.low)

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Repeatability:
    """A description of how much the figures (mean or median seconds per launch) of separate runs differ.

    - ``run``: the standard deviation between runs, as a share of the figure. ``launch_seconds``: an additional standard
      deviation in seconds per launch, which makes short launches less repeatable than long ones.
    - ``ignores_within``: whether to ignore the scatter of the samples within a visit. A power controller that
      oscillates regularly makes this scatter meaningless.
    - ``usual_celsius``: the usual temperature of the device. ``per_degree``: the share of speed that the device loses
      per degree of warming.

    The values were measured for NVIDIA GPUs and a CPU (repeatability.csv); other devices use the GPUs' values. Raises
    ValueError for values outside their range.
    """

    run: float
    launch_seconds: float = 0.0
    ignores_within: bool = False
    usual_celsius: float = 0.0
    per_degree: float = 0.0

    def __post_init__(self) -> None:
        are_small = all(0 <= value < 1 for value in (self.run, self.launch_seconds, self.per_degree))
        if not (are_small and 0 <= self.usual_celsius < _MAX_CELSIUS):
            raise ValueError(
                f"invalid repeatability: run {self.run:g}, launch_seconds {self.launch_seconds:g}, per_degree "
                f"{self.per_degree:g} and usual_celsius {self.usual_celsius:g}: run, launch_seconds and per_degree "
                f"must be at least 0 and below 1, and usual_celsius at least 0 and below {_MAX_CELSIUS}"
            )

    def is_cold(self, celsius: float | None) -> bool:
        """Return whether a device at ``celsius`` is colder than in about 95 % of all runs; False if unknown."""
        return bool(self.per_degree) and celsius is not None and celsius < self.usual_celsius - _COLD_DIFFERENCE_CELSIUS

    def compute_cold_gain(self, celsius: float | None) -> float:
        """Return how much faster a device is at ``celsius`` than at its usual temperature, as a share; 0 if the device
        is not colder than usual or ``celsius`` is None.
        """
        return 0.0 if celsius is None else self.per_degree * max(0.0, self.usual_celsius - celsius)


@dataclass(frozen=True)
class FigureUncertainty:
    """The error of one run's figure (mean or median seconds per launch).

    - ``common``: the relative standard deviation of the part of the error that is the same in all rows of the run.
    - ``own``: the relative standard deviation of the part that differs independently between rows.
    - ``degrees``: the degrees of freedom for Student's t.
    """

    common: float
    own: float
    degrees: int


@dataclass(frozen=True)
class SampleSummary:
    """The statistics of a row's samples, in seconds per launch, and their ``count``. ``interval``: the 95 % interval of
    the mean or the median, from the scatter of the samples.
    """

    count: int
    mean: float
    median: float
    fastest: float
    slowest: float
    interval: Interval


def summarize_samples(samples: Sequence[float], statistic: str = "median") -> SampleSummary:
    """Compute the statistics of samples in seconds. ``statistic``: whether the interval is that of the ``mean`` or the
    ``median``. Raises ValueError if there are no samples.
    """
    return SampleSummary(
        count=len(samples),
        mean=_stdlib.fmean(samples),
        median=_stdlib.median(samples),
        fastest=min(samples),
        slowest=max(samples),
        interval=compute_interval(samples, statistic),
    )


def compute_standard_deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of samples; 0 for a single sample. Compute with floats, because
    ``statistics.stdev`` uses exact fractions and takes 50 times as long.
    """
    return math.sqrt(_sum_squared_deviations(samples) / (len(samples) - 1)) if len(samples) > 1 else 0.0


def _sum_squared_deviations(samples: Sequence[float]) -> float:
    """Return the sum of the squared deviations of samples from their mean."""
    mean = _stdlib.fmean(samples)
    return math.fsum((sample - mean) ** 2 for sample in samples)


def compute_mean_or_median(samples: Sequence[float], statistic: str) -> float:
    """Return the mean of the samples if ``statistic`` is "mean", else their median."""
    return _stdlib.fmean(samples) if statistic == "mean" else _stdlib.median(samples)


def compute_interval(samples: Sequence[float], statistic: str) -> Interval:
    """Return the 95 % interval of the mean of the samples if ``statistic`` is "mean", else of their median. The
    interval shows only the scatter of these samples; repeated runs differ by more.
    """
    return compute_batch_means_interval(samples) if statistic == "mean" else compute_median_interval(samples)


def compute_median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the narrowest interval that contains the true median with a probability of at least ``confidence``. It
    reaches from the k-th smallest to the k-th largest sample. With too few samples it is their whole range.
    """
    sorted_samples = sorted(samples)
    rank, coverage = _find_median_rank(len(sorted_samples), confidence)
    return Interval(sorted_samples[rank], sorted_samples[len(sorted_samples) - 1 - rank], coverage)


@functools.lru_cache(1024)  # mamf calls this after each group of launches, and for each row of a log.
def _find_median_rank(count: int, confidence: float) -> tuple[int, float]:
    """Return the rank k (counted from 0) for which the interval of the median reaches from the k-th smallest to the
    k-th largest of ``count`` samples. Also return the probability that this interval contains the true median.
    """
    if count > 10_000:  # Exact integers would take quadratic time. The normal approximation is off by at most one rank.
        rank = math.floor(_stdlib.NormalDist(count / 2, math.sqrt(count) / 2).inv_cdf((1 - confidence) / 2) - 0.5)
        return rank, math.erf((count - 2 * rank - 1) / math.sqrt(2 * count))
    # There are 2**count equally likely outcomes, because each sample is above or below the true median. ``below`` is
    # the number of outcomes in which the true median is below the sample of rank ``rank``. All counts are exact
    # integers.
    rank, below, at_rank, total = 0, 1, 1, 2**count
    while True:
        at_rank = at_rank * (count - rank) // (rank + 1)
        if 1 - 2 * (below + at_rank) / total < confidence:
            return rank, 1 - 2 * below / total
        rank, below = rank + 1, below + at_rank


def compute_batch_means_interval(samples: Sequence[float], batches: int = _MAX_BATCHES) -> Interval:
    """Return the 95 % interval of the mean of the samples. Split the samples into ``batches`` equal groups of
    consecutive samples, and compute the interval from the scatter of the groups' means. With fewer than 4 samples the
    interval is their whole range.
    """
    batches = min(batches, len(samples) // 2)
    if batches < 2:
        return Interval(min(samples), max(samples), compute_median_interval(samples).coverage)
    size = len(samples) // batches
    # If the samples do not fill the batches, drop the first samples, in which the device may not have settled yet.
    batched_samples = samples[len(samples) - batches * size :]
    means = [_stdlib.fmean(batched_samples[start : start + size]) for start in range(0, len(batched_samples), size)]
    half_width = compute_student_t_quantile(batches - 1) * compute_standard_deviation(means) / math.sqrt(batches)
    mean = _stdlib.fmean(samples)
    return Interval(mean - half_width, mean + half_width, CONFIDENCE)


def compute_standard_error(interval: Interval, figure: float) -> float:
    """Return the standard error of a figure, as a share of the figure, from the figure's interval. The function assumes
    that the figure is normally distributed.

    For a mean, the result is at least 42 % too large. The function divides the half-width by 1.960. But with 5 batches,
    the half-width is 2.776 standard errors (Student's t), and with fewer batches it is larger. The constants in
    repeatability.csv were fitted to these overestimated errors. If you correct the errors, fit the constants again.
    """
    coverage = min(max(interval.coverage, 0.5), 0.999)
    return interval.half_width / _stdlib.NormalDist().inv_cdf((1 + coverage) / 2) / figure


def compute_run_error(
    figures: Sequence[float], run_figure: float, visit_errors: Sequence[float], repeatability: Repeatability
) -> FigureUncertainty:
    """Return the error of a run's figure, relative to the mean over all runs of the same measurement.

    - ``figures``: the mean or median seconds per launch of each visit (one measurement of one kernel and shape) in this
      run. ``visit_errors``: the relative standard error of each visit.
    - ``run_figure``: the figure of the run, which combines the figures of the visits.
    - ``repeatability``: how much repeated runs differ.

    The error has three terms: the deviation between runs as a share of the figure, the deviation between runs in
    seconds per launch, and the standard error of the visits. All rows of a run share half of the relative variance
    between runs.
    """
    # Use the median error of the visits, because other work on the device may disturb a single visit.
    variance_within_visits = 0.0 if repeatability.ignores_within else _stdlib.median(error**2 for error in visit_errors)
    visit_variance = max(variance_within_visits, (compute_standard_deviation(figures) / run_figure) ** 2) / len(figures)
    shared_variance = repeatability.run**2 / 2
    row_error = math.sqrt(shared_variance + (repeatability.launch_seconds / run_figure) ** 2 + visit_variance)
    return FigureUncertainty(math.sqrt(shared_variance), row_error, _NORMAL_DEGREES_OF_FREEDOM)


def compute_repeat_interval(
    figures: Sequence[float],
    run_figure: float,
    visit_errors: Sequence[float],
    repeatability: Repeatability,
    celsius: float | None = None,
) -> Interval:
    """Return the 95 % repeat interval, in seconds per launch. With a probability of 95 % it contains the figure of one
    more run of this measurement in a new process, on this card with this software.

    ``compute_run_error`` explains the first four parameters. This is a prediction interval (Hahn & Meeker, Statistical
    Intervals, 2017, section 4.8): the repeated run has as large an error as this run, so the variance counts twice. If
    the card was colder than usual (``celsius``), the interval is wider by the slowdown that is expected once the card
    has warmed up. The interval does not include errors that all runs share, such as the bias of the timer (see
    Measurement.accuracy).
    """
    error = compute_run_error(figures, run_figure, visit_errors, repeatability)
    half_width = _REPEAT_HALF_WIDTH * math.hypot(error.common, error.own) + repeatability.compute_cold_gain(celsius)
    # The interval is nearly symmetric if it is narrow. If it is wide, this formula keeps its lower end above 0.
    return Interval(run_figure * max(1 - half_width, (1 + half_width) ** -2), run_figure * (1 + half_width), CONFIDENCE)


def widen_interval(interval: Interval, figure: float, half_width: float) -> Interval:
    """Widen the interval of a positive ``figure`` that was multiplied by an uncertain factor. If the interval reaches
    0, return it unchanged.

    ``half_width``: the relative half-width of the factor's interval. The errors of figure and factor are independent,
    so their relative half-widths combine as the root of the sum of squares.
    """
    if interval.low <= 0 or not half_width:
        return interval
    below, above = (
        min(math.hypot(math.log(end / figure), half_width), _MAX_LOG_RATIO) for end in (interval.low, interval.high)
    )
    return Interval(figure * math.exp(-below), figure * math.exp(above), interval.coverage)


@functools.cache
def compute_student_t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which a value from Student's t distribution is between -t and t with probability ``confidence``.

    ``degrees``: the degrees of freedom of the distribution.
    """
    low, high = 0.0, 1e4
    while high - low > 1e-9 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_coverage(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _compute_t_coverage(t: float, degrees: int) -> float:
    """Return P(-t < T < t) for Student's t distribution with a whole number of degrees of freedom, in closed form
    (Abramowitz & Stegun, 26.7.3 and 26.7.4).
    """
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
    """Return how much a straight line through equally spaced samples rises from the first to the last sample, as a
    share of their mean. A falling line gives a negative result.
    """
    slope, _ = _stdlib.linear_regression(range(len(samples)), samples)
    return slope * (len(samples) - 1) / _stdlib.fmean(samples)


def find_two_levels(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the low and the high level that the samples alternate between; None if they scatter around one level.

    Split the samples at the middle of their range. If they alternate between two levels, the split explains nearly all
    of their variance. It explains only 64 % for normally distributed samples, and 75 % for uniformly distributed
    samples.
    """
    if len(samples) < _MIN_LEVEL_SAMPLES:
        return None
    middle = (min(samples) + max(samples)) / 2
    low_samples, high_samples = (
        [sample for sample in samples if sample < middle],
        [sample for sample in samples if sample >= middle],
    )
    if min(len(low_samples), len(high_samples)) < len(samples) / 5:
        return None
    low, high = _stdlib.fmean(low_samples), _stdlib.fmean(high_samples)
    unexplained = sum((sample - low) ** 2 for sample in low_samples) + sum(
        (sample - high) ** 2 for sample in high_samples
    )
    has_two_levels = (
        unexplained <= _MAX_UNEXPLAINED_SHARE * _sum_squared_deviations(samples)
        and high - low >= _MIN_RELATIVE_GAP * low
    )
    return (low, high) if has_two_levels else None


def compute_median_ignoring_none(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if all are None."""
    known_values = [value for value in values if value is not None]
    return _stdlib.median(known_values) if known_values else None
