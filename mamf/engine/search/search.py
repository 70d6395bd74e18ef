"""Find the fastest shape of a grid of matmul shapes with few measurements. The search calls a function to measure a
shape; it uses no device and no clock itself.

A surrogate (a statistical model of the rate) predicts the log TFLOPS of every shape and the uncertainty of each
prediction. The search next measures the shape with the highest expected improvement over the best shape so far, per
second of measuring. With several kernels it chooses shape and kernel together (a *candidate*), and the measurements of
one kernel also improve the predictions for the others.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mamf.engine.search.surrogate import (
    Array,
    Surrogate,
    compute_features,
    compute_squared_distances,
    estimate_compute_units,
    limit_blas_to_one_thread,
)
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape

#: A function that measures a shape and returns its TFLOPS; NaN if the shape cannot be measured.
MeasureShape = Callable[[MatmulShape], float]
#: A shape and the name of a kernel.
Candidate = tuple[MatmulShape, str]

#: The number of random shapes that a search begins with.
FIRST_SHAPE_COUNT = 12
# If a kernel joins the search later, measure it on this number of shapes first.
_FIRST_SHAPE_COUNT_OF_LATER_KERNEL = 4
# The minimum number of successful measurements before predictions choose the next shape.
_MIN_MEASUREMENTS_TO_PREDICT = 4
# The minimum number of measurements before a search ends because no shape is promising.
_MIN_MEASUREMENTS_TO_END = 40
# Stop trying a kernel, unless it is the first one, after this many failures without a success.
_MAX_FAILURE_COUNT_OF_LATER_KERNEL = 3
#: A search begins with some shapes whose K is at most _MAX_SMALL_K and whose C takes at least _MIN_SMALL_K_SHAPE_WAVES
#: waves of tiles. To count the waves, mamf assumes tiles of _COMMON_TILE_ELEMENTS elements. If the device does not
#: report its number of compute units, mamf assumes _ASSUMED_COMPUTE_UNITS.
_MAX_SMALL_K, _MIN_SMALL_K_SHAPE_WAVES, _COMMON_TILE_ELEMENTS, _ASSUMED_COMPUTE_UNITS = 1536, 8, 128 * 256, 128
# The number of shapes with a small K and a large C that a search begins with.
_SMALL_K_SHAPE_COUNT = 2
# The maximum number of shapes whose rates the surrogate predicts. In a larger grid, it predicts only a random sample
# and the neighbors of the fastest shapes so far ("leaders").
_MAX_PREDICTED_SHAPES = 8192
# After this many measurements, fit the hyperparameters of the surrogate again.
_MEASUREMENTS_PER_FIT = 12
# During the first _EARLY_MEASUREMENTS measurements, fit the surrogate again after every _MEASUREMENTS_PER_EARLY_FIT
# measurements, because early measurements change predictions most.
_EARLY_MEASUREMENTS, _MEASUREMENTS_PER_EARLY_FIT = 48, 4
# A shape is promising if its prediction plus this many standard deviations exceeds the best measurement.
_MAX_PROMISING_DEVIATIONS = 6.0
# The part of a measurement's time that does not depend on the shape, as a share of the time for the largest shape.
_FIXED_TIME_SHARE = 0.1
# Ignore predicted gains below this share of the best rate, because repeated measurements differ by about as much.
_MIN_LOG_GAIN = 0.001
_LEADER_COUNT = 8


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the fastest shape of a grid.

    - ``best_shape``: the fastest shape. Its measured rate is biased upward, so measure it again.
    - ``tflops_by_shape``: the TFLOPS of the measured shapes, in the order of measurement; NaN if a shape could not be
      measured.
    - ``is_exhausted``: True if the search ended because it had measured all promising shapes.
    """

    best_shape: MatmulShape
    tflops_by_shape: dict[MatmulShape, float]
    is_exhausted: bool = False


def find_best(
    measure: MeasureShape,
    grid: MatmulGrid,
    *,
    compute_units: int | None = None,
    max_measurements: int = 100,
    seed: int = 0,
) -> SearchResult:
    """Search ``grid`` for the shape with the highest ``measure(shape)``, in TFLOPS (NaN: it cannot be measured).

    Raises ValueError if the grid is empty, ``max_measurements`` is less than 1, or no shape can be measured.

    >>> grid = mamf.MatmulGrid([1024, 2048], [1024], [1024, 4096])
    >>> str(mamf.find_best(lambda shape: shape.k / 4096 + shape.m, grid).best_shape)
    '2048x1024x4096'
    """
    if max_measurements < 1:
        raise ValueError(f"max_measurements is {max_measurements}: it must be at least 1")
    chooser = random.Random(seed)
    shapes = list_shapes_to_predict(grid, chooser)
    search = ShapeSearch(
        shapes,
        compute_units=compute_units,
        seed=seed,
        first_shapes=draw_small_k_shapes(shapes, compute_units, chooser),
    )
    while len(search.measured_tflops) < max_measurements and (proposed := search.propose_candidate()):
        search.record_measurement(proposed, measure(proposed[0]))
        if len(grid) > _MAX_PREDICTED_SHAPES and len(search.measured_tflops) % _MEASUREMENTS_PER_FIT == 0:
            search.set_shapes(
                list_shapes_to_predict(grid, chooser, [shape for shape, _ in search.find_leaders(_LEADER_COUNT)])
            )
    if not (leaders := search.find_leaders(1)):
        raise ValueError("no shape of the grid could be measured: measure() must return TFLOPS above 0 for some shape")
    return SearchResult(
        leaders[0][0],
        {shape: tflops for (shape, _), tflops in search.measured_tflops.items()},
        search.is_exhausted,
    )


def list_shapes_to_predict(
    grid: MatmulGrid, chooser: random.Random, leaders: Sequence[MatmulShape] = ()
) -> list[MatmulShape]:
    """Return the shapes whose rates are predicted. For a small grid, these are all shapes. For a large grid, these are
    the neighbors of ``leaders`` (the fastest shapes so far) and a random sample.
    """
    if len(grid) <= _MAX_PREDICTED_SHAPES:
        return grid.list_shapes()
    nearby_shapes = [shape for leader in leaders for shape in list_neighbors(leader, grid)]
    drawn_shapes = [
        MatmulShape(*map(chooser.choice, (grid.m, grid.n, grid.k)))
        for _ in range(_MAX_PREDICTED_SHAPES - len(nearby_shapes))
    ]
    return list(dict.fromkeys(shape for shape in (*nearby_shapes, *drawn_shapes) if grid.accepts(shape)))


def draw_small_k_shapes(
    shapes: Iterable[MatmulShape], compute_units: int | None, chooser: random.Random
) -> list[MatmulShape]:
    """Draw shapes with a small K, and with a C so large that the compute units need many waves to compute its tiles.
    The fastest shape may be one of these, and a random sample of the grid would miss them because they are few.
    """
    min_size = _MIN_SMALL_K_SHAPE_WAVES * _COMMON_TILE_ELEMENTS * (compute_units or _ASSUMED_COMPUTE_UNITS)
    small_k_shapes = [shape for shape in shapes if shape.k <= _MAX_SMALL_K and shape.m * shape.n >= min_size]
    return chooser.sample(small_k_shapes, min(_SMALL_K_SHAPE_COUNT, len(small_k_shapes)))


class ShapeSearch:
    """A search for the fastest shape that advances by one measurement at a time: the caller calls
    ``propose_candidate``, measures the proposed candidate, and calls ``record_measurement``. The caller may stop at any
    moment.

    ``add_kernel`` adds a kernel, so that the search is over shapes and kernels. ``set_shapes`` replaces the shapes and
    keeps the measurements, for example to continue with finer steps around the fastest shapes of a coarse grid.
    """

    def __init__(
        self,
        shapes: Sequence[MatmulShape],
        kernel: str = "",
        *,
        compute_units: int | None = None,
        seed: int = 0,
        first_shapes: Sequence[MatmulShape] = (),
    ) -> None:
        """Begin a search among ``shapes`` with one kernel. ``first_shapes``: shapes to measure before random ones."""
        self.compute_units = compute_units
        self._must_estimate_units = compute_units is None
        self.measured_tflops: dict[Candidate, float] = {}
        self.kernels = [kernel]
        self._random_generator = np.random.default_rng(seed)
        self._surrogate = Surrogate()
        self._observed_rows: list[int] = []
        #: True if all promising shapes were measured.
        self.is_exhausted = False
        self.set_shapes([*shapes, *first_shapes])
        order = self._random_generator.permutation(len(shapes))[:FIRST_SHAPE_COUNT]
        self._first_candidates: list[Candidate] = [
            *((shape, kernel) for shape in first_shapes),
            *(self._candidates[row] for row in order),
        ]
        self._first_count = len(self._first_candidates)

    @limit_blas_to_one_thread()
    def set_shapes(self, shapes: Sequence[MatmulShape]) -> None:
        """Search among these shapes and the measured ones from now on. Raise ValueError if ``shapes`` is empty."""
        if not shapes:
            raise ValueError("the grid of shapes is empty: give at least one shape")
        self._shapes: list[MatmulShape] = list(dict.fromkeys((*shapes, *(shape for shape, _ in self.measured_tflops))))
        self._candidates: list[Candidate] = [(shape, kernel) for kernel in self.kernels for shape in self._shapes]
        self._row_by_candidate = {candidate: row for row, candidate in enumerate(self._candidates)}
        self._log_sizes = np.log2(np.array([(shape.m, shape.n, shape.k) for shape in self._shapes], dtype=float))
        flop = np.array([shape.flop for shape, _ in self._candidates], dtype=float)
        self._log_seconds = np.log(flop / flop.max() + _FIXED_TIME_SHARE)
        self._hopeless_mask = np.zeros(len(self._candidates), dtype=bool)
        self._surrogate.features = compute_features(self._shapes, self.compute_units, len(self.kernels))
        if self._surrogate.is_fitted:
            self._refit_surrogate()

    def add_kernel(self, kernel: str) -> None:
        """Add a kernel to the search. The search first proposes the kernel on some of the other kernels' fastest
        shapes.
        """
        self._first_candidates += [
            (shape, kernel)
            for shape, _ in self.find_leaders(FIRST_SHAPE_COUNT)[
                :: FIRST_SHAPE_COUNT // _FIRST_SHAPE_COUNT_OF_LATER_KERNEL
            ]
        ]
        self.kernels = list(dict.fromkeys((*self.kernels, kernel)))
        self.set_shapes(self._shapes)

    @limit_blas_to_one_thread()
    def propose_candidate(self) -> Candidate | None:
        """Return the next shape and kernel to measure; None if no unmeasured candidate is likely to be the fastest."""
        first = next(
            (
                candidate
                for candidate in self._first_candidates
                if candidate in self._row_by_candidate and candidate not in self.measured_tflops
            ),
            None,
        )
        if first is not None:
            return first
        # Few measurements cannot show what the rate depends on, or whether a faster shape is left. So draw a random
        # candidate among those that are neither measured yet nor hopeless (near failed ones).
        if not self._surrogate.is_fitted or len(self._observed_rows) < _MIN_MEASUREMENTS_TO_PREDICT:
            untried = [
                candidate
                for candidate, is_hopeless in zip(self._candidates, self._hopeless_mask, strict=True)
                if not is_hopeless and candidate not in self.measured_tflops
            ]
            self.is_exhausted = not untried
            return untried[int(self._random_generator.integers(len(untried)))] if untried else None
        best_optimistic_rate = self._mask_excluded_candidates(
            self._surrogate.mean + _MAX_PROMISING_DEVIATIONS * self._surrogate.deviation
        ).max()
        is_sure = (
            len(self.measured_tflops) >= _MIN_MEASUREMENTS_TO_END
            and best_optimistic_rate < self._surrogate.highest_observed_log_tflops + _MIN_LOG_GAIN
        )
        if is_sure or best_optimistic_rate == -math.inf:
            self.is_exhausted = True
            return None
        log_gain_per_second = self._surrogate.compute_log_improvement() - self._log_seconds
        return self._candidates[int(np.argmax(self._mask_excluded_candidates(log_gain_per_second)))]

    @limit_blas_to_one_thread()
    def record_measurement(self, candidate: Candidate, tflops: float) -> None:
        """Record the measured TFLOPS of a shape and kernel (NaN: it could not be measured), and update predictions."""
        if candidate not in self._row_by_candidate:  # The measurement comes from an interrupted run with other shapes.
            self.kernels = list(dict.fromkeys((*self.kernels, candidate[1])))
            self.set_shapes([*self._shapes, candidate[0]])
        self.measured_tflops[candidate] = tflops
        if len(self.measured_tflops) < self._first_count or not any(each > 0 for each in self.measured_tflops.values()):
            return
        measurements_per_fit = (
            _MEASUREMENTS_PER_EARLY_FIT if len(self.measured_tflops) < _EARLY_MEASUREMENTS else _MEASUREMENTS_PER_FIT
        )
        is_due = (
            len(self.measured_tflops) % measurements_per_fit == 0
            or candidate in self._first_candidates[self._first_count :]
        )
        if is_due or not self._surrogate.is_fitted:
            self._refit_surrogate()
        elif not tflops > 0:  # The measurement failed, so there is no rate to fit.
            self._update_hopeless_mask()
        else:
            self._observed_rows.append(self._row_by_candidate[candidate])
            self._surrogate.add_observation(self._observed_rows[-1], math.log(tflops))

    def find_leaders(self, count: int) -> list[Candidate]:
        """Return the ``count`` fastest shapes, each with its fastest kernel, fastest first. Rank shapes by the mean of
        measurement and prediction, because the highest of many noisy measurements is too high.
        """
        successes = self._select_measured_rates()
        score = {candidate: math.log(tflops) for candidate, tflops in successes.items()}
        if self._surrogate.is_fitted:
            means = self._surrogate.mean[[self._row_by_candidate[candidate] for candidate in successes]]
            compressed = map(self._surrogate.compress_slow_value, score.values())
            score = {
                each: (measured + mean) / 2 for each, measured, mean in zip(successes, compressed, means, strict=True)
            }
        best_candidate_by_shape: dict[MatmulShape, Candidate] = {}
        for candidate in sorted(score, key=score.__getitem__, reverse=True):
            best_candidate_by_shape.setdefault(candidate[0], candidate)
        return list(best_candidate_by_shape.values())[:count]

    def _select_measured_rates(self) -> dict[Candidate, float]:
        return {candidate: tflops for candidate, tflops in self.measured_tflops.items() if tflops > 0}

    def _mask_excluded_candidates(self, candidate_values: Array) -> Array:
        """Set the values of measured candidates, and of candidates near failed ones, to minus infinity.
        ``candidate_values`` has one value per candidate. This method changes the array in place and returns it.
        """
        candidate_values[self._observed_rows] = -math.inf
        candidate_values[self._hopeless_mask] = -math.inf
        return candidate_values

    def _refit_surrogate(self) -> None:
        successes = self._select_measured_rates()
        if self._must_estimate_units:
            first = {shape: tflops for (shape, kernel), tflops in successes.items() if kernel == self.kernels[0]}
            self.compute_units = estimate_compute_units(first, self._surrogate.hyperparameters)
            self._surrogate.features = compute_features(self._shapes, self.compute_units, len(self.kernels))
        self._observed_rows = [self._row_by_candidate[candidate] for candidate in successes]
        self._surrogate.fit_observations(self._observed_rows, [math.log(tflops) for tflops in successes.values()])
        self._update_hopeless_mask()

    def _update_hopeless_mask(self) -> None:
        """Update the mask of the candidates that are hopeless: those near failed shapes of their kernel."""
        masks = []
        for number, kernel in enumerate(self.kernels):
            tflops_by_row = {
                self._row_by_candidate[each] - number * len(self._shapes): tflops
                for each, tflops in self.measured_tflops.items()
                if each[1] == kernel
            }
            successful_rows = [row for row, tflops in tflops_by_row.items() if tflops > 0]
            failed_rows = [row for row, tflops in tflops_by_row.items() if not tflops > 0]
            is_useless = number > 0 and not successful_rows and len(failed_rows) >= _MAX_FAILURE_COUNT_OF_LATER_KERNEL
            masks.append(
                np.ones(len(self._shapes), dtype=bool)
                if is_useless
                else compute_hopeless_mask(self._log_sizes, successful_rows, failed_rows)
            )
        self._hopeless_mask = np.concatenate(masks)


def compute_hopeless_mask(sizes: Array, successful_rows: list[int], failed_rows: list[int]) -> NDArray[np.bool_]:
    """Return an array that is True for hopeless shapes. A shape is hopeless if it failed, or if at least two shapes
    near it failed and hardly any succeeded. One failure says nothing about other shapes, but several failures may have
    a common cause, such as too little memory or sizes that are not aligned.

    ``sizes``: the logarithms of M, N and K, one row per shape. ``successful_rows``, ``failed_rows``: the rows in
    ``sizes`` of the shapes that were measured, and of those that failed.
    """
    if not failed_rows:
        return np.zeros(len(sizes), dtype=bool)
    near_known = np.exp(-2 * compute_squared_distances(sizes, successful_rows, None)).sum(axis=0)
    near_failed = np.exp(-2 * compute_squared_distances(sizes, failed_rows, None)).sum(axis=0)
    hopeless = np.asarray(near_failed > 1.5 + near_known)
    hopeless[failed_rows] = True
    return hopeless


def list_neighbors(shape: MatmulShape, grid: MatmulGrid, reach: int = 2) -> list[MatmulShape]:
    """Return the shapes of a grid whose M, N and K are each about ``reach`` steps or less from those of ``shape``. Also
    return the neighbors of ``shape`` with M and N exchanged.
    """
    neighbors: dict[MatmulShape, None] = {}
    for m, n in ((shape.m, shape.n), (shape.n, shape.m)):
        nearby_sizes = [
            sorted(axis, key=lambda size, at=at: abs(size - at))[: 2 * reach + 1]  # type: ignore[misc]
            for axis, at in ((grid.m, m), (grid.n, n), (grid.k, shape.k))
        ]
        neighbors |= dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(*nearby_sizes))
    return list(neighbors)
