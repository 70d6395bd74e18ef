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
REPEATABILITY = Repeatability(run=0.0014)
#: How much runs differ according to the default calibration, in the burst and in the sustained regime.
BOOST, CAPPED = (look_up_repeatability("", regime, MatmulProblem()) for regime in ("burst", "sustained"))
#: A device on which runs differ as much as the calibration says.
VARYING_PHYSICS = replace(
    Physics(),
    boost_variation=TimeVariation(0.0, BOOST.run),
    capped_variation=TimeVariation(0.0, CAPPED.run),
    rested_time_saving_share=0.0,
)


def test_quantiles_of_students_t_match_published_tables():
    assert [round(compute_student_t_quantile(degrees), 3) for degrees in (1, 2, 4, 9, 30)] == [
        12.706,
        4.303,
        2.776,
        2.262,
        2.042,
    ]
    assert compute_student_t_quantile(10**5) == pytest.approx(1.960, abs=1e-3)


def test_batch_means_account_for_samples_that_depend_on_their_neighbors():
    """Check samples that depend on their neighbors. If groups of three samples alternate around 1, the interval of the
    mean is narrower than for independent samples with the same scatter. If the samples drift, it is wider.
    """
    alternating = [1 + 0.014 * (1 if index // 3 % 2 else -1) for index in range(60)]
    independent = 2 * statistics.stdev(alternating) / len(alternating) ** 0.5
    assert compute_batch_means_interval(alternating).half_width < independent
    drifting = [1 + 0.0005 * index for index in range(60)]
    assert compute_batch_means_interval(drifting).half_width > 2 * statistics.stdev(drifting) / len(drifting) ** 0.5


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_an_interval_of_batch_means_contains_the_mean(samples):
    interval = compute_batch_means_interval(samples)
    assert interval.low <= statistics.fmean(samples) * (1 + 1e-12)
    assert interval.high >= statistics.fmean(samples) * (1 - 1e-12)


def test_two_levels_are_distinguished_from_scatter():
    generator = random.Random(0)
    alternating = [generator.gauss(703 if index // 2 % 2 else 683, 0.5) for index in range(20)]
    low, high = find_two_levels(alternating)
    assert (low, high) == (pytest.approx(683, abs=1), pytest.approx(703, abs=1))
    assert find_two_levels([generator.gauss(700, 7) for _ in range(200)]) is None
    assert find_two_levels([generator.uniform(690, 710) for _ in range(200)]) is None
    assert find_two_levels([685.0, 695.0, 705.0, 715.0] * 5) is None, "four equally spaced levels"
    assert find_two_levels([700.0, 704.0] * 10) is None, "the levels differ by less than 1 %"
    assert find_two_levels([700.0] * 19 + [720.0]) is None, "one outlier is not a level"
    assert find_two_levels([700.0, 720.0] * 4) is None, "too few samples"


def simulate_run(generator, visit_count, repeatability, seconds):
    """Simulate one run of a kernel that takes ``seconds`` per launch. Return the figure of the run and its repeat
    interval.
    """
    run_deviation = generator.gauss(0, repeatability.run) + generator.gauss(0, repeatability.launch_seconds) / seconds
    figures = [seconds * (1 + run_deviation + generator.gauss(0, 0.001)) for _ in range(visit_count)]
    mean = statistics.fmean(figures)
    return mean, compute_repeat_interval(figures, mean, [0.001] * visit_count, repeatability)


@pytest.mark.parametrize("visit_count", [1, 3, 9])
@pytest.mark.parametrize("seconds", [1e-3, 20e-6])
def test_an_interval_contains_one_more_run(visit_count, seconds):
    generator = random.Random(visit_count)
    runs = [
        simulate_run(generator, visit_count, replace(REPEATABILITY, launch_seconds=0.1e-6), seconds)
        for _ in range(4000)
    ]
    contained_count = sum(
        interval.low <= repeat <= interval.high for (_, interval), (repeat, _) in itertools.pairwise(runs)
    )
    assert 0.94 <= contained_count / (len(runs) - 1) <= 0.97


def test_a_cold_card_makes_an_interval_wider_and_a_warm_one_does_not():
    repeatability = Repeatability(run=0.001, usual_celsius=45.0, per_degree=0.0004)
    cold, usual, warm, unknown = (
        compute_repeat_interval([1.0], 1.0, [0.0], repeatability, celsius).half_width
        for celsius in (35.0, 45.0, 60.0, None)
    )
    assert usual == warm == unknown
    assert cold - usual == pytest.approx(0.004, rel=0.01)
    assert [repeatability.is_cold(celsius) for celsius in (None, 35.0, 40.0, 60.0)] == [False, True, False, False]
    assert not replace(repeatability, per_degree=0.0).is_cold(0.0)


def test_an_interval_wider_than_half_of_its_figure_is_unknown():
    for half_width, is_known in ((0.49, True), (0.51, False), (30.0, False)):
        low, high = max(1 - half_width, (1 + half_width) ** -2), 1 + half_width
        assert Interval(low, high, 0.95).is_known == Interval(1 / high, 1 / low, 0.95).is_known == is_known
    assert not Interval(0.0, 1.0, 0.95).is_known


def yield_rows_of_runs(regime_class, count, physics=VARYING_PHYSICS, shape=SHAPE, **options):
    """Yield one row from each of ``count`` runs on the same device, which stays warm between runs."""
    backend = SimulatedBackend(physics=physics)
    regime = regime_class(backend, **options)
    regime.prepare_device()
    pool = backend.make_operand_pool("normal", 0)
    for _ in range(count):
        backend.draw_run_variation()
        rule = StoppingRule(max_seconds=regime.default_sweep_row_seconds)
        yield measure_row(SimulatedMatmul(), MatmulProblem(), shape, regime, pool, rule)


def measure_one_run(regime_class, **options):
    return next(yield_rows_of_runs(regime_class, 1, **options))


def compute_rate_at(clock_hz):
    return SHAPE.flop / SimulatedBackend().compute_matmul_cycles(SHAPE) * clock_hz / 1e12


def compute_coverage(rows):
    """Return the share of runs with an interval that contains the rate of the next run."""
    contains_next = [a.rate_interval.low <= b.best_rate <= a.rate_interval.high for a, b in itertools.pairwise(rows)]
    return sum(contains_next) / len(contains_next)


def test_burst_intervals_contain_the_next_of_1000_runs():
    """Use launches that hardly scatter, because mamf overestimates the error within a visit that has few samples. With
    more scatter, the intervals would contain more than 95 % of the runs.
    """
    seconds = SHAPE.flop / compute_rate_at(Physics().boost_clock_hz) / 1e12
    run_variation = TimeVariation(0.0, math.hypot(BOOST.run, BOOST.launch_seconds / seconds))
    rows = list(
        yield_rows_of_runs(
            BurstRegime, 1001, replace(VARYING_PHYSICS, boost_variation=run_variation, launch_noise=0.0001)
        )
    )
    assert 0.94 <= compute_coverage(rows) <= 0.965
    assert statistics.median(row.relative_half_width for row in rows) <= 0.006


def test_sustained_intervals_contain_the_next_run():
    rows = list(yield_rows_of_runs(SustainedRegime, 300, shape=LARGE, visit_seconds=0.5))
    assert 0.93 <= compute_coverage(rows) <= 0.975
    assert statistics.median(row.relative_half_width for row in rows) <= 0.010


def test_a_device_with_an_alternating_clock_is_rated_by_its_mean_with_a_remark():
    physics = replace(VARYING_PHYSICS, clock_alternation_share=0.03, capped_variation=None)
    row = measure_one_run(SustainedRegime, physics=physics)
    hot_clock_hz = Physics().capped_clock_hz * (1 - Physics().hot_clock_loss_share)
    assert row.compute_rate("mean") == pytest.approx(compute_rate_at(hot_clock_hz), rel=0.002)
    assert row.best_rate == row.compute_rate("mean")
    assert any("alternated between" in remark for remark in row.remarks)
    assert row.rate_interval.low <= compute_rate_at(hot_clock_hz) <= row.rate_interval.high


def test_one_disturbed_visit_of_three_widens_an_interval_only_if_its_figure_moved():
    """Check a case from an H100: one of the six launches of a visit took twice as long, but the median of the visit did
    not change.
    """
    figures, quiet_errors = [1.0, 0.9995, 1.0005], [0.001] * 3
    quiet_half_width, disturbed_half_width = (
        compute_repeat_interval(figures, 1.0, errors_within_visits, REPEATABILITY).half_width
        for errors_within_visits in (quiet_errors, [0.001, 0.001, 0.4])
    )
    assert disturbed_half_width == quiet_half_width
    assert (
        compute_repeat_interval([1.0, 0.9995, 1.3], 1.0, quiet_errors, REPEATABILITY).half_width > 10 * quiet_half_width
    )


# -- the winner's curse ----------------------------------------------------------------------------------------------


def yield_rounds(phase, true_tflops, count, generator, shape):
    """Yield the rows of one candidate, one row per round. The rates scatter around ``true_tflops`` with a standard
    deviation of 0.1 %, the part of the variation in REPEATABILITY that differs between rows.
    """
    for number in range(1, count + 1):
        samples = (shape.flop / (true_tflops * (1 + generator.gauss(0, 0.001))) / 1e12,) * 6
        yield Measurement(
            shape, "k", MatmulProblem(), "burst", "median", "ok", "", summarize_samples(samples), samples,
            launch_count=6, phase=phase, round_number=number, repeatability=REPEATABILITY,
        )  # fmt: skip


def test_held_out_rounds_remove_the_winners_curse():
    """Search among eight candidates with the same true rate. The rounds that choose the best candidate overestimate its
    rate, but the later rounds that confirm it must not.
    """
    generator = random.Random(0)
    shapes = [MatmulShape(4096, 4096, 128 * number) for number in range(1, 9)]
    choice_errors, ceiling_errors = [], []
    for _ in range(80):
        choosing_rows = [row for shape in shapes for row in yield_rounds("choose", 800.0, 6, generator, shape)]
        confirming_rows = [row for shape in shapes for row in yield_rounds("confirm", 800.0, 9, generator, shape)]
        ceiling = find_confirmed_ceiling([*choosing_rows, *confirming_rows], "card")
        chosen_rates = [row.best_rate for row in choosing_rows if row.shape == ceiling.shape]
        choice_errors.append(statistics.median(chosen_rates) / 800 - 1)
        ceiling_errors.append(ceiling.tflops / 800 - 1)
    assert statistics.fmean(choice_errors) > 0.0005, "without overestimates this test cannot fail"
    assert abs(statistics.fmean(ceiling_errors)) < 0.0001


def test_a_sustained_ceiling_is_total_flop_divided_by_total_time():
    generator = random.Random(2)
    rows = [
        replace(row, regime="sustained", ranking_statistic="mean", launch_count=launch_count)
        for row, launch_count in zip(yield_rounds("confirm", 700.0, 3, generator, SHAPE), (100, 200, 700), strict=True)
    ]
    seconds = sum(row.launch_count * row.summary.mean for row in rows)
    choosing_rows = [replace(row, phase="choose") for row in rows]
    assert find_confirmed_ceiling([*choosing_rows, *rows], "card").tflops == pytest.approx(
        1000 * SHAPE.flop / seconds / 1e12
    )


def test_visits_that_scatter_more_than_calibrated_widen_the_interval():
    """Check visits that differ more than calibrated, as on a device that uses the calibration of another one. If the
    power controller oscillates (``ignores_within``), only the differences between visits count.
    """
    oscillating, visits = Repeatability(run=0.0, ignores_within=True), [0.97, 1.0, 1.03]
    scattered = compute_repeat_interval(visits, 1.0, [0.0] * 3, oscillating)
    assert scattered.half_width == pytest.approx(2.772 * 0.03 / math.sqrt(3), rel=0.03)
    quiet = compute_repeat_interval([0.999, 1.0, 1.001], 1.0, [0.02] * 3, oscillating)
    assert quiet.half_width < 0.01


def test_a_log_stores_the_calibration_of_a_row():
    row = measure_one_run(BurstRegime)
    changed_row = replace(row, repeatability=replace(row.repeatability, run=0.1))
    record = json.loads(json.dumps(make_measurement_record(changed_row)))
    assert read_measurement_record(record).repeatability == changed_row.repeatability
