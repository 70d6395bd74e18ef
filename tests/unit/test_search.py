"""Test the search for the fastest shape on landscapes (rates by shape) with a known best shape.

The landscapes are of chips that the search was not tuned on. Some have noise or shapes that cannot be measured.
"""

import contextlib
import functools
import math
import random
import statistics
from collections import Counter

import pytest
from bench_search import BEST_ELSEWHERE, CHIPS, simulate_landscape
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.engine.search.search import FIRST_SHAPE_COUNT, ShapeSearch, find_best
from mamf.engine.search.surrogate import Hyperparameters, estimate_compute_units
from mamf.operations.matmul.shapes import MatmulGrid

SIZES = range(1024, 13312, 1024)
GRID = MatmulGrid(SIZES, SIZES, SIZES)
H100 = CHIPS["132 units"]


@functools.cache
def make_landscape(name="132 units"):
    return simulate_landscape(CHIPS[name], GRID.list_shapes())


def search_landscape(truth, grid=GRID, noise=0.0, measurements=100, units=132, seed=0):
    """Search ``truth``, the TFLOPS by shape. Shapes that ``truth`` does not contain cannot be measured."""
    chooser = random.Random(seed)

    def measure(shape):
        return truth.get(shape, math.nan) * chooser.gauss(1.0, noise)

    return find_best(measure, grid, compute_units=units, max_measurements=measurements, seed=seed)


def compute_reached_share(result, truth):
    """Return the true rate of the best measured shape, as a share of the best rate in the landscape."""
    return max(truth.get(shape, 0.0) for shape in result.tflops_by_shape) / max(truth.values())


# -- number of measurements --------------------------------------------------------------------------------------------


class BestFound(Exception):
    pass


def count_needed_measurements(chip, seed, noise):
    """Return how many measurements a search needs to get within 0.5 % and within 0.1 % of the best rate.

    A number is infinite if 200 measurements are too few.
    """
    truth = make_landscape(chip)
    shares, best = [], max(truth.values())
    chooser = random.Random(seed)

    def measure(shape):
        shares.append(truth[shape] / best)
        if shares[-1] >= 0.999:
            raise BestFound
        return truth[shape] * chooser.gauss(1.0, noise)

    with contextlib.suppress(BestFound):
        find_best(measure, GRID, compute_units=CHIPS[chip].compute_units, max_measurements=200, seed=seed)
    return [
        next((count for count, share in enumerate(shares, 1) if share >= min_share), math.inf)
        for min_share in (0.995, 0.999)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.003])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_best_is_found_on_chips_it_was_not_tuned_on_in_spite_of_noise(chip, noise):
    close, closest = zip(*(count_needed_measurements(chip, seed, noise) for seed in range(3)), strict=True)
    assert statistics.median(closest) <= 100
    assert max(close) <= 200


def test_unknown_compute_units_cost_little():
    truth = make_landscape()
    results = [search_landscape(truth, units=None, seed=seed, measurements=60) for seed in range(3)]
    assert statistics.median(compute_reached_share(result, truth) for result in results) >= 0.995


@pytest.mark.parametrize("name", ["132 units", "108 units"])
def test_the_period_of_waves_is_learned_from_what_was_measured(name):
    truth, units = make_landscape(name), CHIPS[name].compute_units
    fast = sorted(truth, key=truth.get)[-600:]
    measured = {shape: truth[shape] for shape in random.Random(0).sample(fast, 50)}
    # Half or twice the number of units explains the rates equally well.
    assert estimate_compute_units(measured, Hyperparameters()) in (units // 2, units, 2 * units)


def test_rates_without_waves_give_no_number_of_units():
    chooser = random.Random(0)
    flat = {shape: chooser.gauss(500, 1) for shape in chooser.sample(GRID.list_shapes(), 50)}
    assert estimate_compute_units(flat, Hyperparameters()) is None
    assert estimate_compute_units({}, Hyperparameters()) is None


# -- shapes that cannot be measured ------------------------------------------------------------------------------------

IS_MEASURABLE = {
    "no memory": lambda shape: sum(shape.element_counts.values()) < 1.2e8,
    "alignment": lambda shape: shape.k % 2048 == 0,
    "here and there": lambda shape: random.Random(str(shape)).random() > 0.3,
}


@pytest.mark.parametrize("region", IS_MEASURABLE)
def test_regions_that_cannot_be_measured_are_avoided(region):
    truth = {shape: tflops for shape, tflops in make_landscape().items() if IS_MEASURABLE[region](shape)}
    results = [search_landscape(truth, seed=seed, measurements=90) for seed in range(5)]
    assert statistics.median(compute_reached_share(result, truth) for result in results) >= 0.999
    for result in results:
        assert math.isnan(sum(result.tflops_by_shape.values()))
        assert result.best_shape in truth


def test_a_search_without_measurable_shapes_raises_an_error():
    with pytest.raises(ValueError, match="no shape of the grid could be measured"):
        search_landscape({}, measurements=30)


# -- grids -----------------------------------------------------------------------------------------------------------


def test_a_grid_larger_than_the_candidates_is_searched_by_sampling():
    sizes = range(512, 11264, 512)
    grid = MatmulGrid(sizes, sizes, sizes, most_flop=2e12)
    assert len(grid) > 8192
    truth = simulate_landscape(H100, grid.list_shapes())
    result = search_landscape(truth, grid, measurements=50)
    assert compute_reached_share(result, truth) >= 0.995
    assert all(grid.accepts(shape) for shape in result.tflops_by_shape)


# -- end of a search ---------------------------------------------------------------------------------------------------


def test_a_search_ends_when_no_shape_promises_a_higher_rate():
    flat = dict.fromkeys(GRID.list_shapes(), 500.0)
    result = search_landscape(flat, measurements=200)
    assert result.is_exhausted
    assert len(result.tflops_by_shape) < 50


# -- properties ------------------------------------------------------------------------------------------------------

axis = st.lists(st.integers(16, 20480), min_size=1, max_size=4, unique=True)


@settings(max_examples=40)
@given(axis, axis, axis, st.integers(0, 99), st.floats(0.1, 1.0), st.randoms(use_true_random=False))
def test_whatever_the_landscape_each_shape_of_the_grid_is_measured_at_most_once(m, n, k, seed, share, chooser):
    grid = MatmulGrid(m, n, k)
    truth = {shape: chooser.uniform(1, 1000) if chooser.random() < share else math.nan for shape in grid.list_shapes()}
    measured_shapes = []

    def measure(shape):
        measured_shapes.append(shape)
        return truth[shape]

    try:
        result = find_best(measure, grid, compute_units=chooser.choice([None, 7, 132]), max_measurements=30, seed=seed)
    except ValueError:
        assert all(math.isnan(truth[shape]) for shape in measured_shapes)
        return
    assert len(measured_shapes) == len(set(measured_shapes)) <= 30
    assert list(result.tflops_by_shape) == measured_shapes
    assert truth[result.best_shape] > 0


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_decides_everything(seed):
    first, again = (
        list(search_landscape(make_landscape(), measurements=30, seed=seed).tflops_by_shape) for _ in range(2)
    )
    other = list(search_landscape(make_landscape(), measurements=30, seed=seed + 1).tflops_by_shape)
    assert first == again != other


# -- searches with several kernels -------------------------------------------------------------------------------------


def search_with_kernels(landscapes, seed=0, noise=0.002, max_measurements=150):
    """Search with several kernels until a rate is within 0.1 % of the best, for at most ``max_measurements``.

    ``landscapes``: the TFLOPS by shape, for each kernel. Return the kernel of each measurement.
    """
    best, chooser = max(max(truth.values(), default=0.0) for truth in landscapes.values()), random.Random(seed)
    first, *others = landscapes
    search, kernels = ShapeSearch(GRID.list_shapes(), first, compute_units=132, seed=seed), []
    for _ in range(max_measurements):
        shape, kernel = search.propose_candidate()
        tflops = landscapes[kernel].get(shape, math.nan)
        kernels.append(kernel)
        if tflops >= 0.999 * best:
            break
        search.record_measurement((shape, kernel), tflops * chooser.gauss(1.0, noise))
        if len(kernels) == FIRST_SHAPE_COUNT:
            for other in others:
                search.add_kernel(other)
    return kernels


@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_is_best_elsewhere_is_found(seed):
    default, specialist = make_landscape(), simulate_landscape(BEST_ELSEWHERE, GRID.list_shapes(), seed=1)
    best_shape_of_default = max(default, key=default.get)
    assert specialist[best_shape_of_default] < default[best_shape_of_default]
    assert max(specialist.values()) > 1.005 * max(default.values())
    kernels = search_with_kernels({"default": default, "specialist": specialist}, seed)
    assert len(kernels) < 150
    assert kernels[-1] == "specialist"


def test_slower_kernels_cost_few_measurements():
    slower = {shape: 0.92 * tflops for shape, tflops in make_landscape().items()}
    kernels_without_slower = search_with_kernels({"default": make_landscape()})
    kernels_with_slower = search_with_kernels({"default": make_landscape(), "slower": slower})
    assert len(kernels_with_slower) <= len(kernels_without_slower) + 12
    assert Counter(kernels_with_slower)["slower"] <= 6


def test_a_kernel_that_cannot_run_any_shape_is_soon_dropped():
    kernels = search_with_kernels({"default": make_landscape(), "broken": {}}, max_measurements=40)
    assert 1 <= Counter(kernels)["broken"] <= 4
