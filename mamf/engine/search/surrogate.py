"""Predicts the rate of shapes not yet measured: a Gaussian process over features of the shape.

Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5. What makes matmul hard to predict
is quantisation: a product is cut into tiles, and tiles into waves over the compute units, so neighbours differ by more
than distant shapes of equal quantisation. Hence features: sizes, and how full the last wave and the edge tiles are. The
effect of each tile is learned separately (an additive kernel: Duvenaud et al., Additive Gaussian Processes, 2011), and
what these do not explain shapes of one M and N have in common. Nothing is known in advance of a device but its compute
units, and not even these everywhere; the rest is learned from what was measured.
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
    cut_into_tiles,
    distances,
    features,
    squared_distances,
    wave_features,
)
from mamf.operations.matmul.shapes import MatmulShape

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_FIT_STEPS = 6
# Differences in log TFLOPS count in full near the best, and ever less from so far below it: how slow the slow shapes
# are would else outweigh what sets the fastest apart (Snelson et al., Warped Gaussian Processes, 2003).
_NEAR_BEST = 0.1
# Standard deviation that a figure has of its own at least, unless all are alike: of a few the likeliest may be none.
_MIN_NOISE = 0.001


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def single_threaded(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """With BLAS on one thread: for matrices this small, waking the others takes several times as long as the work."""

    @functools.wraps(method)
    def limited(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        with _blas().limit(limits=1):
            return method(*arguments, **named)

    return limited


# Prior variance of how much faster one kernel is than another everywhere, as a share of that over shapes.
_OFFSET = 0.5
# What of a kernel's landscape is taken for its own before several were measured.
_FIRST_OWN = 0.1


_STEPS = {"sizes": 2.0, "waves": 2.0, "lean": 3.0, "pair": 3.0, "noise": 10.0, "own": 3.0}


@dataclass(frozen=True)
class Scales:
    """Hyperparameters: how far the effect of sizes and of waves reaches (in standard deviations of a feature), the
    share of variance that M against N makes, that which a ``pair`` of M and N has of its own, that of noise, and that
    which is a kernel's ``own`` (0 where there is one kernel).
    """

    sizes: float = 2.0
    waves: float = 1.5
    lean: float = 0.03
    pair: float = 0.1
    noise: float = 1e-3
    own: float = 0.0

    def nearby(self) -> list[Scales]:
        """This, and each hyperparameter one step up or down."""
        bounds = {
            "sizes": (0.5, 8.0),
            "waves": (0.4, 6.0),
            "lean": (0.001, 0.3),
            "pair": (0.003, 3.0),
            "noise": (1e-5, 1e-1),
            "own": (0.1, 1.0),
        }
        found = [self]
        for name, step in _STEPS.items():
            for value in (getattr(self, name) * step, getattr(self, name) / step):
                if bounds[name][0] <= value <= bounds[name][1]:
                    found.append(replace(self, **{name: value}))
        return found

    def log_prior(self) -> float:
        """Of how many steps these are from the defaults: from a dozen figures a likelihood alone can mean anything."""
        usual = replace(Scales(), own=self.own)
        steps = (
            math.log(getattr(self, name) / getattr(usual, name), step)
            for name, step in _STEPS.items()
            if self.own or name != "own"
        )
        return -0.5 * sum(count**2 for count in steps)


@dataclass
class Surrogate:
    """The Gaussian process over a list of candidates, given as ``features``; ``fit`` again when these are replaced.

    Kept so that one more observation costs one row: with K + noise = L L^T over the observed, ``_projected`` is
    L^-1 K(observed, candidates), and mean and variance follow from it without solving anything anew.
    """

    features: Features = field(default_factory=lambda: NO_FEATURES)
    scales: Scales = field(default_factory=Scales)
    is_fitted: bool = False
    highest: float = -math.inf

    def fit(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Start over from these observations, with the likeliest of the scales near the last."""
        observed = list(rows)
        if self.features.kernels is not None and not self.scales.own:
            self.scales = replace(self.scales, own=_FIRST_OWN)
        self.highest = max(values)
        self._reference = self.highest
        self._values = [self.warped(value) for value in values]
        near = Nearness(distances(self.features, observed, observed))
        self.scales = likeliest(near, np.array(self._values), self.scales)
        lower = np.linalg.cholesky(noisy_covariance(near, self.scales))
        right = np.stack([np.array(self._values), np.ones(len(values))], axis=1)
        self._projected = np.linalg.solve(lower, covariance(Nearness(distances(self.features, observed)), self.scales))
        self._whitened = np.linalg.solve(lower, right)
        self._rows = observed
        self._update()

    def warped(self, value: float) -> float:
        """Log TFLOPS as they are predicted: foreshortened below the best that was fitted."""
        below = self._reference - value
        return value if below <= 0 else self._reference - _NEAR_BEST * math.log1p(below / _NEAR_BEST)

    def add(self, row: int, value: float) -> None:
        """One more observation."""
        self.highest = max(self.highest, value)
        value = self.warped(value)
        column = self._projected[:, row]
        noise = self.scales.noise
        diagonal = math.sqrt(max(self._prior_variance() + noise - float(column @ column), noise))
        prior = covariance(Nearness(distances(self.features, [row])), self.scales)[0]
        self._projected = np.vstack([self._projected, (prior - column @ self._projected) / diagonal])
        self._whitened = np.vstack([self._whitened, (np.array([value, 1.0]) - column @ self._whitened) / diagonal])
        self._rows.append(row)
        self._update()

    def bound(self, deviations: float) -> Array:
        """Upper confidence bound of log TFLOPS of every candidate."""
        return np.asarray(self.mean + deviations * self.deviation)

    def log_improvement(self) -> Array:
        """Logarithm of what every candidate is expected to add to the best observed (Jones et al., Efficient Global
        Optimization of Expensive Black-Box Functions, 1998): best by prediction, as the highest figure is so by chance.
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
        variance = self._prior_variance() - np.einsum("ij,ij->j", self._projected, self._projected)
        noise = max(self.scales.noise * scale, min(_MIN_NOISE**2, scale), 1e-12)
        self.deviation = np.sqrt(np.maximum(variance, 0.0) * scale + noise)
        self.is_fitted = True

    def _prior_variance(self) -> float:
        return 1.0 + self.scales.lean + self.scales.pair + (0.0 if self.features.kernels is None else _OFFSET)


class Nearness:
    """What of a covariance one hyperparameter alone decides, or none: most of its arithmetic, and of scales that differ
    in one of them the same.
    """

    def __init__(self, apart: Distances) -> None:
        self.apart = apart
        self.lean = np.exp(-2 * apart.lean)
        self._waves: dict[float, Array] = {}
        self._sizes: dict[float, Array] = {}

    def by_waves(self, reach: float) -> Array:
        """Of each tile's waves the mean, C x P."""
        if reach not in self._waves:
            self._waves[reach] = np.exp(self.apart.waves * (-2 / reach**2)).mean(axis=0)
        return self._waves[reach]

    def by_sizes(self, reach: float) -> Array:
        """C x D."""
        if reach not in self._sizes:
            found = self.apart.sizes * (-0.125 / reach**2)
            self._sizes[reach] = np.exp(found, out=found)
        return self._sizes[reach]

    def with_waves(self, waves: Array) -> Nearness:
        """The same of candidates that lie apart so by waves."""
        other = copy.copy(self)
        other.apart, other._waves = self.apart._replace(waves=waves), {}
        return other


def covariance(near: Nearness, scales: Scales) -> Array:
    """Prior covariance of candidates: sizes alone, sizes with the waves of each tile, a part asymmetric in M and N,
    and what is of one M and N. Of two kernels it is less by what is each one's own, and they differ by an offset too.

    In place, because of thousands of candidates fetching fresh memory takes as long as the arithmetic; and by pairs of
    M and N where it can be, of which there are far fewer; what is needed no more goes before more is taken.
    """
    apart, by_sizes = near.apart, near.by_sizes(scales.sizes)
    sizes = by_sizes**2
    sizes *= sizes
    sizes *= (0.5 + scales.pair * apart.is_pair)[:, apart.pairs]
    together = (near.by_waves(scales.waves) * (0.5 + scales.lean * near.lean))[:, apart.pairs]
    together *= by_sizes
    sizes += together
    del together
    if apart.alike is not None:
        sizes *= 1 - scales.own + scales.own * apart.alike
        sizes += _OFFSET * apart.alike
    return sizes


def noisy_covariance(near: Nearness, scales: Scales) -> Array:
    """Of what was observed: the prior's and the noise of measuring."""
    found = covariance(near, scales)
    found.flat[:: len(found) + 1] += scales.noise
    return found


def likeliest(near: Nearness, values: Array, scales: Scales) -> Scales:
    """Uphill from these scales, a step at a time, by likelihood and prior."""
    likelihood = functools.cache(lambda scales: log_likelihood(near, values, scales) + scales.log_prior())
    best = scales
    for _ in range(_FIT_STEPS):
        uphill = max(best.nearby(), key=likelihood)
        if uphill == best:
            break
        best = uphill
    return best


def log_likelihood(near: Nearness, values: Array, scales: Scales) -> float:
    """Log marginal likelihood with mean and variance at their likeliest, up to a constant."""
    lower = np.linalg.cholesky(noisy_covariance(near, scales))
    whitened, ones = np.linalg.solve(lower, np.stack([values, np.ones(len(values))], axis=1)).T
    residual = whitened - (ones @ whitened) / (ones @ ones) * ones
    count = len(values)
    return float(-count / 2 * math.log(max(residual @ residual / count, 1e-300)) - np.log(np.diag(lower)).sum())


# -- the number of compute units, for devices that do not report it ----------------------------------------------------

_UNITS = range(8, 322, 2)
# Shapes of at least this share of the best: what else holds back the others hides the waves.
_FAST = 0.7
# The most of these that are used, the fastest first, and the fewest that allow an estimate.
_MAX_SHAPES, _MIN_SHAPES = 64, 16
# By how much more likely (as a logarithm) waves over some units must make what was measured than no waves at all: of
# so many numbers of units the likeliest is likelier by chance alone (the logarithm of how many is 5).
_CONVINCING = 8.0


def likeliest_units(measured: Mapping[MatmulShape, float], scales: Scales) -> int | None:
    """Compute units, by TFLOPS of shapes; None where none are convincing. Half or twice as many explain as much."""
    best = max(measured.values(), default=0.0)
    fast = sorted((shape for shape in measured if measured[shape] >= _FAST * best), key=measured.__getitem__)
    shapes = fast[-_MAX_SHAPES:]
    if len(shapes) < _MIN_SHAPES:
        return None
    values = np.array([math.log(measured[shape]) for shape in shapes])
    rows = list(range(len(shapes)))
    m, n = np.array([(shape.m, shape.n) for shape in shapes], dtype=float).T
    cut, near = cut_into_tiles(m, n), Nearness(distances(features(shapes, None), rows, rows))

    def likelihood(units: int | None) -> float:
        # All tiles together: a separate effect per tile would take several times as long for this many candidates.
        waves = squared_distances(wave_features(cut, units), rows, rows)[None] / 4
        return log_likelihood(near.with_waves(waves), values, scales)

    found = {units: likelihood(units) for units in _UNITS}
    likeliest = max(found, key=found.__getitem__)
    return likeliest if found[likeliest] > likelihood(None) + _CONVINCING else None
