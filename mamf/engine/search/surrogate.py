"""Predicts the rate of shapes that are not measured yet, with a Gaussian process over features of the shape.

The method follows Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5. Matmul is hard
to predict because of quantization: it is divided into tiles, and tiles into waves over the compute units, so
neighboring shapes can differ more than distant ones with equal quantization. The features are therefore sizes, and how
full the last wave and the edge tiles are. The effect of each tile is learned separately (an additive kernel: Duvenaud
et al., Additive Gaussian Processes, 2011). What the features do not explain is shared by shapes with equal M and N. The
only thing known in advance about a device is its number of compute units, and some devices do not report even that.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from mamf.engine.search.shape_features import (
    NO_FEATURES,
    Array,
    Distances,
    Features,
    compute_distances,
    compute_features,
    compute_squared_distances,
    compute_wave_features,
    cut_into_tiles,
)
from mamf.operations.matmul.shapes import MatmulShape

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_FIT_STEPS = 6
# Values of log TFLOPS that are further than about this below the best one are compressed, so that differences among
# slow shapes count less. Otherwise these would dominate the fit (Snelson et al., Warped Gaussian Processes, 2003).
_COMPRESSION_START = 0.1
# The smallest standard deviation that a measurement may have, unless all are equal. With few measurements the likeliest
# noise may be 0.
_MIN_NOISE = 0.001


@functools.cache
def _get_blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def limit_to_one_thread(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a method with single-threaded BLAS: with matrices this small, waking other threads takes most of the time."""

    @functools.wraps(method)
    def run_limited(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        with _get_blas().limit(limits=1):
            return method(*arguments, **named)

    return run_limited


# Prior variance of a constant offset between kernels, as a share of the variance over shapes.
_OFFSET_VARIANCE = 0.5
# The first guess of the share of variance that is specific to a kernel, before several kernels were measured.
_INITIAL_KERNEL_SHARE = 0.1


_STEPS = {"sizes": 2.0, "waves": 2.0, "lean": 3.0, "pair": 3.0, "noise": 10.0, "kernel_share": 3.0}


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters.

    - ``sizes``, ``waves``: the length scales of these features, in standard deviations of a feature.
    - ``lean``: the share of variance that depends on whether M or N is larger.
    - ``pair``: the share that is specific to a pair of M and N.
    - ``noise``: the share of measurement noise.
    - ``kernel_share``: the share that is specific to a kernel; 0 if there is only one.
    """

    sizes: float = 2.0
    waves: float = 1.5
    lean: float = 0.03
    pair: float = 0.1
    noise: float = 1e-3
    kernel_share: float = 0.0

    def list_neighbors(self) -> list[Hyperparameters]:
        """Return these scales, and the scales with one hyperparameter a step up or down."""
        bounds = {
            "sizes": (0.5, 8.0),
            "waves": (0.4, 6.0),
            "lean": (0.001, 0.3),
            "pair": (0.003, 3.0),
            "noise": (1e-5, 1e-1),
            "kernel_share": (0.1, 1.0),
        }
        found = [self]
        for name, step in _STEPS.items():
            for value in (getattr(self, name) * step, getattr(self, name) / step):
                if bounds[name][0] <= value <= bounds[name][1]:
                    found.append(replace(self, **{name: value}))
        return found

    def compute_log_prior(self) -> float:
        """Return the log prior, from the number of steps between these scales and the defaults. With only a dozen
        measurements the likelihood alone is not reliable.
        """
        usual = replace(Hyperparameters(), kernel_share=self.kernel_share)
        steps = (
            math.log(getattr(self, name) / getattr(usual, name), step)
            for name, step in _STEPS.items()
            if self.kernel_share or name != "kernel_share"
        )
        return -0.5 * sum(count**2 for count in steps)


@dataclass
class Surrogate:
    """The Gaussian process over the candidates in ``features``. Call ``fit`` again after replacing these.

    Adding an observation costs one row: with K + noise = L L^T over the observed, ``_projected`` is
    L^-1 K(observed, candidates), and mean and variance follow from it without another solve.
    """

    features: Features = field(default_factory=lambda: NO_FEATURES)
    scales: Hyperparameters = field(default_factory=Hyperparameters)
    is_fitted: bool = False
    highest: float = -math.inf

    def fit(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Fit to these observations (``values``: log TFLOPS), with the likeliest scales near the last ones."""
        observed = list(rows)
        if self.features.kernels is not None and not self.scales.kernel_share:
            self.scales = replace(self.scales, kernel_share=_INITIAL_KERNEL_SHARE)
        self.highest = max(values)
        self._reference = self.highest
        self._values = [self.warp(value) for value in values]
        near = CovarianceParts(compute_distances(self.features, observed, observed))
        self.scales = find_likeliest_hyperparameters(near, np.array(self._values), self.scales)
        lower = np.linalg.cholesky(compute_noisy_covariance(near, self.scales))
        right = np.stack([np.array(self._values), np.ones(len(values))], axis=1)
        self._projected = np.linalg.solve(
            lower, compute_covariance(CovarianceParts(compute_distances(self.features, observed)), self.scales)
        )
        self._whitened = np.linalg.solve(lower, right)
        self._rows = observed
        self._update()

    def warp(self, value: float) -> float:
        """Return the log TFLOPS that the process models: values below the best one at the last fit are compressed."""
        below = self._reference - value
        return value if below <= 0 else self._reference - _COMPRESSION_START * math.log1p(below / _COMPRESSION_START)

    def add(self, row: int, value: float) -> None:
        """Add an observation (``value``: log TFLOPS)."""
        self.highest = max(self.highest, value)
        value = self.warp(value)
        column = self._projected[:, row]
        noise = self.scales.noise
        diagonal = math.sqrt(max(self._compute_prior_variance() + noise - float(column @ column), noise))
        prior = compute_covariance(CovarianceParts(compute_distances(self.features, [row])), self.scales)[0]
        self._projected = np.vstack([self._projected, (prior - column @ self._projected) / diagonal])
        self._whitened = np.vstack([self._whitened, (np.array([value, 1.0]) - column @ self._whitened) / diagonal])
        self._rows.append(row)
        self._update()

    def compute_upper_bound(self, deviations: float) -> Array:
        """Return the upper confidence bound of every candidate's log TFLOPS."""
        return np.asarray(self.mean + deviations * self.deviation)

    def compute_log_improvement(self) -> Array:
        """Return the log of every candidate's expected improvement (Jones et al., Efficient Global Optimization of
        Expensive Black-Box Functions, 1998) over the observed candidate with the best prediction. The highest
        measurement is not used, because it is partly luck.
        """
        above = (self.mean - self.mean[self._rows].max()) / self.deviation
        below = np.array(list(map(math.erfc, (-above / math.sqrt(2)).tolist()))) / 2
        expected = above * below + np.exp(-(above**2) / 2) / math.sqrt(2 * math.pi)
        return np.asarray(np.log(np.maximum(expected, 1e-300)) + np.log(self.deviation))

    def _update(self) -> None:
        values, ones = self._whitened.T
        centre = (ones @ values) / (ones @ ones)
        residual = values - centre * ones
        scale = float(residual @ residual) / max(len(residual) - 1, 1)
        self.mean = centre + residual @ self._projected
        variance = self._compute_prior_variance() - np.einsum("ij,ij->j", self._projected, self._projected)
        noise = max(self.scales.noise * scale, min(_MIN_NOISE**2, scale), 1e-12)
        self.deviation = np.sqrt(np.maximum(variance, 0.0) * scale + noise)
        self.is_fitted = True

    def _compute_prior_variance(self) -> float:
        return 1.0 + self.scales.lean + self.scales.pair + (0.0 if self.features.kernels is None else _OFFSET_VARIANCE)


class CovarianceParts:
    """A cache of the parts of a covariance that depend on at most one hyperparameter. Computing these parts is most of
    the arithmetic. Hyperparameters that differ in one hyperparameter share all parts except the one that depends on it.
    """

    def __init__(self, apart: Distances) -> None:
        self.apart = apart
        self.lean = np.exp(-2 * apart.lean)
        self._waves: dict[float, Array] = {}
        self._sizes: dict[float, Array] = {}

    def correlate_by_waves(self, reach: float) -> Array:
        """Return the mean correlation over the waves of each tile, C x P."""
        if reach not in self._waves:
            self._waves[reach] = np.exp(self.apart.waves * (-2 / reach**2)).mean(axis=0)
        return self._waves[reach]

    def correlate_by_sizes(self, reach: float) -> Array:
        """Return the correlation by sizes, C x D."""
        if reach not in self._sizes:
            found = self.apart.sizes * (-0.125 / reach**2)
            self._sizes[reach] = np.exp(found, out=found)
        return self._sizes[reach]

    def replace_waves(self, waves: Array) -> CovarianceParts:
        """Return a copy with ``waves`` as its distances by waves."""
        other = copy.copy(self)
        other.apart, other._waves = self.apart._replace(waves=waves), {}
        return other


def compute_covariance(near: CovarianceParts, scales: Hyperparameters) -> Array:
    """Return the prior covariance of candidates, C x D. It has four terms: sizes; sizes times the waves of each tile; a
    term that is asymmetric in M and N; and one for equal M and N. Shapes with different kernels have a smaller
    covariance, and kernels differ by a constant offset.

    For speed it works in place, because with thousands of candidates allocating memory takes as long as the arithmetic;
    it works on pairs of M and N where possible, of which there are far fewer; and it frees arrays early.
    """
    apart, correlate_by_sizes = near.apart, near.correlate_by_sizes(scales.sizes)
    sizes = correlate_by_sizes**2
    sizes *= sizes
    sizes *= (0.5 + scales.pair * apart.is_pair)[:, apart.pairs]
    together = (near.correlate_by_waves(scales.waves) * (0.5 + scales.lean * near.lean))[:, apart.pairs]
    together *= correlate_by_sizes
    sizes += together
    del together
    if apart.is_same_kernel is not None:
        sizes *= 1 - scales.kernel_share + scales.kernel_share * apart.is_same_kernel
        sizes += _OFFSET_VARIANCE * apart.is_same_kernel
    return sizes


def compute_noisy_covariance(near: CovarianceParts, scales: Hyperparameters) -> Array:
    """Return the covariance of observations: the prior covariance plus measurement noise."""
    found = compute_covariance(near, scales)
    found.flat[:: len(found) + 1] += scales.noise
    return found


def find_likeliest_hyperparameters(near: CovarianceParts, values: Array, scales: Hyperparameters) -> Hyperparameters:
    """Climb from these scales to the likeliest ones, a step at a time, by likelihood and prior."""
    likelihood = functools.cache(
        lambda scales: compute_log_likelihood(near, values, scales) + scales.compute_log_prior()
    )
    best = scales
    for _ in range(_FIT_STEPS):
        uphill = max(best.list_neighbors(), key=likelihood)
        if uphill == best:
            break
        best = uphill
    return best


def compute_log_likelihood(near: CovarianceParts, values: Array, scales: Hyperparameters) -> float:
    """Return the log marginal likelihood at the likeliest mean and variance, up to a constant."""
    lower = np.linalg.cholesky(compute_noisy_covariance(near, scales))
    whitened, ones = np.linalg.solve(lower, np.stack([values, np.ones(len(values))], axis=1)).T
    residual = whitened - (ones @ whitened) / (ones @ ones) * ones
    count = len(values)
    return float(-count / 2 * math.log(max(residual @ residual / count, 1e-300)) - np.log(np.diag(lower)).sum())


# -- the number of compute units, for devices that do not report it ----------------------------------------------------

_UNITS = range(8, 322, 2)
# Use only shapes that reach this share of the best rate: in slower ones, other limits hide the waves.
_MIN_FAST_SHARE = 0.7
# The maximum number of these shapes to use (the fastest ones), and the minimum number for an estimate.
_MAX_SHAPES, _MIN_SHAPES = 64, 16
# The log likelihood by which waves over some number of units must beat no waves at all. By chance alone, the best of N
# numbers of units gains about log(N), which is 5.
_MIN_LIKELIHOOD_GAIN = 8.0


def estimate_compute_units(measured: Mapping[MatmulShape, float], scales: Hyperparameters) -> int | None:
    """Return the number of compute units that best explains the TFLOPS of shapes; None if no number is convincing. Half
    or twice the true number explains them equally well.
    """
    best = max(measured.values(), default=0.0)
    fast = sorted((shape for shape in measured if measured[shape] >= _MIN_FAST_SHARE * best), key=measured.__getitem__)
    shapes = fast[-_MAX_SHAPES:]
    if len(shapes) < _MIN_SHAPES:
        return None
    values = np.array([math.log(measured[shape]) for shape in shapes])
    rows = list(range(len(shapes)))
    m, n = np.array([(shape.m, shape.n) for shape in shapes], dtype=float).T
    cut, near = cut_into_tiles(m, n), CovarianceParts(compute_distances(compute_features(shapes, None), rows, rows))

    def likelihood(units: int | None) -> float:
        # Use all tiles together: a separate effect per tile would take several times as long for all these numbers.
        waves = compute_squared_distances(compute_wave_features(cut, units), rows, rows)[None] / 4
        return compute_log_likelihood(near.replace_waves(waves), values, scales)

    found = {units: likelihood(units) for units in _UNITS}
    likeliest = max(found, key=found.__getitem__)
    return likeliest if found[likeliest] > likelihood(None) + _MIN_LIKELIHOOD_GAIN else None
