"""Finds the best shape of a grid with few measurements. Pure: takes a callable, knows no device and no clock.

A Gaussian process over features of the shape (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2006,
chapter 2) predicts log TFLOPS of every shape not yet measured, and how sure it is; the next to measure is the one with
the highest upper confidence bound (Srinivas et al., 2010). What makes matmul hard to search is quantisation: a product
is cut into tiles, and tiles into waves over the compute units, so neighbours differ by more than distant shapes of equal
quantisation. Hence features: sizes, and how full the last wave and the edge tiles are. Nothing is known in advance of a
device but its compute units; the rest is learned from this search's own measurements.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mamf.shapes import MatmulGrid, MatmulShape

Array = NDArray[np.float64]
Measure = Callable[[MatmulShape], float]

# Tiles that libraries commonly cut C into, of either orientation.
_TILES = ((64, 128), (64, 256), (128, 128), (128, 192), (128, 256), (192, 256), (256, 256))
_FIRST_SHAPES = 12
# Shapes that the surrogate predicts; a larger grid is searched by a sample and the leaders' neighbours.
_MOST_CANDIDATES = 8192
_MEASUREMENTS_PER_FIT = 12
_FIT_STEPS = 6
# Standard deviations above the mean at which the next shape is chosen, and at which nothing promises more any longer.
_OPTIMISM = 1.5
_DOUBT = 3.0
# A promise of less than this share of the best is none: it is below what a measurement repeats to.
_WORTHWHILE = 0.001
_LEADERS = 8


@dataclass(frozen=True)
class SearchResult:
    """``best``: the shape that measured highest; its figure is biased upwards, so measure it anew. ``measured``: TFLOPS by shape in the order measured, NaN where it could not be. ``exhausted``:
    nothing promising was left.
    """

    best: MatmulShape
    measured: dict[MatmulShape, float]
    exhausted: bool = False


def find_best(
    measure: Measure,
    grid: MatmulGrid,
    *,
    compute_units: int | None = None,
    max_measurements: int = 100,
    seed: int = 0,
) -> SearchResult:
    """Search ``grid`` for the shape of the highest ``measure(shape)`` (TFLOPS, NaN: cannot be measured).

    Raises ValueError when the grid is empty, ``max_measurements`` is not positive, or no shape could be measured.
    """
    if max_measurements < 1:
        raise ValueError(f"max_measurements is {max_measurements}: at least 1 is needed")
    chooser = random.Random(seed)
    is_large = len(grid) > _MOST_CANDIDATES
    search = Search(candidates_of(grid, chooser), compute_units=compute_units, seed=seed)
    while len(search.measured) < max_measurements:
        shape = search.propose()
        if shape is None:
            break
        search.tell(shape, measure(shape))
        if is_large and len(search.measured) % _MEASUREMENTS_PER_FIT == 0:
            search.consider(candidates_of(grid, chooser, search.leaders(_LEADERS)))
    return search.result()


def candidates_of(grid: MatmulGrid, chooser: random.Random, leaders: Sequence[MatmulShape] = ()) -> list[MatmulShape]:
    """The shapes of a small grid; of a large one the leaders' neighbours and a random sample."""
    if len(grid) <= _MOST_CANDIDATES:
        return grid.shapes()
    near = [shape for leader in leaders for shape in neighbours(leader, grid)]
    drawn = [MatmulShape(*map(chooser.choice, (grid.m, grid.n, grid.k))) for _ in range(_MOST_CANDIDATES - len(near))]
    return list(dict.fromkeys(shape for shape in (*near, *drawn) if grid.accepts(shape)))


class Search:
    """The same, asked shape by shape (``propose`` and ``tell``), for callers that must stop at any moment.

    ``consider`` replaces the candidates and keeps what was learned: how a search goes from a coarse grid to finer steps
    around its leaders.
    """

    def __init__(self, candidates: Sequence[MatmulShape], *, compute_units: int | None = None, seed: int = 0) -> None:
        self.compute_units = compute_units
        self.measured: dict[MatmulShape, float] = {}
        self._random = np.random.default_rng(seed)
        self._surrogate = _Surrogate()
        self._rows: list[int] = []
        self._exhausted = False
        self.consider(candidates)
        order = self._random.permutation(len(self._candidates))[:_FIRST_SHAPES]
        self._first = [self._candidates[row] for row in order]

    def consider(self, candidates: Sequence[MatmulShape]) -> None:
        """Search among these from now on. Raises ValueError when there are none."""
        if not candidates:
            raise ValueError("the grid is empty")
        self._candidates = list(dict.fromkeys((*candidates, *self.measured)))
        self._position = {shape: row for row, shape in enumerate(self._candidates)}
        self._hopeless = np.zeros(len(self._candidates), dtype=bool)
        self._surrogate.features = features(self._candidates, self.compute_units)
        if self._surrogate.is_fitted:
            self._refit()

    def propose(self) -> MatmulShape | None:
        """The shape to measure next, or None when nothing promising is left."""
        untried = next((shape for shape in self._first if shape not in self.measured), None)
        if untried is not None:
            return untried
        if not self._surrogate.is_fitted:
            left = [shape for shape in self._candidates if shape not in self.measured]
            return left[int(self._random.integers(len(left)))] if left else None
        if self._promise(_DOUBT).max() < self._surrogate.highest + _WORTHWHILE:
            self._exhausted = True
            return None
        return self._candidates[int(np.argmax(self._promise(_OPTIMISM)))]

    def tell(self, shape: MatmulShape, tflops: float) -> None:
        """What ``shape`` measured; NaN if it could not be."""
        self.measured[shape] = tflops
        if len(self.measured) < len(self._first) or not self._known():
            return
        is_due = len(self.measured) % _MEASUREMENTS_PER_FIT == 0
        if is_due or not self._surrogate.is_fitted or not tflops > 0:
            self._refit()
        else:
            self._rows.append(self._position[shape])
            self._surrogate.add(self._rows[-1], math.log(tflops))

    def leaders(self, count: int) -> list[MatmulShape]:
        """The shapes that did best, best first: by what they measured and what their like did, half and half, because
        the highest of many noisy figures is too high.
        """
        known = self._known()
        score = {shape: math.log(tflops) for shape, tflops in known.items()}
        if self._surrogate.is_fitted:
            means = self._surrogate.mean[[self._position[shape] for shape in known]]
            score = {shape: (score[shape] + mean) / 2 for shape, mean in zip(known, means, strict=True)}
        return sorted(score, key=score.__getitem__, reverse=True)[:count]

    def result(self) -> SearchResult:
        """Raises ValueError when no shape could be measured."""
        leaders = self.leaders(1)
        if not leaders:
            raise ValueError("no shape of the grid could be measured")
        return SearchResult(leaders[0], self.measured, self._exhausted)

    def _known(self) -> dict[MatmulShape, float]:
        return {shape: tflops for shape, tflops in self.measured.items() if tflops > 0}

    def _promise(self, deviations: float) -> Array:
        """Upper confidence bound of log TFLOPS of every candidate that is still to be measured and may be."""
        bound = self._surrogate.bound(deviations)
        bound[self._rows] = -math.inf
        bound[self._hopeless] = -math.inf
        return bound

    def _refit(self) -> None:
        known = self._known()
        self._rows = [self._position[shape] for shape in known]
        failed = [self._position[shape] for shape in self.measured if shape not in known]
        self._surrogate.fit(self._rows, [math.log(tflops) for tflops in known.values()])
        self._hopeless = among_failures(self._candidates, self._rows, failed)


def among_failures(candidates: Sequence[MatmulShape], known: list[int], failed: list[int]) -> NDArray[np.bool_]:
    """Candidates that failed, or that lie where nearly all that was tried did: two failures and no success nearby.

    A single failure says nothing of its neighbours; a region of them (exhausted memory, an alignment) does.
    """
    sizes = np.log2(np.array([(shape.m, shape.n, shape.k) for shape in candidates], dtype=float))
    near_known = np.exp(-2 * _distances(sizes, known, None)).sum(axis=0)
    near_failed = np.exp(-2 * _distances(sizes, failed, None)).sum(axis=0)
    hopeless = np.asarray(near_failed > 1.5 + near_known)
    hopeless[failed] = True
    return hopeless


def neighbours(shape: MatmulShape, grid: MatmulGrid, reach: int = 2) -> list[MatmulShape]:
    """Shapes of the grid up to ``reach`` steps from ``shape`` in each dimension, and the same with M and N exchanged."""
    found: dict[MatmulShape, None] = {}
    for m, n in ((shape.m, shape.n), (shape.n, shape.m)):
        near = [
            sorted(axis, key=lambda size, at=at: abs(size - at))[: 2 * reach + 1]  # type: ignore[misc]
            for axis, at in ((grid.m, m), (grid.n, n), (grid.k, shape.k))
        ]
        found |= dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(*near))
    return list(found)


@dataclass
class Features:
    """Per shape: ``sizes`` and ``waves`` that do not tell M from N, and ``lean`` that does; each column standardised."""

    sizes: Array
    waves: Array
    lean: Array


def features(shapes: Sequence[MatmulShape], compute_units: int | None) -> Features:
    """Features of S shapes, S x 3, S x (one a tile) and S x 1.

    A wave feature is the share of the compute units' work that reaches C: edge tiles hang over its border, and the last
    wave leaves units idle (known only with ``compute_units``). Of a tile's two orientations the better counts.
    """
    m, n, k = np.array([(shape.m, shape.n, shape.k) for shape in shapes], dtype=float).T
    sizes = np.stack([np.log2(m * n), np.log2(k), np.abs(np.log2(m / n)), np.log2(m * k + k * n + m * n)], axis=1)
    waves = np.stack([np.maximum(_useful(m, n, a, b, compute_units), _useful(m, n, b, a, compute_units)) for a, b in _TILES], axis=1)
    return Features(_standardised(sizes), _standardised(waves), _standardised(np.log2(m / n)[:, None]))


def _useful(m: Array, n: Array, tile_m: int, tile_n: int, compute_units: int | None) -> Array:
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    useful = m * n / (tiles * tile_m * tile_n)
    if compute_units:
        useful = useful * tiles / (np.ceil(tiles / compute_units) * compute_units)
    return np.asarray(useful)


def _standardised(columns: Array) -> Array:
    deviation = columns.std(axis=0)
    return np.asarray((columns - columns.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0))


@dataclass(frozen=True)
class _Scales:
    """Hyperparameters: how far the effect of sizes and of waves reaches (in standard deviations of a feature), the share
    of variance that M against N makes, and that of noise.
    """

    sizes: float = 2.0
    waves: float = 1.5
    lean: float = 0.03
    noise: float = 1e-3

    def nearby(self) -> list[_Scales]:
        """This, and each hyperparameter one step up or down."""
        steps = {"sizes": 2.0, "waves": 2.0, "lean": 3.0, "noise": 10.0}
        bounds = {"sizes": (0.5, 8.0), "waves": (0.4, 6.0), "lean": (0.001, 0.3), "noise": (1e-5, 1e-1)}
        found = [self]
        for name, step in steps.items():
            for value in (getattr(self, name) * step, getattr(self, name) / step):
                if bounds[name][0] <= value <= bounds[name][1]:
                    found.append(replace(self, **{name: value}))
        return found


@dataclass
class _Surrogate:
    """The Gaussian process over a list of candidates, given as ``features``; ``fit`` again when these are replaced.

    Kept so that one more observation costs one row: with K + noise = L L^T over the observed, ``_projected`` is
    L^-1 K(observed, candidates), and mean and variance follow from it without solving anything anew.
    """

    features: Features = field(default_factory=lambda: Features(*(np.zeros((0, 1)),) * 3))
    scales: _Scales = field(default_factory=_Scales)
    is_fitted: bool = False
    highest: float = -math.inf

    def fit(self, rows: Sequence[int], values: Sequence[float]) -> None:
        """Start over from these observations, with the likeliest of the scales near the last."""
        observed = list(rows)
        self.scales = self._likeliest(observed, np.array(values))
        lower = np.linalg.cholesky(self._covariance(observed, observed, self.scales, noisy=True))
        right = np.stack([np.array(values), np.ones(len(values))], axis=1)
        self._projected = np.linalg.solve(lower, self._covariance(observed, None, self.scales))
        self._whitened = np.linalg.solve(lower, right)
        self._values = list(values)
        self._update()

    def add(self, row: int, value: float) -> None:
        """One more observation."""
        column = self._projected[:, row]
        noise = self.scales.noise
        diagonal = math.sqrt(max(self._prior_variance() + noise - column @ column, noise))
        covariance = self._covariance([row], None, self.scales)[0]
        self._projected = np.vstack([self._projected, (covariance - column @ self._projected) / diagonal])
        self._whitened = np.vstack([self._whitened, (np.array([value, 1.0]) - column @ self._whitened) / diagonal])
        self._values.append(value)
        self._update()

    def bound(self, deviations: float) -> Array:
        """Upper confidence bound of log TFLOPS of every candidate."""
        return np.asarray(self.mean + deviations * self.deviation)

    def _update(self) -> None:
        values, ones = self._whitened.T
        centre = (ones @ values) / (ones @ ones)
        residual = values - centre * ones
        scale = residual @ residual / max(len(residual) - 1, 1)
        self.mean = centre + residual @ self._projected
        variance = self._prior_variance() - np.einsum("ij,ij->j", self._projected, self._projected)
        self.deviation = np.sqrt(np.maximum(variance + self.scales.noise, 1e-12) * scale)
        self.highest = max(self._values)
        self.is_fitted = True

    def _likeliest(self, observed: list[int], values: Array) -> _Scales:
        """Uphill from the last scales, a step at a time."""
        best = self.scales
        for _ in range(_FIT_STEPS):
            uphill = max(best.nearby(), key=lambda scales: self._likelihood(observed, values, scales))
            if uphill == best:
                break
            best = uphill
        return best

    def _likelihood(self, observed: list[int], values: Array, scales: _Scales) -> float:
        """Log marginal likelihood with mean and variance at their likeliest, up to a constant."""
        lower = np.linalg.cholesky(self._covariance(observed, observed, scales, noisy=True))
        whitened, ones = np.linalg.solve(lower, np.stack([values, np.ones(len(values))], axis=1)).T
        residual = whitened - (ones @ whitened) / (ones @ ones) * ones
        count = len(values)
        return float(-count / 2 * math.log(max(residual @ residual / count, 1e-300)) - np.log(np.diag(lower)).sum())

    def _prior_variance(self) -> float:
        return 1.0 + self.scales.lean

    def _covariance(self, one: list[int], other: list[int] | None, scales: _Scales, noisy: bool = False) -> Array:
        """Prior covariance of candidates: sizes alone, sizes with waves, and a small part that tells M from N."""
        sizes = _distances(self.features.sizes, one, other) / scales.sizes**2
        waves = _distances(self.features.waves, one, other) / scales.waves**2
        lean = _distances(self.features.lean, one, other)
        together = np.exp(-0.5 * (sizes / 4 + waves))
        covariance = 0.5 * np.exp(-0.5 * sizes) + 0.5 * together + scales.lean * together * np.exp(-2 * lean)
        return covariance + scales.noise * np.eye(len(one)) if noisy else np.asarray(covariance)


def _distances(columns: Array, one: list[int], other: list[int] | None) -> Array:
    """Squared Euclidean distances of rows ``one`` to rows ``other`` (None: all)."""
    left, right = columns[one], columns if other is None else columns[other]
    squared = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None] - 2 * left @ right.T
    return np.maximum(squared, 0.0)
