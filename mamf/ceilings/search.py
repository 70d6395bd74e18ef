"""Finds the best shape of a grid with few measurements. Pure: takes a callable, knows no device and no clock.

A surrogate predicts log TFLOPS of every shape not yet measured and how sure it is of that; the next to measure is the
one with the highest upper confidence bound (Srinivas et al., Gaussian Process Optimization in the Bandit Setting,
2010).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mamf.ceilings.surrogate import Array, Surrogate, features, single_threaded, squared_distances
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape

Measure = Callable[[MatmulShape], float]

_FIRST_SHAPES = 12
_FEWEST_TO_JUDGE = 4
_FEWEST_TO_GIVE_UP = 40
# Shapes that the surrogate predicts; a larger grid is searched by a sample and the leaders' neighbours.
_MOST_CANDIDATES = 8192
_MEASUREMENTS_PER_FIT = 12
# Standard deviations above the mean at which the next shape is chosen, and at which nothing promises more any longer.
_OPTIMISM = 1.5
_DOUBT = 3.0
# A promise of less than this share of the best is none: it is below what a measurement repeats to.
_WORTHWHILE = 0.001
_LEADERS = 8


@dataclass(frozen=True)
class SearchResult:
    """``best``: the shape that measured highest; its figure is biased upwards, so measure it anew. ``measured``: TFLOPS
    by shape in the order measured, NaN where it could not be. ``exhausted``: nothing promising was left.
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

    >>> grid = mamf.MatmulGrid([1024, 2048], [1024], [1024, 4096])
    >>> str(mamf.find_best(lambda shape: shape.k / 4096 + shape.m, grid).best)
    '2048x1024x4096'
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

    def __init__(
        self,
        candidates: Sequence[MatmulShape],
        *,
        compute_units: int | None = None,
        seed: int = 0,
        first: Sequence[MatmulShape] = (),
    ) -> None:
        """``first``: shapes to begin with, before some at random."""
        self.compute_units = compute_units
        self.measured: dict[MatmulShape, float] = {}
        self._random = np.random.default_rng(seed)
        self._surrogate = Surrogate()
        self._rows: list[int] = []
        self._exhausted = False
        self.consider([*candidates, *first])
        order = self._random.permutation(len(candidates))[:_FIRST_SHAPES]
        self._first: list[MatmulShape] = [*first, *(self._candidates[row] for row in order)]

    @single_threaded
    def consider(self, candidates: Sequence[MatmulShape]) -> None:
        """Search among these from now on. Raises ValueError when there are none."""
        if not candidates:
            raise ValueError("the grid is empty")
        self._candidates: list[MatmulShape] = list(dict.fromkeys((*candidates, *self.measured)))
        self._position = {shape: row for row, shape in enumerate(self._candidates)}
        self._hopeless = np.zeros(len(self._candidates), dtype=bool)
        self._surrogate.features = features(self._candidates, self.compute_units)
        if self._surrogate.is_fitted:
            self._refit()

    @single_threaded
    def propose(self) -> MatmulShape | None:
        """The shape to measure next, or None when nothing promising is left."""
        untried = (shape for shape in self._first if shape in self._position and shape not in self.measured)
        first = next(untried, None)
        if first is not None:
            return first
        # From a few figures nothing can be told: neither what varies, nor that nothing is left.
        if not self._surrogate.is_fitted or len(self._rows) < _FEWEST_TO_JUDGE:
            return self._any_left()
        doubtful = self._promise(_DOUBT).max()
        is_sure = len(self.measured) >= _FEWEST_TO_GIVE_UP and doubtful < self._surrogate.highest + _WORTHWHILE
        if is_sure or doubtful == -math.inf:
            self._exhausted = True
            return None
        return self._candidates[int(np.argmax(self._promise(_OPTIMISM)))]

    @single_threaded
    def tell(self, shape: MatmulShape, tflops: float) -> None:
        """What ``shape`` measured; NaN if it could not be."""
        if shape not in self._position:  # what an interrupted run had measured decides, not what this one would
            self.consider([*self._candidates, shape])
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

    def promising(self, count: int, accept: Callable[[MatmulShape], bool]) -> list[MatmulShape]:
        """Candidates and measured shapes of the highest predicted figure among those accepted, best first."""
        if not self._surrogate.is_fitted:
            return []
        order = np.argsort(-self._surrogate.mean)
        best_first = (self._candidates[row] for row in order if not self._hopeless[row])
        return list(itertools.islice((shape for shape in best_first if accept(shape)), count))

    def result(self) -> SearchResult:
        """Raises ValueError when no shape could be measured."""
        leaders = self.leaders(1)
        if not leaders:
            raise ValueError("no shape of the grid could be measured")
        return SearchResult(leaders[0], self.measured, self._exhausted)

    def _any_left(self) -> MatmulShape | None:
        """A random candidate that may be measurable."""
        left = [
            shape
            for shape, is_hopeless in zip(self._candidates, self._hopeless, strict=True)
            if shape not in self.measured and not is_hopeless
        ]
        self._exhausted = not left
        return left[int(self._random.integers(len(left)))] if left else None

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
    if not failed:
        return np.zeros(len(candidates), dtype=bool)
    sizes = np.log2(np.array([(shape.m, shape.n, shape.k) for shape in candidates], dtype=float))
    near_known = np.exp(-2 * squared_distances(sizes, known, None)).sum(axis=0)
    near_failed = np.exp(-2 * squared_distances(sizes, failed, None)).sum(axis=0)
    hopeless = np.asarray(near_failed > 1.5 + near_known)
    hopeless[failed] = True
    return hopeless


def neighbours(shape: MatmulShape, grid: MatmulGrid, reach: int = 2) -> list[MatmulShape]:
    """Shapes of the grid up to ``reach`` steps from ``shape`` in each dimension; also with M and N exchanged."""
    found: dict[MatmulShape, None] = {}
    for m, n in ((shape.m, shape.n), (shape.n, shape.m)):
        near = [
            sorted(axis, key=lambda size, at=at: abs(size - at))[: 2 * reach + 1]  # type: ignore[misc]
            for axis, at in ((grid.m, m), (grid.n, n), (grid.k, shape.k))
        ]
        found |= dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(*near))
    return list(found)
