"""Intervals that hold what they say: a repeat, in another visit or another run, in virtual time and by chance."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.ceilings.ceiling import confirmed
from mamf.contribution.best_rules import _WIDEST, _WIDEST_OF_CPU
from mamf.engine.measure import measure
from mamf.measurement import Measurement
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import backend_class
from mamf.regimes import Burst, StoppingRule, Sustained
from mamf.statistics import (
    Repeatability,
    batch_means_interval,
    quartile_range,
    repeat_interval,
    student_t,
    summarize,
    two_levels,
)
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

SHAPE = MatmulShape(3072, 2816, 19328)
LARGE = MatmulShape(6144, 5632, 38656)  # a soak of few launches
KNOWN = Repeatability(visit=0.0010, run=0.0007)
CAPPED = Repeatability(visit=0.0025, run=0.0040)
RESTLESS = replace(Physics(), at_boost=KNOWN, capped=CAPPED, rested_gain=0.0)


def test_students_t_is_that_of_the_tables():
    assert [round(student_t(degrees), 3) for degrees in (1, 2, 4, 9, 30)] == [12.706, 4.303, 2.776, 2.262, 2.042]
    assert student_t(10**5) == pytest.approx(1.960, abs=1e-3)


def test_batch_means_know_that_neighbours_are_alike():
    """Blocks that alternate by threes around 1: their mean is known far better than their scatter says."""
    alternating = [1 + 0.014 * (1 if index // 3 % 2 else -1) for index in range(60)]
    independent = 2 * statistics.stdev(alternating) / len(alternating) ** 0.5
    assert batch_means_interval(alternating).half_width < independent
    drifting = [1 + 0.0005 * index for index in range(60)]
    assert batch_means_interval(drifting).half_width > 2 * statistics.stdev(drifting) / len(drifting) ** 0.5


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_the_mean_lies_in_its_interval(samples):
    interval = batch_means_interval(samples)
    assert interval.low <= statistics.fmean(samples) * (1 + 1e-12)
    assert interval.high >= statistics.fmean(samples) * (1 - 1e-12)


def test_two_levels_are_told_from_scatter():
    chooser = random.Random(0)
    hunting = [chooser.gauss(703 if index // 2 % 2 else 683, 0.5) for index in range(20)]
    low, high = two_levels(hunting)
    assert (low, high) == (pytest.approx(683, abs=1), pytest.approx(703, abs=1))
    assert two_levels([chooser.gauss(700, 7) for _ in range(200)]) is None
    assert two_levels([chooser.uniform(690, 710) for _ in range(200)]) is None
    assert two_levels([685.0, 695.0, 705.0, 715.0] * 5) is None, "evenly spread"
    assert two_levels([700.0, 704.0] * 10) is None, "too near to be told apart"
    assert two_levels([700.0] * 19 + [720.0]) is None, "an outlier is no level"
    assert two_levels([700.0, 720.0] * 4) is None, "too few to tell"


@pytest.mark.parametrize("visits", [1, 3, 9])
@pytest.mark.parametrize("of_median", [False, True])
def test_repeat_intervals_cover_the_truth(visits, of_median):
    chooser = random.Random(visits)
    held = 0
    for _ in range(4000):
        run = chooser.gauss(0, KNOWN.run)
        figures = [1 + run + chooser.gauss(0, KNOWN.visit) + chooser.gauss(0, 0.0005) for _ in range(visits)]
        middle = statistics.median(figures) if of_median else statistics.fmean(figures)
        interval = repeat_interval(figures, middle, [0.0005] * visits, KNOWN, of_median)
        held += interval.low <= 1 <= interval.high
    assert 0.94 <= held / 4000 <= 0.98


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm", "xpu", "hpu", "mps"])
def test_a_calibration_alone_keeps_no_log_out(name):
    """What a single visit of a quiet device must be known to for results/."""
    kind = backend_class(name)
    for traits in (kind.burst_traits, kind.sustained_traits):
        half_width = repeat_interval([1.0], 1.0, [0.001], traits.repeatability).half_width
        assert half_width < 0.8 * (_WIDEST_OF_CPU if name == "cpu" else _WIDEST)


def test_what_lies_between_runs_does_not_shrink_with_the_number_of_visits():
    quiet = Repeatability(visit=1e-6, run=0.01)
    few, many = (repeat_interval([1.0] * count, 1.0, [0.0] * count, quiet).half_width for count in (2, 50))
    assert many == pytest.approx(few, rel=0.1)


def rows_of_runs(kind, count, physics=RESTLESS, seed=0, shape=SHAPE, **options):
    """A row from each of so many runs, on one device that is warm throughout."""
    backend = SimulatedBackend(physics=physics, seed=seed)
    regime = kind(backend, **options)
    regime.start()
    pool = backend.operand_pool("normal", 0)
    for _ in range(count):
        backend.begin_run()
        rule = StoppingRule(seconds=regime.default_seconds)
        yield measure(SimulatedMatmul(), MatmulProblem(), shape, regime, pool, rule)


def row_of(kind, **options):
    return next(rows_of_runs(kind, 1, **options))


def rate(clock_hz, shape=SHAPE):
    return SimulatedBackend()._flop_per_cycle(shape) * clock_hz / 1e12


def coverage(rows, expected):
    return sum(row.rate_interval.low <= expected <= row.rate_interval.high for row in rows) / len(rows)


def test_burst_intervals_cover_the_truth_over_2000_runs():
    rows = list(rows_of_runs(Burst, 2000))
    assert 0.94 <= coverage(rows, rate(Physics().boost_hz)) <= 0.98
    assert statistics.median(row.relative_half_width for row in rows) <= 0.005


def test_sustained_intervals_cover_the_truth():
    hot = Physics().capped_hz * (1 - Physics().thermal_drift)
    rows = list(rows_of_runs(Sustained, 300, shape=LARGE, visit_seconds=0.5))
    assert 0.94 <= coverage(rows, rate(hot, LARGE)) <= 0.99


def test_a_device_that_hunts_is_known_by_its_mean_and_says_so():
    physics = replace(RESTLESS, hunting=0.03, capped=None)
    row = row_of(Sustained, physics=physics)
    hot = Physics().capped_hz * (1 - Physics().thermal_drift)
    assert row.tflops("mean") == pytest.approx(rate(hot), rel=0.002)
    assert row.best_rate == row.tflops("mean")
    assert any("alternated between" in remark for remark in row.remarks)
    assert row.rate_interval.low <= rate(hot) <= row.rate_interval.high


def test_all_blocks_of_a_visit_hold_equally_many_launches():
    row = row_of(Sustained)
    assert row.launches % len(row.samples) == 0


def test_a_row_without_calibration_keeps_the_interval_of_its_visit():
    row = row_of(Burst)
    early = replace(row, repeatability=None)
    assert early.interval == summarize(row.samples).interval
    assert row.interval.half_width > early.interval.half_width


# -- the winner's curse ----------------------------------------------------------------------------------------------


def rounds_of(phase, true, count, chooser, shape):
    """Rows of a candidate whose rounds scatter around ``true`` TFLOPS as KNOWN says."""
    for number in range(1, count + 1):
        samples = (shape.flop / (true * (1 + chooser.gauss(0, KNOWN.visit))) / 1e12,) * 6
        yield Measurement(
            shape, "k", MatmulProblem(), "burst", "median", "ok", "", summarize(samples), samples,
            launches=6, phase=phase, round=number, repeatability=KNOWN,
        )  # fmt: skip


def test_held_out_rounds_take_the_winners_curse_off():
    """Eight candidates that are truly alike: the best of the rounds that choose reads too high."""
    chooser = random.Random(0)
    shapes = [MatmulShape(4096, 4096, 128 * number) for number in range(1, 9)]
    of_choice, of_ceiling = [], []
    for _ in range(200):
        choosing = [row for shape in shapes for row in rounds_of("choose", 800.0, 6, chooser, shape)]
        fresh = [row for shape in shapes for row in rounds_of("confirm", 800.0, 9, chooser, shape)]
        ceiling = confirmed([*choosing, *fresh], "card")
        chosen = [row.best_rate for row in choosing if row.shape == ceiling.shape]
        of_choice.append(statistics.median(chosen) / 800 - 1)
        of_ceiling.append(ceiling.tflops / 800 - 1)
    assert statistics.fmean(of_choice) > 0.0005, "nothing to take off: the test could not fail"
    assert abs(statistics.fmean(of_ceiling)) < 0.0001


def test_a_ceiling_of_an_early_log_is_the_median_of_the_rounds_that_chose_it():
    chooser = random.Random(1)
    rows = [replace(row, repeatability=None) for row in rounds_of("confirm", 800.0, 9, chooser, SHAPE)]
    ceiling = confirmed(rows, "card")
    assert ceiling.tflops == statistics.median(row.best_rate for row in rows)
    assert ceiling.repeatability is None


def test_a_sustained_ceiling_is_all_work_over_all_time():
    chooser = random.Random(2)
    rows = [
        replace(row, regime="sustained", best_by="mean", launches=launches)
        for row, launches in zip(rounds_of("confirm", 700.0, 3, chooser, SHAPE), (100, 200, 700), strict=True)
    ]
    seconds = sum(row.launches * row.summary.mean for row in rows)
    choosing = [replace(row, phase="choose") for row in rows]
    assert confirmed([*choosing, *rows], "card").tflops == pytest.approx(1000 * SHAPE.flop / seconds / 1e12)


def test_visits_that_scatter_more_than_calibrated_are_not_held_to_the_calibration():
    """A device that borrows another's calibration may be noisier, and where visits are whole only they tell."""
    whole, visits = Repeatability(visit=0.006, run=0.0, is_whole=True), [0.97, 1.0, 1.03]
    scattered = repeat_interval(visits, 1.0, [0.0] * 3, whole)
    assert scattered.half_width == pytest.approx(student_t(18) * 0.03 / math.sqrt(3))
    quiet = repeat_interval([0.999, 1.0, 1.001], 1.0, [0.02] * 3, whole)
    assert quiet.half_width < 0.01


@pytest.mark.parametrize(("noise", "is_scattered"), [(0.003, False), (0.03, True)])
def test_what_scatters_within_a_visit_is_not_known_between_runs(noise, is_scattered):
    backend = SimulatedBackend(physics=replace(Physics(), noise=noise))
    regime, traits = Burst(backend), backend.burst_traits
    regime.start()
    pool = backend.operand_pool("normal", 0)
    row = measure(SimulatedMatmul(), MatmulProblem(), SHAPE, regime, pool, StoppingRule(seconds=1.0))
    assert (quartile_range(row.samples) > traits.scattered) == is_scattered
    assert row.repeatability.run == (traits.scattered_run if is_scattered else traits.repeatability.run)
    assert (row.relative_half_width > 2 * traits.scattered_run) == is_scattered
    rounds = [replace(row, phase="confirm", round=number) for number in (1, 2, 3)]
    rounds[0] = replace(rounds[0], repeatability=traits.repeatability)
    assert confirmed(rounds, "card").repeatability == row.repeatability
    rounds[1] = replace(rounds[1], repeatability=traits.repeatability)
    assert confirmed(rounds, "card").repeatability == traits.repeatability, "one round's hiccup"


def test_of_few_samples_no_quartiles_are_told():
    assert quartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 0.0
    assert quartile_range([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx(1.0)
