"""Test that repeat intervals contain the figure of one more run with a probability of 95 %, for random numbers and for
runs in virtual time. Also test the statistics that the intervals use.
"""

import itertools
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamf.calibration import look_up_repeatability
from mamf.ceilings.ceiling import find_confirmed_ceiling
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule, SustainedRegime
from mamf.logs.records import make_measurement_record, read_measurement_record
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.statistics import (
    Interval,
    Repeatability,
    compute_batch_means_interval,
    compute_repeat_interval,
    compute_student_t_quantile,
    find_two_levels,
    summarize_samples,
)
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul
from mamf.testing.simulated import TimeVariation

RESULTS = Path(__file__).resolve().parents[2] / "results"
SHAPE = MatmulShape(3072, 2816, 19328)
LARGE = MatmulShape(6144, 5632, 38656)  # large, so that a sustained visit needs few launches
KNOWN = Repeatability(run=0.0014)
#: How much runs differ according to the default calibration, in the burst and in the sustained regime.
BOOST, CAPPED = (look_up_repeatability("", regime, MatmulProblem()) for regime in ("burst", "sustained"))
#: A device on which runs differ as much as the calibration says.
RESTLESS = replace(
    Physics(),
    boost_variation=TimeVariation(0.0, BOOST.run),
    capped_variation=TimeVariation(0.0, CAPPED.run),
    rested_time_saving_share=0.0,
)


def test_students_t_is_that_of_the_tables():
    assert [round(compute_student_t_quantile(degrees), 3) for degrees in (1, 2, 4, 9, 30)] == [
        12.706,
        4.303,
        2.776,
        2.262,
        2.042,
    ]
    assert compute_student_t_quantile(10**5) == pytest.approx(1.960, abs=1e-3)


def test_batch_means_know_that_neighbours_are_alike():
    """Check samples that depend on their neighbors. If groups of three samples alternate around 1, the interval of the
    mean is narrower than for independent samples with the same scatter. If the samples drift, it is wider.
    """
    alternating = [1 + 0.014 * (1 if index // 3 % 2 else -1) for index in range(60)]
    independent = 2 * statistics.stdev(alternating) / len(alternating) ** 0.5
    assert compute_batch_means_interval(alternating).half_width < independent
    drifting = [1 + 0.0005 * index for index in range(60)]
    assert compute_batch_means_interval(drifting).half_width > 2 * statistics.stdev(drifting) / len(drifting) ** 0.5


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_the_mean_lies_in_its_interval(samples):
    interval = compute_batch_means_interval(samples)
    assert interval.low <= statistics.fmean(samples) * (1 + 1e-12)
    assert interval.high >= statistics.fmean(samples) * (1 - 1e-12)


def test_two_levels_are_told_from_scatter():
    chooser = random.Random(0)
    hunting = [chooser.gauss(703 if index // 2 % 2 else 683, 0.5) for index in range(20)]
    low, high = find_two_levels(hunting)
    assert (low, high) == (pytest.approx(683, abs=1), pytest.approx(703, abs=1))
    assert find_two_levels([chooser.gauss(700, 7) for _ in range(200)]) is None
    assert find_two_levels([chooser.uniform(690, 710) for _ in range(200)]) is None
    assert find_two_levels([685.0, 695.0, 705.0, 715.0] * 5) is None, "four equally spaced levels"
    assert find_two_levels([700.0, 704.0] * 10) is None, "the levels differ by less than 1 %"
    assert find_two_levels([700.0] * 19 + [720.0]) is None, "one outlier is not a level"
    assert find_two_levels([700.0, 720.0] * 4) is None, "too few samples"


def run_of(chooser, visits, known, seconds):
    """Simulate one run of a kernel that takes ``seconds`` per launch. Return the figure of the run and its repeat
    interval.
    """
    own = chooser.gauss(0, known.run) + chooser.gauss(0, known.launch_seconds) / seconds
    figures = [seconds * (1 + own + chooser.gauss(0, 0.001)) for _ in range(visits)]
    middle = statistics.fmean(figures)
    return middle, compute_repeat_interval(figures, middle, [0.001] * visits, known)


@pytest.mark.parametrize("visits", [1, 3, 9])
@pytest.mark.parametrize("seconds", [1e-3, 20e-6])
def test_an_interval_contains_one_more_run(visits, seconds):
    chooser = random.Random(visits)
    runs = [run_of(chooser, visits, replace(KNOWN, launch_seconds=0.1e-6), seconds) for _ in range(4000)]
    held = sum(interval.low <= repeat <= interval.high for (_, interval), (repeat, _) in itertools.pairwise(runs))
    assert 0.94 <= held / (len(runs) - 1) <= 0.97


def test_a_cold_card_makes_an_interval_wider_and_a_warm_one_does_not():
    known = Repeatability(run=0.001, usual_celsius=45.0, per_degree=0.0004)
    cold, usual, warm, unread = (
        compute_repeat_interval([1.0], 1.0, [0.0], known, celsius).half_width for celsius in (35.0, 45.0, 60.0, None)
    )
    assert usual == warm == unread
    assert cold - usual == pytest.approx(0.004, rel=0.01)
    assert [known.is_cold(celsius) for celsius in (None, 35.0, 40.0, 60.0)] == [False, True, False, False]
    assert not replace(known, per_degree=0.0).is_cold(0.0)


def test_an_interval_wider_than_half_of_its_figure_is_unknown():
    for half, is_known in ((0.49, True), (0.51, False), (30.0, False)):
        low, high = max(1 - half, (1 + half) ** -2), 1 + half
        assert Interval(low, high, 0.95).is_known == Interval(1 / high, 1 / low, 0.95).is_known == is_known
    assert not Interval(0.0, 1.0, 0.95).is_known


def rows_of_runs(kind, count, physics=RESTLESS, seed=0, shape=SHAPE, **options):
    """Yield one row from each of ``count`` runs on the same device, which stays warm between runs."""
    backend = SimulatedBackend(physics=physics, seed=seed)
    regime = kind(backend, **options)
    regime.prepare_device()
    pool = backend.make_operand_pool("normal", 0)
    for _ in range(count):
        backend.draw_run_variation()
        rule = StoppingRule(max_seconds=regime.default_sweep_row_seconds)
        yield measure_row(SimulatedMatmul(), MatmulProblem(), shape, regime, pool, rule)


def row_of(kind, **options):
    return next(rows_of_runs(kind, 1, **options))


def rate(clock_hz, shape=SHAPE):
    return shape.flop / SimulatedBackend().compute_matmul_cycles(shape) * clock_hz / 1e12


def coverage(rows):
    """Return the share of runs with an interval that contains the rate of the next run."""
    held = [a.rate_interval.low <= b.best_rate <= a.rate_interval.high for a, b in itertools.pairwise(rows)]
    return sum(held) / len(held)


def test_burst_intervals_contain_the_next_of_1000_runs():
    """Use launches that hardly scatter, because mamf overestimates the error within a visit that has few samples. With
    more scatter, the intervals would contain more than 95 % of the runs.
    """
    seconds = SHAPE.flop / rate(Physics().boost_clock_hz) / 1e12
    of_runs = TimeVariation(0.0, math.hypot(BOOST.run, BOOST.launch_seconds / seconds))
    rows = list(rows_of_runs(BurstRegime, 1001, replace(RESTLESS, boost_variation=of_runs, launch_noise=0.0001)))
    assert 0.94 <= coverage(rows) <= 0.965
    assert statistics.median(row.relative_half_width for row in rows) <= 0.006


def test_sustained_intervals_contain_the_next_run():
    rows = list(rows_of_runs(SustainedRegime, 300, shape=LARGE, visit_seconds=0.5))
    assert 0.93 <= coverage(rows) <= 0.975
    assert statistics.median(row.relative_half_width for row in rows) <= 0.010


def test_a_device_that_hunts_is_known_by_its_mean_and_says_so():
    physics = replace(RESTLESS, clock_alternation_share=0.03, capped_variation=None)
    row = row_of(SustainedRegime, physics=physics)
    hot = Physics().capped_clock_hz * (1 - Physics().hot_clock_loss_share)
    assert row.compute_rate("mean") == pytest.approx(rate(hot), rel=0.002)
    assert row.best_rate == row.compute_rate("mean")
    assert any("alternated between" in remark for remark in row.remarks)
    assert row.rate_interval.low <= rate(hot) <= row.rate_interval.high


def test_one_disturbed_visit_of_three_widens_an_interval_only_if_its_figure_moved():
    """Check a case from an H100: one of the six launches of a visit took twice as long, but the median of the visit did
    not change.
    """
    figures, quiet = [1.0, 0.9995, 1.0005], [0.001] * 3
    usual, disturbed = (
        compute_repeat_interval(figures, 1.0, within, KNOWN).half_width for within in (quiet, [0.001, 0.001, 0.4])
    )
    assert disturbed == usual
    assert compute_repeat_interval([1.0, 0.9995, 1.3], 1.0, quiet, KNOWN).half_width > 10 * usual


# -- the winner's curse ----------------------------------------------------------------------------------------------


def rounds_of(phase, true, count, chooser, shape):
    """Yield the rows of one candidate, one row per round. The rates scatter around ``true`` TFLOPS with a standard
    deviation of 0.1 %, the part of the variation in KNOWN that differs between rows.
    """
    for number in range(1, count + 1):
        samples = (shape.flop / (true * (1 + chooser.gauss(0, 0.001))) / 1e12,) * 6
        yield Measurement(
            shape, "k", MatmulProblem(), "burst", "median", "ok", "", summarize_samples(samples), samples,
            launch_count=6, phase=phase, round_number=number, repeatability=KNOWN,
        )  # fmt: skip


def test_held_out_rounds_take_the_winners_curse_off():
    """Search among eight candidates with the same true rate. The rounds that choose the best candidate overestimate its
    rate, but the later rounds that confirm it must not.
    """
    chooser = random.Random(0)
    shapes = [MatmulShape(4096, 4096, 128 * number) for number in range(1, 9)]
    of_choice, of_ceiling = [], []
    for _ in range(80):
        choosing = [row for shape in shapes for row in rounds_of("choose", 800.0, 6, chooser, shape)]
        fresh = [row for shape in shapes for row in rounds_of("confirm", 800.0, 9, chooser, shape)]
        ceiling = find_confirmed_ceiling([*choosing, *fresh], "card")
        chosen = [row.best_rate for row in choosing if row.shape == ceiling.shape]
        of_choice.append(statistics.median(chosen) / 800 - 1)
        of_ceiling.append(ceiling.tflops / 800 - 1)
    assert statistics.fmean(of_choice) > 0.0005, "without overestimates this test cannot fail"
    assert abs(statistics.fmean(of_ceiling)) < 0.0001


def test_a_sustained_ceiling_is_all_work_over_all_time():
    chooser = random.Random(2)
    rows = [
        replace(row, regime="sustained", ranking_statistic="mean", launch_count=launches)
        for row, launches in zip(rounds_of("confirm", 700.0, 3, chooser, SHAPE), (100, 200, 700), strict=True)
    ]
    seconds = sum(row.launch_count * row.summary.mean for row in rows)
    choosing = [replace(row, phase="choose") for row in rows]
    assert find_confirmed_ceiling([*choosing, *rows], "card").tflops == pytest.approx(
        1000 * SHAPE.flop / seconds / 1e12
    )


def test_visits_that_scatter_more_than_calibrated_are_not_held_to_the_calibration():
    """Check visits that differ more than calibrated, as on a device that uses the calibration of another one. If the
    power controller oscillates (``ignores_within``), only the differences between visits count.
    """
    whole, visits = Repeatability(run=0.0, ignores_within=True), [0.97, 1.0, 1.03]
    scattered = compute_repeat_interval(visits, 1.0, [0.0] * 3, whole)
    assert scattered.half_width == pytest.approx(2.772 * 0.03 / math.sqrt(3), rel=0.03)
    quiet = compute_repeat_interval([0.999, 1.0, 1.001], 1.0, [0.02] * 3, whole)
    assert quiet.half_width < 0.01


def test_a_log_keeps_the_calibration_that_it_holds():
    row = row_of(BurstRegime)
    kept = replace(row, repeatability=replace(row.repeatability, run=0.1))
    record = json.loads(json.dumps(make_measurement_record(kept)))
    assert read_measurement_record(record).repeatability == kept.repeatability
