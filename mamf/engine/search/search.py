"""Finds the best shape of a grid with few measurements. Pure: it calls a function and knows no device and no clock.

A surrogate predicts the log TFLOPS of every shape and the uncertainty of each prediction. The search measures next the
shape with the highest expected improvement over the best so far per second of measuring. With several kernels it
chooses shape and kernel together, and each kernel learns from the others' measurements.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mamf.engine.search.shape_features import Array, compute_features, compute_squared_distances
from mamf.engine.search.surrogate import Surrogate, estimate_compute_units, limit_to_one_thread
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape

Measure = Callable[[MatmulShape], float]
Candidate = tuple[MatmulShape, str]

#: Random shapes that a search always begins with.
FIRST_SHAPES = 12
# Shapes on which a kernel that joins later is measured first.
_FIRST_SHAPES_OF_LATER_KERNELS = 4
_MIN_TO_JUDGE = 4
_MIN_TO_GIVE_UP = 40
# A kernel other than the first is not tried again after this many failures without a success.
_HOPELESS_FAILURES = 3
#: The maximum K of a short shape, the minimum number of its waves, the elements of a common tile, and the assumed
#: number of compute units of a device that does not report it.
_SHORT_K, _MANY_WAVES, _TILE, _COMPUTE_UNITS = 1536, 8, 128 * 256, 128
# Shapes with a short K and many waves that a search begins with.
_SHORT_SHAPES = 2
# The most shapes that the surrogate predicts. In a larger grid it predicts a sample and the neighbors of the leaders.
_MAX_CANDIDATES = 8192
_MEASUREMENTS_PER_FIT = 12
# Fit more often at first, because the first measurements change the predictions most.
_EARLY_MEASUREMENTS, _MEASUREMENTS_PER_EARLY_FIT = 48, 4
# The search ends if no shape's prediction plus this many standard deviations exceeds the best.
_DOUBT_DEVIATIONS = 6.0
# The overhead of a measurement, as a share of the time of the largest shape.
_OVERHEAD = 0.1
# Predicted gains below this share of the best are ignored: measurements do not repeat that well.
_MIN_GAIN = 0.001
_LEADERS = 8


@dataclass(frozen=True)
class SearchResult:
    """The result of ``find_best``.

    - ``best``: the best shape. Its measured rate is biased upward, so measure it again.
    - ``measured``: TFLOPS by shape, in the order of measurement; NaN if a shape could not be measured.
    - ``exhausted``: whether the search ended because it had measured all promising shapes.
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
    """Search ``grid`` for the shape with the highest ``measure(shape)``, in TFLOPS (NaN: it cannot be measured).

    Raises ValueError if the grid is empty, ``max_measurements`` is less than 1, or no shape can be measured.

    >>> grid = mamf.MatmulGrid([1024, 2048], [1024], [1024, 4096])
    >>> str(mamf.find_best(lambda shape: shape.k / 4096 + shape.m, grid).best)
    '2048x1024x4096'
    """
    if max_measurements < 1:
        raise ValueError(f"max_measurements is {max_measurements}: it must be at least 1")
    chooser = random.Random(seed)
    is_large = len(grid) > _MAX_CANDIDATES
    shapes = list_candidates(grid, chooser)
    first = draw_short_shapes(shapes, compute_units, chooser)
    search = Search(shapes, compute_units=compute_units, seed=seed, first=first)
    while len(search.measured) < max_measurements:
        proposed = search.propose()
        if proposed is None:
            break
        search.record(proposed, measure(proposed[0]))
        if is_large and len(search.measured) % _MEASUREMENTS_PER_FIT == 0:
            search.set_shapes(list_candidates(grid, chooser, [shape for shape, _ in search.find_leaders(_LEADERS)]))
    return search.make_result()


def list_candidates(grid: MatmulGrid, chooser: random.Random, leaders: Sequence[MatmulShape] = ()) -> list[MatmulShape]:
    """Return all shapes of a small grid; for a large one, the neighbors of the leaders and a random sample."""
    if len(grid) <= _MAX_CANDIDATES:
        return grid.shapes()
    near = [shape for leader in leaders for shape in list_neighbors(leader, grid)]
    drawn = [MatmulShape(*map(chooser.choice, (grid.m, grid.n, grid.k))) for _ in range(_MAX_CANDIDATES - len(near))]
    return list(dict.fromkeys(shape for shape in (*near, *drawn) if grid.accepts(shape)))


def draw_short_shapes(
    shapes: Iterable[MatmulShape], compute_units: int | None, chooser: random.Random
) -> list[MatmulShape]:
    """Draw shapes with a short K and so large a C that its tiles take many waves. The best shape may be one of them,
    and a random sample would miss them because they are few.
    """
    min_size = _MANY_WAVES * _TILE * (compute_units or _COMPUTE_UNITS)
    short = [shape for shape in shapes if shape.k <= _SHORT_K and shape.m * shape.n >= min_size]
    return chooser.sample(short, min(_SHORT_SHAPES, len(short)))


class Search:
    """A search that advances by one measurement at a time: call ``propose``, measure, then ``record``. The caller may
    stop at any moment.

    ``add_kernel`` adds a kernel; from then on the search is over shapes and ``kernels``. ``set_shapes`` replaces the
    shapes and keeps what was learned, for example to continue on finer steps around the leaders of a coarse grid.
    """

    def __init__(
        self,
        shapes: Sequence[MatmulShape],
        kernel: str = "",
        *,
        compute_units: int | None = None,
        seed: int = 0,
        first: Sequence[MatmulShape] = (),
    ) -> None:
        """``first``: shapes to measure first, before random ones."""
        self.compute_units = compute_units
        self._learns_units = compute_units is None
        self.measured: dict[Candidate, float] = {}
        self.kernels = [kernel]
        self._random = np.random.default_rng(seed)
        self._surrogate = Surrogate()
        self._rows: list[int] = []
        self._exhausted = False
        self.set_shapes([*shapes, *first])
        order = self._random.permutation(len(shapes))[:FIRST_SHAPES]
        self._first: list[Candidate] = [
            *((shape, kernel) for shape in first),
            *(self._candidates[row] for row in order),
        ]
        self._scouts = len(self._first)

    @limit_to_one_thread
    def set_shapes(self, shapes: Sequence[MatmulShape]) -> None:
        """Search among these shapes from now on. Raises ValueError if there are none."""
        if not shapes:
            raise ValueError("the grid is empty")
        self._shapes: list[MatmulShape] = list(dict.fromkeys((*shapes, *(shape for shape, _ in self.measured))))
        self._candidates: list[Candidate] = [(shape, kernel) for kernel in self.kernels for shape in self._shapes]
        self._position = {candidate: row for row, candidate in enumerate(self._candidates)}
        self._logarithms = np.log2(np.array([(shape.m, shape.n, shape.k) for shape in self._shapes], dtype=float))
        flop = np.array([shape.flop for shape, _ in self._candidates], dtype=float)
        self._log_seconds = np.log(flop / flop.max() + _OVERHEAD)
        self._hopeless = np.zeros(len(self._candidates), dtype=bool)
        self._update_features()
        if self._surrogate.is_fitted:
            self._refit_surrogate()

    def add_kernel(self, kernel: str) -> None:
        """Search with this kernel too from now on, first on a spread of the other kernels' best shapes."""
        self._first += [
            (shape, kernel)
            for shape, _ in self.find_leaders(FIRST_SHAPES)[:: FIRST_SHAPES // _FIRST_SHAPES_OF_LATER_KERNELS]
        ]
        self.kernels = list(dict.fromkeys((*self.kernels, kernel)))
        self.set_shapes(self._shapes)

    @limit_to_one_thread
    def propose(self) -> Candidate | None:
        """Return the next candidate to measure, or None if none is promising."""
        first = next((each for each in self._first if each in self._position and each not in self.measured), None)
        if first is not None:
            return first
        # With only a few measurements, the surrogate cannot tell what the rate depends on, or that no better shape is
        # left.
        if not self._surrogate.is_fitted or len(self._rows) < _MIN_TO_JUDGE:
            return self._draw_unmeasured_candidate()
        doubtful = self._mask_tried(self._surrogate.compute_upper_bound(_DOUBT_DEVIATIONS)).max()
        is_sure = len(self.measured) >= _MIN_TO_GIVE_UP and doubtful < self._surrogate.highest + _MIN_GAIN
        if is_sure or doubtful == -math.inf:
            self._exhausted = True
            return None
        gain = self._surrogate.compute_log_improvement() - self._log_seconds
        return self._candidates[int(np.argmax(self._mask_tried(gain)))]

    @limit_to_one_thread
    def record(self, candidate: Candidate, tflops: float) -> None:
        """Record the TFLOPS of ``candidate``; NaN if it could not be measured."""
        if candidate not in self._position:  # the row comes from an interrupted run
            self.kernels = list(dict.fromkeys((*self.kernels, candidate[1])))
            self.set_shapes([*self._shapes, candidate[0]])
        self.measured[candidate] = tflops
        if len(self.measured) < self._scouts or not any(each > 0 for each in self.measured.values()):
            return
        is_early = len(self.measured) < _EARLY_MEASUREMENTS
        often = _MEASUREMENTS_PER_EARLY_FIT if is_early else _MEASUREMENTS_PER_FIT
        is_due = len(self.measured) % often == 0 or candidate in self._first[self._scouts :]
        if is_due or not self._surrogate.is_fitted:
            self._refit_surrogate()
        elif not tflops > 0:  # nothing to fit
            self._update_hopeless_mask()
        else:
            self._rows.append(self._position[candidate])
            self._surrogate.add(self._rows[-1], math.log(tflops))

    def find_leaders(self, count: int) -> list[Candidate]:
        """Return the best shapes, each with its best kernel, best first. The score is the mean of measurement and
        prediction, because the highest of many noisy measurements is too high.
        """
        known = self._select_successes()
        score = {candidate: math.log(tflops) for candidate, tflops in known.items()}
        if self._surrogate.is_fitted:
            means = self._surrogate.mean[[self._position[candidate] for candidate in known]]
            warped = map(self._surrogate.warp, score.values())
            score = {each: (own + mean) / 2 for each, own, mean in zip(known, warped, means, strict=True)}
        best: dict[MatmulShape, Candidate] = {}
        for candidate in sorted(score, key=score.__getitem__, reverse=True):
            best.setdefault(candidate[0], candidate)
        return list(best.values())[:count]

    def make_result(self) -> SearchResult:
        """Return the result of a search with one kernel. Raises ValueError if no shape could be measured."""
        leaders = self.find_leaders(1)
        if not leaders:
            raise ValueError("no shape of the grid could be measured")
        measured = {shape: tflops for (shape, _), tflops in self.measured.items()}
        return SearchResult(leaders[0][0], measured, self._exhausted)

    def _draw_unmeasured_candidate(self) -> Candidate | None:
        """Return a random candidate that is not measured yet and not hopeless."""
        left = [
            candidate
            for candidate, is_hopeless in zip(self._candidates, self._hopeless, strict=True)
            if not is_hopeless and candidate not in self.measured
        ]
        self._exhausted = not left
        return left[int(self._random.integers(len(left)))] if left else None

    def _select_successes(self) -> dict[Candidate, float]:
        return {candidate: tflops for candidate, tflops in self.measured.items() if tflops > 0}

    def _mask_tried(self, worth: Array) -> Array:
        """Set the worth of candidates that were measured or are hopeless to minus infinity, in place."""
        worth[self._rows] = -math.inf
        worth[self._hopeless] = -math.inf
        return worth

    def _update_features(self) -> None:
        self._surrogate.features = compute_features(self._shapes, self.compute_units).repeat_for_kernels(
            len(self.kernels)
        )

    def _refit_surrogate(self) -> None:
        known = self._select_successes()
        if self._learns_units:
            first = {shape: tflops for (shape, kernel), tflops in known.items() if kernel == self.kernels[0]}
            self.compute_units = estimate_compute_units(first, self._surrogate.scales)
            self._update_features()
        self._rows = [self._position[candidate] for candidate in known]
        self._surrogate.fit(self._rows, [math.log(tflops) for tflops in known.values()])
        self._update_hopeless_mask()

    def _update_hopeless_mask(self) -> None:
        self._hopeless = np.concatenate([self._find_hopeless_shapes(number) for number in range(len(self.kernels))])

    def _find_hopeless_shapes(self, number: int) -> NDArray[np.bool_]:
        """Return which shapes are hopeless with the kernel of this number, as a mask over shapes."""
        kernel, before = self.kernels[number], number * len(self._shapes)
        own = [
            (self._position[each] - before, tflops > 0) for each, tflops in self.measured.items() if each[1] == kernel
        ]
        known = [row for row, is_known in own if is_known]
        failed = [row for row, is_known in own if not is_known]
        if number and not known and len(failed) >= _HOPELESS_FAILURES:
            return np.ones(len(self._shapes), dtype=bool)
        return find_hopeless_candidates(self._logarithms, known, failed)


def find_hopeless_candidates(sizes: Array, known: list[int], failed: list[int]) -> NDArray[np.bool_]:
    """Return a mask of the candidates that failed, or have at least two failures and hardly any success nearby.

    A single failure says nothing about its neighbors, but a region of failures does (memory, alignment). ``sizes``: the
    logarithms of M, N and K, one row per candidate.
    """
    if not failed:
        return np.zeros(len(sizes), dtype=bool)
    near_known = np.exp(-2 * compute_squared_distances(sizes, known, None)).sum(axis=0)
    near_failed = np.exp(-2 * compute_squared_distances(sizes, failed, None)).sum(axis=0)
    hopeless = np.asarray(near_failed > 1.5 + near_known)
    hopeless[failed] = True
    return hopeless


def list_neighbors(shape: MatmulShape, grid: MatmulGrid, reach: int = 2) -> list[MatmulShape]:
    """Return the grid's shapes up to ``reach`` steps from ``shape`` in each dimension, also with M and N exchanged."""
    found: dict[MatmulShape, None] = {}
    for m, n in ((shape.m, shape.n), (shape.n, shape.m)):
        near = [
            sorted(axis, key=lambda size, at=at: abs(size - at))[: 2 * reach + 1]  # type: ignore[misc]
            for axis, at in ((grid.m, m), (grid.n, n), (grid.k, shape.k))
        ]
        found |= dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(*near))
    return list(found)
