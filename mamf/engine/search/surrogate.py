"""Predict the rate of matmul shapes that are not measured yet, with a Gaussian process over features of the shape.

The method follows Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5. The rate of a
matmul is hard to predict because kernels divide C into tiles, and the compute units work on the tiles in waves. The
tiles at the edge of C and the last wave may be nearly empty for one shape and full for its neighbor. So two neighboring
shapes can differ more in their rates than two distant shapes. The features are therefore the sizes, and how full the
edge tiles and the last wave are. The model learns the effect of each tile size separately (an additive kernel: Duvenaud
et al., Additive Gaussian Processes, 2011).

The model assumes that shapes with the same M and the same N share the part of the rate that the features do not
explain. Before any measurement, the model knows only the number of compute units of the device, and some devices do not
report even that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from mamf.operations.matmul.shapes import MatmulShape

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_MAX_FIT_STEPS = 6
# Compress values of log TFLOPS that are below the best value by more than about this amount, so that differences among
# slow shapes do not dominate the fit (Snelson et al., Warped Gaussian Processes, 2003).
_COMPRESSION_START = 0.1
# Assume at least this standard deviation of the noise of a measurement, unless all values are equal. With few
# measurements, the maximum-likelihood estimate of the noise may be 0.
_MIN_NOISE_DEVIATION = 0.001


# -- features of shapes ------------------------------------------------------------------------------------------------

# The sizes of tiles that libraries commonly divide C into, each in either orientation.
_TILE_SIZES = ((64, 128), (64, 256), (128, 128), (128, 192), (128, 256), (192, 256), (256, 256))


@dataclass
class CandidateFeatures:
    """The features of all candidates (shapes with kernels). Each column is standardized: mean 0, standard deviation 1.

    - ``size_features``: one row per candidate, with functions of M, N and K that do not change if M and N are
      exchanged.
    - ``pair_indices``: the index of each candidate's pair of M and N in ``wave_features`` and ``log_aspect_ratios``.
    - ``wave_features``: one row per pair, with how full the waves are for each tile size. A row does not change if M
      and N are exchanged.
    - ``log_aspect_ratios``: one row per pair, with log2(M / N).
    - ``kernel_indices``: the index of each candidate's kernel; None if there is only one kernel.
    """

    size_features: Array
    pair_indices: Indices
    wave_features: Array
    log_aspect_ratios: Array
    kernel_indices: Indices | None = None


def compute_features(
    shapes: Sequence[MatmulShape], compute_units: int | None, kernel_count: int = 1
) -> CandidateFeatures:
    """Compute the inputs of the Gaussian process for S shapes with P distinct pairs of M and N. ``size_features`` has
    the dimensions (S, 4), ``wave_features`` (P, number of tile sizes) and ``log_aspect_ratios`` (P, 1).

    A candidate is a shape with a kernel. The result lists all shapes with the first kernel, then all shapes with the
    second, and so on.
    ``compute_units``: the number of compute units of the device; None if unknown.
    """
    m, n, k = np.array([(shape.m, shape.n, shape.k) for shape in shapes], dtype=float).T
    sizes = np.stack([np.log2(m * n), np.log2(k), np.abs(np.log2(m / n)), np.log2(m * k + k * n + m * n)], axis=1)
    (m, n), pairs = np.unique(np.stack([m, n]), axis=1, return_inverse=True)
    return CandidateFeatures(
        size_features=np.tile(_standardize(sizes), (kernel_count, 1)),
        pair_indices=np.tile(pairs.reshape(-1), kernel_count),
        wave_features=compute_wave_features(m, n, compute_units),
        log_aspect_ratios=_standardize(np.log2(m / n)[:, None]),
        kernel_indices=np.repeat(np.arange(kernel_count), len(shapes)) if kernel_count > 1 else None,
    )


def compute_wave_features(m: Array, n: Array, compute_units: int | None) -> Array:
    """Return the share of the device's capacity that does useful work, for each pair of M and N and each tile size. The
    rest is lost in tiles that extend beyond C and, if ``compute_units`` is known, in compute units that are idle in the
    last wave. Of the two orientations of each tile, the better one counts. The shares are standardized to mean 0 and
    standard deviation 1.
    """
    # Each array has the axes: 2 orientations, tile sizes, pairs of M and N.
    tile_m, tile_n = np.array([_TILE_SIZES, [(b, a) for a, b in _TILE_SIZES]], dtype=float).transpose(2, 0, 1)[
        ..., None
    ]
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    useful = m * n / (tiles * tile_m * tile_n)
    if compute_units:
        useful = useful * tiles / (np.ceil(tiles / compute_units) * compute_units)
    # Make the array contiguous, because the rounding of the sums of its columns depends on the order in memory.
    return _standardize(np.ascontiguousarray(useful.max(axis=0).T))


def _standardize(columns: Array) -> Array:
    deviation = columns.std(axis=0)
    return np.asarray((columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0))


class FeatureDistances(NamedTuple):
    """For each feature of a shape, the squared distances from C candidates to D other candidates.

    The other candidates have P different pairs (M, N). The distances in features that depend only on M and N are stored
    once per pair.

    - ``size_distances``: the distances in size, C x D. ``wave_distances``: the distances in waves for each tile size,
      (number of tile sizes) x C x P. ``aspect_distances``: the distances in aspect ratio, C x P.
    - ``is_pair_of_candidate``: C x P; 1.0 if the candidate (row) has the pair (column), else 0.0.
    - ``pair_indices``: for each of the D candidates, the index of its pair of M and N.
    - ``is_same_kernel``: C x D; 1.0 if both candidates have the same kernel, else 0.0; None if there is one kernel.
    """

    size_distances: Array
    wave_distances: Array
    aspect_distances: Array
    is_pair_of_candidate: Array
    pair_indices: Indices
    is_same_kernel: Array | None = None


def compute_distances(
    features: CandidateFeatures, rows: list[int], other_rows: list[int] | None = None
) -> FeatureDistances:
    """Return the distances in each feature from the candidates ``rows`` to ``other_rows`` (None: all candidates)."""
    pairs_of_rows = features.pair_indices[rows]
    other_pairs = np.arange(len(features.wave_features)) if other_rows is None else features.pair_indices[other_rows]
    other_pair_indices = features.pair_indices if other_rows is None else np.arange(len(other_rows))
    others = slice(None) if other_rows is None else other_rows
    return FeatureDistances(
        compute_squared_distances(features.size_features, rows, other_rows),
        # The squared difference between the wave features of two shapes, for each tile size. The axes are tile sizes,
        # candidates, and pairs of M and N.
        (features.wave_features[pairs_of_rows].T[:, :, None] - features.wave_features[other_pairs].T[:, None, :]) ** 2,
        (features.log_aspect_ratios[pairs_of_rows] - features.log_aspect_ratios[other_pairs].T) ** 2,
        np.equal.outer(pairs_of_rows, other_pairs).astype(float),
        other_pair_indices,
        None
        if features.kernel_indices is None
        else np.equal.outer(features.kernel_indices[rows], features.kernel_indices[others]).astype(float),
    )


def compute_squared_distances(columns: Array, rows: list[int], other_rows: list[int] | None) -> Array:
    """Return the squared Euclidean distance from each of the ``rows`` of the array ``columns`` to each of its
    ``other_rows`` (None: all rows), as a matrix.
    """
    left, right = columns[rows], columns if other_rows is None else columns[other_rows]
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None]
    squared -= 2 * left @ right.T
    return np.asarray(np.maximum(squared, 0.0, out=squared))


# -- the Gaussian process ----------------------------------------------------------------------------------------------


@functools.cache
def _get_blas_controller() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


@contextmanager
def limit_blas_to_one_thread() -> Iterator[None]:
    """Let BLAS use one thread within this context or decorated method. With matrices as small as those of the search,
    waking other threads takes most of the time.
    """
    with _get_blas_controller().limit(limits=1):
        yield


# The prior variance of a constant difference between kernels, as a share of the variance over shapes.
_KERNEL_OFFSET_VARIANCE = 0.5
# The share of variance that is assumed to be specific to a kernel, before several kernels have been measured.
_INITIAL_KERNEL_SHARE = 0.1


#: By hyperparameter: the factor by which one step changes it, its smallest value, and its largest value.
_STEP_FACTOR_AND_BOUNDS_BY_HYPERPARAMETER = {
    "size_length_scale": (2.0, 0.5, 8.0),
    "wave_length_scale": (2.0, 0.4, 6.0),
    "asymmetry_share": (3.0, 0.001, 0.3),
    "pair_share": (3.0, 0.003, 3.0),
    "noise_share": (10.0, 1e-5, 1e-1),
    "kernel_share": (3.0, 0.1, 1.0),
}


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of the Gaussian process over shapes. Shares are relative to the variance over shapes.

    - ``size_length_scale``: the distance between sizes, in standard deviations, over which the rate changes much.
    - ``wave_length_scale``: the same distance between features that say how full the waves of tiles are.
    - ``asymmetry_share``: the share of variance that depends on whether M or N is larger.
    - ``pair_share``: the share of variance that is specific to a pair of M and N.
    - ``noise_share``: the variance of the measurement noise, as a share of the variance over shapes.
    - ``kernel_share``: the share of variance that is specific to a kernel; 0 if there is only one kernel.
    """

    size_length_scale: float = 2.0
    wave_length_scale: float = 1.5
    asymmetry_share: float = 0.03
    pair_share: float = 0.1
    noise_share: float = 1e-3
    kernel_share: float = 0.0

    def list_adjacent_hyperparameters(self) -> list[Hyperparameters]:
        """Return these hyperparameters, and variants in which one hyperparameter is a step larger or smaller."""
        variants = (
            replace(self, **{name: value})
            for name, (step, smallest, largest) in _STEP_FACTOR_AND_BOUNDS_BY_HYPERPARAMETER.items()
            for value in (getattr(self, name) * step, getattr(self, name) / step)
            if smallest <= value <= largest
        )
        return [self, *variants]

    def compute_log_prior(self) -> float:
        """Return the log prior probability of these hyperparameters, up to a constant. The probability decreases with
        the number of steps by which they differ from the defaults. The prior is necessary because with only a dozen
        measurements the likelihood alone is not reliable.
        """
        defaults = replace(Hyperparameters(), kernel_share=self.kernel_share)
        steps = (
            math.log(getattr(self, name) / getattr(defaults, name), step)
            for name, (step, _, _) in _STEP_FACTOR_AND_BOUNDS_BY_HYPERPARAMETER.items()
            if self.kernel_share or name != "kernel_share"
        )
        return -0.5 * sum(count**2 for count in steps)


@dataclass
class Surrogate:
    """The Gaussian process that predicts the log TFLOPS of the candidates (shapes with kernels) in ``features``.
    ``mean`` and ``deviation`` have one value per candidate. After replacing ``features``, call ``fit_observations``
    again.

    L is the Cholesky factor of the covariance of the observed candidates, including noise. ``_projected`` is L^-1 times
    the covariance of the observed candidates with all candidates. A new observation only appends one row to
    ``_projected``, and the predictions follow from it without solving the system again.
    """

    features: CandidateFeatures = field(init=False)
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    is_fitted: bool = False
    highest_observed_log_tflops: float = -math.inf

    def fit_observations(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Fit the process to observations: the candidates with the numbers ``rows`` have the log TFLOPS ``values``.
        Choose the likeliest hyperparameters near the present ones, and update the predictions.
        """
        observed = list(rows)
        if self.features.kernel_indices is not None and not self.hyperparameters.kernel_share:
            self.hyperparameters = replace(self.hyperparameters, kernel_share=_INITIAL_KERNEL_SHARE)
        self.highest_observed_log_tflops = max(values)
        self._reference = self.highest_observed_log_tflops
        self._values = [self.compress_slow_value(value) for value in values]
        parts = CovarianceParts(compute_distances(self.features, observed, observed))
        self.hyperparameters = find_likeliest_hyperparameters(parts, np.array(self._values), self.hyperparameters)
        lower = np.linalg.cholesky(compute_noisy_covariance(parts, self.hyperparameters))
        self._projected = np.linalg.solve(
            lower, compute_covariance(CovarianceParts(compute_distances(self.features, observed)), self.hyperparameters)
        )
        self._whitened = np.linalg.solve(lower, np.stack([np.array(self._values), np.ones(len(values))], axis=1))
        self._rows = observed
        self._update_predictions()

    def compress_slow_value(self, value: float) -> float:
        """Return a log TFLOPS ``value`` as the process models it. Values below the best value of the last fit are
        moved toward the best value, distant ones the most, so that slow shapes differ less.
        """
        below = self._reference - value
        return value if below <= 0 else self._reference - _COMPRESSION_START * math.log1p(below / _COMPRESSION_START)

    def add_observation(self, row: int, value: float) -> None:
        """Add the observation that the candidate ``row`` has the log TFLOPS ``value``, and update the predictions."""
        self.highest_observed_log_tflops = max(self.highest_observed_log_tflops, value)
        value = self.compress_slow_value(value)
        column = self._projected[:, row]
        noise = self.hyperparameters.noise_share
        diagonal = math.sqrt(max(self._compute_prior_variance() + noise - float(column @ column), noise))
        prior = compute_covariance(CovarianceParts(compute_distances(self.features, [row])), self.hyperparameters)[0]
        self._projected = np.vstack([self._projected, (prior - column @ self._projected) / diagonal])
        self._whitened = np.vstack([self._whitened, (np.array([value, 1.0]) - column @ self._whitened) / diagonal])
        self._rows.append(row)
        self._update_predictions()

    def compute_log_improvement(self) -> Array:
        """Return the logarithm of every candidate's expected improvement (Jones et al., Efficient Global Optimization
        of Expensive Black-Box Functions, 1998) over the best prediction for an observed candidate. The highest
        measurement is not used for comparison, because it is partly luck.
        """
        above = (self.mean - self.mean[self._rows].max()) / self.deviation
        below = np.array(list(map(math.erfc, (-above / math.sqrt(2)).tolist()))) / 2
        expected = above * below + np.exp(-(above**2) / 2) / math.sqrt(2 * math.pi)
        return np.asarray(np.log(np.maximum(expected, 1e-300)) + np.log(self.deviation))

    def _update_predictions(self) -> None:
        values, ones = self._whitened.T
        centre = (ones @ values) / (ones @ ones)
        residual = values - centre * ones
        scale = float(residual @ residual) / max(len(residual) - 1, 1)
        self.mean = centre + residual @ self._projected
        variance = self._compute_prior_variance() - np.einsum("ij,ij->j", self._projected, self._projected)
        noise = max(self.hyperparameters.noise_share * scale, min(_MIN_NOISE_DEVIATION**2, scale), 1e-12)
        self.deviation = np.sqrt(np.maximum(variance, 0.0) * scale + noise)
        self.is_fitted = True

    def _compute_prior_variance(self) -> float:
        return (
            1.0
            + self.hyperparameters.asymmetry_share
            + self.hyperparameters.pair_share
            + (0.0 if self.features.kernel_indices is None else _KERNEL_OFFSET_VARIANCE)
        )


class CovarianceParts:
    """A cache of the most expensive parts of a covariance. Each part depends on at most one hyperparameter, so if one
    hyperparameter changes, only the part that depends on it is computed again.
    """

    def __init__(self, distances: FeatureDistances, correlate_by_sizes: Callable[[float], Array] | None = None) -> None:
        self.distances = distances
        self.aspect_correlation = np.exp(-2 * distances.aspect_distances)
        #: Returns the correlations (C candidates x P pairs of M and N) that follow from how similarly full the waves
        #: are, averaged over tile sizes. The argument is the hyperparameter ``wave_length_scale``.
        self.correlate_by_waves: Callable[[float], Array] = functools.cache(
            lambda wave_length_scale: np.exp(distances.wave_distances * (-2 / wave_length_scale**2)).mean(axis=0)
        )
        #: Returns the correlations (C x D candidates) that follow from how close the sizes are. The argument is the
        #: hyperparameter ``size_length_scale``.
        self.correlate_by_sizes: Callable[[float], Array] = correlate_by_sizes or functools.cache(
            lambda size_length_scale: np.exp(distances.size_distances * (-0.125 / size_length_scale**2))
        )


def compute_covariance(parts: CovarianceParts, hyperparameters: Hyperparameters) -> Array:
    """Return the prior covariance of C candidates with D candidates. Two candidates have a higher covariance if their
    sizes are close, if their waves are equally full, if both have M larger than N (or both smaller), or if they have
    the same pair of M and N. Candidates with different kernels have a smaller covariance, and kernels differ by a
    constant.

    For speed, the code works in place, because with thousands of candidates allocating memory takes as long as the
    arithmetic. Where possible it works on pairs of M and N, of which there are far fewer than shapes.
    """
    distances, correlate_by_sizes = parts.distances, parts.correlate_by_sizes(hyperparameters.size_length_scale)
    sizes = correlate_by_sizes**2
    sizes *= sizes
    sizes *= (0.5 + hyperparameters.pair_share * distances.is_pair_of_candidate)[:, distances.pair_indices]
    together = (
        parts.correlate_by_waves(hyperparameters.wave_length_scale)
        * (0.5 + hyperparameters.asymmetry_share * parts.aspect_correlation)
    )[:, distances.pair_indices]
    together *= correlate_by_sizes
    sizes += together
    del together
    if distances.is_same_kernel is not None:
        sizes *= 1 - hyperparameters.kernel_share + hyperparameters.kernel_share * distances.is_same_kernel
        sizes += _KERNEL_OFFSET_VARIANCE * distances.is_same_kernel
    return sizes


def compute_noisy_covariance(parts: CovarianceParts, hyperparameters: Hyperparameters) -> Array:
    """Return the covariance of measured candidates: the prior covariance plus measurement noise."""
    covariance = compute_covariance(parts, hyperparameters)
    return covariance + hyperparameters.noise_share * np.eye(len(covariance))


def find_likeliest_hyperparameters(
    parts: CovarianceParts, values: Array, hyperparameters: Hyperparameters
) -> Hyperparameters:
    """Return the likeliest hyperparameters for the observed log TFLOPS ``values``, according to likelihood and prior.
    Climb to them from ``hyperparameters``, one step in one hyperparameter at a time.
    """
    likelihood = functools.cache(
        lambda hyperparameters: (
            compute_log_likelihood(parts, values, hyperparameters) + hyperparameters.compute_log_prior()
        )
    )
    best = hyperparameters
    for _ in range(_MAX_FIT_STEPS):
        uphill = max(best.list_adjacent_hyperparameters(), key=likelihood)
        if uphill == best:
            break
        best = uphill
    return best


def compute_log_likelihood(parts: CovarianceParts, values: Array, hyperparameters: Hyperparameters) -> float:
    """Return the log marginal likelihood of the observed log TFLOPS ``values``, up to a constant, for the likeliest
    mean and variance of the process.
    """
    lower = np.linalg.cholesky(compute_noisy_covariance(parts, hyperparameters))
    whitened, ones = np.linalg.solve(lower, np.stack([values, np.ones(len(values))], axis=1)).T
    residual = whitened - (ones @ whitened) / (ones @ ones) * ones
    count = len(values)
    return float(-count / 2 * math.log(max(residual @ residual / count, 1e-300)) - np.log(np.diag(lower)).sum())


# -- the number of compute units, for devices that do not report it ----------------------------------------------------

_COMPUTE_UNIT_COUNTS = range(8, 322, 2)
# Use only shapes that reach at least this share of the best rate, because other bottlenecks hide the effect of waves in
# slower shapes.
_MIN_FAST_SHARE = 0.7
# To estimate the number of compute units, use at most this number of shapes (the fastest ones), and require at least
# this number.
_MAX_ESTIMATION_SHAPES, _MIN_ESTIMATION_SHAPES = 64, 16
# Accept an estimated number of compute units only if its log likelihood exceeds that of a model without waves by at
# least this much. mamf tries about 160 numbers, and the best of N numbers gains about log(N) by chance, which is 5
# here.
_MIN_LIKELIHOOD_GAIN = 8.0


def estimate_compute_units(measured: Mapping[MatmulShape, float], hyperparameters: Hyperparameters) -> int | None:
    """Return the number of compute units of a device that best explains the ``measured`` TFLOPS of shapes; None if no
    number explains them convincingly. The result may be half or twice the true number, because such numbers explain the
    rates equally well.
    """
    best = max(measured.values(), default=0.0)
    fast = sorted((shape for shape in measured if measured[shape] >= _MIN_FAST_SHARE * best), key=measured.__getitem__)
    shapes = fast[-_MAX_ESTIMATION_SHAPES:]
    if len(shapes) < _MIN_ESTIMATION_SHAPES:
        return None
    values = np.array([math.log(measured[shape]) for shape in shapes])
    rows = list(range(len(shapes)))
    m, n = np.array([(shape.m, shape.n) for shape in shapes], dtype=float).T
    parts = CovarianceParts(compute_distances(compute_features(shapes, None), rows, rows))

    def compute_likelihood(units: int | None) -> float:
        # Add up the distances of all tile sizes, because fitting a separate effect for each
        # tile size would take several times as long.
        waves = compute_squared_distances(compute_wave_features(m, n, units), rows, rows)[None] / 4
        unit_parts = CovarianceParts(parts.distances._replace(wave_distances=waves), parts.correlate_by_sizes)
        return compute_log_likelihood(unit_parts, values, hyperparameters)

    likelihoods = {units: compute_likelihood(units) for units in _COMPUTE_UNIT_COUNTS}
    likeliest = max(likelihoods, key=likelihoods.__getitem__)
    return likeliest if likelihoods[likeliest] > compute_likelihood(None) + _MIN_LIKELIHOOD_GAIN else None
