"""From time samples to a figure with an interval. Pure; seconds in, seconds out.

Launch times in burst are skewed and have outliers, so the figure is the median, with a distribution-free interval from
order statistics: the number of samples below the true median is Binomial(n, 1/2) for any distribution (Hahn & Meeker,
Statistical Intervals, 2017, section 5.2). Sustained measures work over time: the figure is the mean of blocks of equal
work. Successive blocks are not independent, so the interval uses batch means (Law, Simulation Modeling and Analysis,
2015, section 9.5.3).

Both describe a single visit; repeats differ by more. ``repeat_interval`` gives the interval that mamf prints: a 95 %
prediction interval for one more run. It adds the variance between runs from ``Repeatability``, which is calibrated on
pairs of runs (tools/coverage.py). The maximum of noisy samples is biased upward, and more samples bias it more: it is
reported, but never used as a ceiling.
"""

from __future__ import annotations

import functools
import math
import statistics as _stdlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
_BATCHES = 5
_WIDEST_LOGARITHM = 700.0  # its exponential is still finite: a crafted log may claim any width
# The half-width of a 95 % interval of the difference of two figures, in standard deviations of one: 2.77.
_REPEAT = math.sqrt(2) * _stdlib.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MAX_CELSIUS = 200
# Runs in results/ colder than the usual one by more are the coldest 5 % in burst (2 % of sustained ceilings).
_COLD_DEGREES = 5.0
# With more degrees of freedom, Student's t differs from the normal distribution by at most 0.6 %.
_MANY_DEGREES = 200
# Two levels need this many samples, at most this share of the variance within levels, and this relative distance.
_MIN_FOR_LEVELS, _UNEXPLAINED, _MIN_GAP = 10, 0.15, 0.01
# 1.5 / 0.5, for times and for rates.
_WIDEST_RATIO = 3.0


@dataclass(frozen=True)
class Interval:
    """A confidence interval. ``coverage``: the probability that it reaches; for a median, fewer than 6 samples cannot
    reach 95 %.
    """

    low: float
    high: float
    coverage: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def is_known(self) -> bool:
        """Whether the interval is informative: its ends are within 50 % of the middle, so they differ by at most 3x."""
        return self.high <= _WIDEST_RATIO * self.low

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Repeatability:
    """How far the figures of separate runs lie apart.

    - ``run``: relative standard deviation between runs. ``launch_seconds``: seconds per launch by which runs differ in
      addition, so short launches repeat less well.
    - ``ignores_within``: the scatter within a visit predicts nothing, because a power controller oscillates regularly.
    - ``usual_celsius``, ``per_degree``: the temperature of such runs, and the relative loss of speed per degree.

    Measured for NVIDIA GPUs and a CPU (repeatability.csv); other devices borrow the GPUs' values. Raises ValueError for
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
                f"{self.usual_celsius:g} C: shares of 1, under a second, and a temperature below {_MAX_CELSIUS} C"
            )

    def is_cold(self, celsius: float | None) -> bool:
        """Whether a run at this temperature was colder than 95 % of such runs."""
        return bool(self.per_degree) and celsius is not None and celsius < self.usual_celsius - _COLD_DEGREES

    def cold_gain(self, celsius: float | None) -> float:
        """The share by which a run at this temperature is faster than at the usual one; 0 if it is not colder."""
        return 0.0 if celsius is None else self.per_degree * max(0.0, self.usual_celsius - celsius)


@dataclass(frozen=True)
class FigureError:
    """Relative standard deviations of one run's figure: the part that all rows of the run share (``common``), and the
    rest (``own``). ``degrees``: degrees of freedom for Student's t.
    """

    common: float
    own: float
    degrees: int

    @property
    def total(self) -> float:
        return math.hypot(self.common, self.own)


@dataclass(frozen=True)
class Summary:
    """Statistics of samples, in seconds except ``count``. ``interval``: of the figure, within the visit."""

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
        interval=interval_of(samples, figure),
    )


def standard_deviation(samples: Sequence[float]) -> float:
    """The standard deviation of samples; 0 for a single one. Uses floats: exact fractions take 50 times as long."""
    return math.sqrt(_squares(samples) / (len(samples) - 1)) if len(samples) > 1 else 0.0


def exact_standard_deviation(samples: Sequence[float]) -> float:
    """The same with exact fractions, for reports that must reproduce every digit of early logs."""
    return _stdlib.stdev(samples) if len(samples) > 1 else 0.0


def _squares(samples: Sequence[float]) -> float:
    """The sum of squared deviations from the mean."""
    mean = _stdlib.fmean(samples)
    return math.fsum((sample - mean) ** 2 for sample in samples)


def figure_of(samples: Sequence[float], figure: str) -> float:
    """The mean of the samples if ``figure`` is "mean", else their median."""
    return _stdlib.fmean(samples) if figure == "mean" else _stdlib.median(samples)


def interval_of(samples: Sequence[float], figure: str) -> Interval:
    """The interval of a figure within the visit."""
    return batch_means_interval(samples) if figure == "mean" else median_interval(samples)


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The narrowest symmetric order-statistic interval of the median that covers ``confidence``, else the range."""
    ordered = sorted(samples)
    rank, coverage = _median_rank(len(ordered), confidence)
    return Interval(ordered[rank], ordered[len(ordered) - 1 - rank], coverage)


@functools.lru_cache(1024)  # called after each train of launches, and for each row of a log
def _median_rank(count: int, confidence: float) -> tuple[int, float]:
    """The rank, from either end, of the samples that enclose the median of ``count`` samples, and the coverage."""
    if count > 10_000:  # nearly normal: the rank is at most 1 off, and exact integers would take quadratic time
        rank = math.floor(_stdlib.NormalDist(count / 2, math.sqrt(count) / 2).inv_cdf((1 - confidence) / 2) - 0.5)
        return rank, math.erf((count - 2 * rank - 1) / math.sqrt(2 * count))
    # below: outcomes (of 2**count) in which the true median is below the sample of this rank; exact integers.
    rank, below, at_rank, total = 0, 1, 1, 2**count
    while True:
        at_rank = at_rank * (count - rank) // (rank + 1)
        if 1 - 2 * (below + at_rank) / total < confidence:
            return rank, 1 - 2 * below / total
        rank, below = rank + 1, below + at_rank


def batch_means_interval(samples: Sequence[float], batches: int = _BATCHES) -> Interval:
    """The interval of the mean from the means of equal batches of consecutive samples; the range for few samples."""
    batches = min(batches, len(samples) // 2)
    if batches < 2:
        return Interval(min(samples), max(samples), median_interval(samples).coverage)
    size = len(samples) // batches
    # Samples that do not fill a batch are dropped at the start, where the state before the visit may persist.
    whole = samples[len(samples) - batches * size :]
    means = [_stdlib.fmean(whole[start : start + size]) for start in range(0, len(whole), size)]
    half = student_t(batches - 1) * standard_deviation(means) / math.sqrt(batches)
    middle = _stdlib.fmean(samples)
    return Interval(middle - half, middle + half, CONFIDENCE)


def standard_error(interval: Interval, figure: float) -> float:
    """The relative standard error that corresponds to an interval of this coverage for a normal figure.

    For a mean it is 42 % too large (more with fewer batches), because Student's t with 5 batches makes the interval
    2.776 standard errors wide and not 1.960. The calibration depends on it, so it stays.
    """
    coverage = min(max(interval.coverage, 0.5), 0.999)
    return interval.half_width / _stdlib.NormalDist().inv_cdf((1 + coverage) / 2) / figure


def figure_error(figures: Sequence[float], middle: float, within: Sequence[float], known: Repeatability) -> FigureError:
    """The error of ``middle`` seconds, which combines the ``figures`` of the visits of one run, relative to the mean of
    all runs. ``within``: the relative standard error of each visit.

    Three terms: the deviation between runs, the same in seconds, and the standard error from these visits. All rows of
    a run share half of the variance between runs.
    """
    count = len(figures)
    inside = 0.0 if known.ignores_within else _stdlib.fmean(error**2 for error in within)
    of_visits = max(inside, (standard_deviation(figures) / middle) ** 2) / count
    shared = known.run**2 / 2
    own = math.sqrt(shared + (known.launch_seconds / middle) ** 2 + of_visits)
    return FigureError(math.sqrt(shared), own, _MANY_DEGREES)


def repeat_interval(
    figures: Sequence[float],
    middle: float,
    within: Sequence[float],
    known: Repeatability,
    celsius: float | None = None,
) -> Interval:
    """The 95 % repeat interval, in seconds: it contains the figure of one more run of the same measurement, in a new
    process, on the same card with the same software, with a probability of 95 %.

    Parameters as in ``figure_error``. This is a prediction interval (Hahn & Meeker, Statistical Intervals, 2017,
    section 4.8): the repeat has the same error as the figure itself, so the variance counts twice. A figure from a cold
    card (``celsius``) is wider by what a warm card loses. It excludes errors that both runs share, such as the bias of
    the timer (see Measurement.accuracy).
    """
    error = figure_error(figures, middle, within, known)
    half = _REPEAT * error.total + known.cold_gain(celsius)
    # Nearly symmetric if the scatter is small; the lower end stays positive if it is large.
    return Interval(middle * max(1 - half, (1 + half) ** -2), middle * (1 + half), CONFIDENCE)


def widen(interval: Interval, middle: float, half_width: float) -> Interval:
    """The interval of a positive figure after multiplication by a factor whose relative half-width is ``half_width``:
    relative widths of independent errors add in quadrature. An interval that reaches 0 stays as it is.
    """
    if interval.low <= 0 or not half_width:
        return interval
    below, above = (
        min(math.hypot(math.log(end / middle), half_width), _WIDEST_LOGARITHM) for end in (interval.low, interval.high)
    )
    return Interval(middle * math.exp(-below), middle * math.exp(above), interval.coverage)


@functools.cache
def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The half-width, in standard errors, that covers ``confidence`` of Student's t distribution."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_coverage(middle, degrees) < confidence else (low, middle)
    return (low + high) / 2


def _t_coverage(t: float, degrees: int) -> float:
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


def relative_slope(samples: Collection[float]) -> float:
    """The rise of a straight line through equally spaced samples from first to last, as a share of their mean."""
    count = len(samples)
    if count < 2:
        return 0.0
    slope, _ = _stdlib.linear_regression(range(count), samples)
    return slope * (count - 1) / _stdlib.fmean(samples)


def two_levels(samples: Sequence[float]) -> tuple[float, float] | None:
    """The two levels that samples alternate between, low and high, or None if they scatter around one level.

    Split at the middle, two levels explain nearly all of the variance; for normal scatter a split explains 64 %, for
    uniform scatter 75 %.
    """
    if len(samples) < _MIN_FOR_LEVELS:
        return None
    middle = (min(samples) + max(samples)) / 2
    below, above = [x for x in samples if x < middle], [x for x in samples if x >= middle]
    if min(len(below), len(above)) < len(samples) / 5:
        return None
    low, high = _stdlib.fmean(below), _stdlib.fmean(above)
    rest = sum((x - low) ** 2 for x in below) + sum((x - high) ** 2 for x in above)
    is_parted = rest <= _UNEXPLAINED * _squares(samples) and high - low >= _MIN_GAP * low
    return (low, high) if is_parted else None


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None, or None without any."""
    known = [value for value in values if value is not None]
    return _stdlib.median(known) if known else None


def geometric_mean(values: Sequence[float]) -> float:
    return _stdlib.geometric_mean(values)


def arithmetic_mean(values: Sequence[float]) -> float:
    return _stdlib.fmean(values)
