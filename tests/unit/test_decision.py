"""Test how ``mamf compare`` decides whether two sides differ by more than equal runs do.

The tests cover the errors of runs, pooled rows, several runs per side, and how often a decision is wrong.
"""

import json
import math
import random
from pathlib import Path

import pytest
import rates
from test_compare import SHAPES, make_failed_row, make_log, make_row

from mamf.calibration import look_up_repeatability
from mamf.cli import main
from mamf.errors import IncomparableError
from mamf.logs.compare import RowPair, compare_logs
from mamf.logs.compared_rows import SEPARATE_RUNS, ComparedRow, RunOrder, find_run_order
from mamf.logs.pooling import RowChange, pool_rows
from mamf.logs.records import make_measurement_record
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Conditions
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.report.comparison import make_comparison_document
from mamf.report.formats import FORMATTERS
from mamf.statistics import FigureUncertainty, Interval, Repeatability

RESULTS = Path(__file__).resolve().parents[2] / "results" / "nvidia-h200"
REPEATABILITY = Repeatability(run=0.0014)
ONE_VISIT = RunOrder("1 + 1 alternating runs", math.sqrt(2), 0)
SUMMARY = {"status": "complete", "reason": "", "measured": 20, "elapsed_seconds": 30.0, "best": {}}
MANY_SHAPES = tuple(MatmulShape(1024 * number, 1024, 1024) for number in range(1, 21))


def make_timed_log(*rows, minute=0, **log_options):
    """Return the log of a run that started ``minute`` minutes after 10:00 and took half a minute."""
    run_log = make_log(*rows, **log_options)
    run_log.header["started"] = f"2026-11-22T10:{minute:02d}:00+00:00"
    run_log.summary = dict(SUMMARY)
    return run_log


def make_run(factor=1.0, minute=0):
    """Return the log of a run with a row for each of MANY_SHAPES, in which every launch takes ``factor`` seconds."""
    rows = (make_row(factor, shape, spread=0.0002, repeatability=REPEATABILITY) for shape in MANY_SHAPES)
    return make_timed_log(*rows, minute=minute, name=f"{minute}.jsonl")


# -- the order of runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "label", "factor"),
    [
        ([0], [1], "1 + 1 alternating runs", math.sqrt(2)),
        ([0, 2], [1, 3], "2 + 2 alternating runs", 1.0),
        ([0, 3], [1, 2], "2 + 2 alternating runs", 1.0),
        ([0, 1], [2, 3], "2 + 2 runs without a long pause", math.sqrt(2)),  # a drift would look like a change
        ([0], [1, 2], "1 + 2 runs without a long pause", math.sqrt(2)),
        ([0], [30], "more than 10 minutes between runs", 1.5 * math.sqrt(2)),
        ([0, 31], [1, 30], "more than 10 minutes between runs", 1.5 * math.sqrt(2)),
    ],
)
def test_the_times_of_the_logs_say_how_runs_were_measured(a, b, label, factor):
    run_order = find_run_order(*([make_timed_log(minute=minute) for minute in side] for side in (a, b)))
    assert (run_order.description, run_order.extra_run_count) == (label, len(a) + len(b) - 2)
    assert run_order.shift_factor == pytest.approx(factor)


# -- the errors of runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean_shift", [-0.03, 0.0, 0.03])
def test_runs_that_differ_by_the_scatter_of_classic_are_not_a_regression(mean_shift):
    """Check rows that scatter by 2.5 % from run to run, as those of mamf-finder's loop do."""
    generator = random.Random(1)
    a, b = (
        make_timed_log(
            *(
                make_row(1 + generator.gauss(shift, 0.025), shape, spread=0.002, regime="classic")
                for shape in MANY_SHAPES
            )
        )
        for shift in (0.0, mean_shift)
    )
    assert not compare_logs(a, b).is_b_slower()


def test_different_temperatures_widen_the_intervals_of_a_row_and_of_all_rows():
    repeatability = look_up_repeatability("cuda", "burst", MatmulProblem())

    def make_run_at(celsius, factor, minute):
        conditions = Conditions(celsius=celsius)
        rows = (
            make_row(factor, shape, spread=0.0002, repeatability=repeatability, conditions=conditions)
            for shape in MANY_SHAPES
        )
        return make_timed_log(*rows, minute=minute, name=f"{celsius}.jsonl")

    warm, cold = (compare_logs(make_run_at(celsius, 1.0, 0), make_run_at(46.0, 1.006, 1)) for celsius in (46.0, 34.0))
    assert (warm.is_b_slower(), cold.is_b_slower()) == (True, False)
    assert cold.pooled_rows[0].temperature_effect == pytest.approx(12 * repeatability.per_degree)
    assert cold.pairs[0].interval.half_width > warm.pairs[0].interval.half_width + 0.004
    assert "A was at 34 C and B at 46 C, which makes the interval wider" in "\n".join(render_lines(cold))
    assert compare_logs(make_run_at(None, 1.0, 0), make_run_at(46.0, 1.006, 1)).pairs[0].temperature_effect == 0.0


def make_pair(ratio, **fields):
    interval = Interval(0.999, 1.001, 0.95)
    a, b = (
        ComparedRow({}, "", "", speed, interval, error=FigureUncertainty(0.001, 0.001, 8)) for speed in (1.0, ratio)
    )
    return RowPair({}, a, b, **fields)


def test_a_row_among_many_needs_a_larger_loss_to_be_slower():
    single, among_many = (make_pair(0.985, run_order=ONE_VISIT, row_count=rows) for rows in (1, 1279))
    assert (single.decide_verdict(), single.is_regression()) == ("SLOWER", True)
    assert (among_many.decide_verdict(), among_many.is_regression()) == ("UNDECIDED", False)
    assert make_pair(0.9, run_order=ONE_VISIT, row_count=1279).is_regression()


# -- pooled rows -------------------------------------------------------------------------------------------------------


def pool(changes, run_order=ONE_VISIT):
    return pool_rows("burst", changes, run_order, 0.005)


def make_change(log_ratio, row_deviation=0.001, seconds=1e-3, rates=((), ())):
    return RowChange(log_ratio, 0.001, row_deviation, 8, seconds, rates)


def test_the_timer_shifts_all_short_rows():
    assert pool([make_change(0.0, seconds=1e-5)] * 50).deviation > 0.03


def test_scatter_between_the_runs_of_a_side_widens_the_interval_of_pooled_rows():
    def pool_scattered_runs(scatter):
        rates = (1 + scatter, 1 - scatter), (1 - scatter, 1 + scatter)
        return pool([make_change(-0.01, rates=rates)] * 50, RunOrder("", 1.0, 2))

    assert pool_scattered_runs(0.0005).is_regression(0.01)
    assert not pool_scattered_runs(0.02).is_regression(0.01)
    assert pool_scattered_runs(0.02).degrees_of_freedom == 2


def test_rows_that_changed_by_very_different_amounts_have_no_certain_common_change():
    """Check that one row with a small error does not decide for all others, which have large errors on a busy CPU."""
    pooled = pool([make_change(2.0, row_deviation=0.001), *([make_change(0.0, row_deviation=0.3)] * 14)])
    assert abs(math.log(pooled.ratio)) < 0.5
    assert pooled.interval.low < 1 < pooled.interval.high
    assert (
        pool([make_change(0.01, row_deviation=0.001), *([make_change(0.01, row_deviation=0.3)] * 14)]).interval.low > 1
    )


def test_the_smallest_detectable_loss_is_found_in_95_percent_of_runs():
    generator, pooled = random.Random(1), pool([make_change(0.0)] * 50)
    loss = pooled.compute_smallest_detectable_loss(0.01)
    shifts = (generator.gauss(math.log(1 - loss), pooled.deviation) for _ in range(4000))
    regression_share = sum(pool([make_change(shift)] * 50).is_regression(0.01) for shift in shifts) / 4000
    assert 0.94 < regression_share < 0.99


# -- several runs per side ---------------------------------------------------------------------------------------------


def test_a_row_that_a_run_lacks_is_not_compared():
    complete, incomplete = (
        make_log(make_row(), make_row(shape=SHAPES[1])),
        make_log(make_row(), make_failed_row(shape=SHAPES[1])),
    )
    for other in (incomplete, make_log(make_row())):
        comparison = compare_logs([complete, other], [complete, complete])
        assert [pair.a.shape for pair in comparison.pairs] == ["1024x1024x1024"]
        assert [(entry.shape, row_of_b.status) for entry, row_of_b in comparison.rows_only_in_b] in (
            [("2048x1024x1024", "out_of_memory")],
            [("2048x1024x1024", "not measured in one of the runs")],
        )


def test_runs_of_a_side_must_use_the_same_software():
    newer = make_log(make_row())
    newer.header["environment"]["packages"]["torch"] = "2.12"
    with pytest.raises(IncomparableError, match=r"not comparable: torch 2\.11 against 2\.12"):
        compare_logs([make_log(make_row()), newer], [make_log(make_row()), make_log(make_row())])
    assert compare_logs(make_log(make_row()), newer).pairs


def test_a_uniform_loss_of_half_a_percent_is_found_by_alternating_runs():
    slow = 1.005
    one_run_each = compare_logs(make_run(minute=0), make_run(slow, 1))
    alternating = compare_logs([make_run(minute=0), make_run(minute=2)], [make_run(slow, 1), make_run(slow, 3)])
    with_pause = compare_logs(make_run(minute=0), make_run(slow, 50))
    comparisons = alternating, one_run_each, with_pause
    assert [comparison.is_b_slower() for comparison in comparisons] == [True, True, False]
    assert not any(comparison.find_regressions() for comparison in comparisons), "no row alone may be a regression"
    losses = [comparison.pooled_rows[0].compute_smallest_detectable_loss(0.01) for comparison in comparisons]
    assert losses == sorted(losses)
    assert losses[0] < 0.005 < losses[-1]


# -- what is printed ---------------------------------------------------------------------------------------------------


def render_lines(comparison):
    return FORMATTERS["table"](make_comparison_document(comparison, 0.01), None).splitlines()


def test_the_chance_of_a_false_alarm_is_printed():
    alarm = "chance of a false alarm (exit code 3) for the whole comparison: "
    assert f"{alarm}at most 1 %" in render_lines(compare_logs(make_run(), make_run(minute=1)))
    host_timed_run = make_run()
    host_timed_run.header["timer"] = "host clock"
    assert f"{alarm}unknown with a host clock" in render_lines(compare_logs(host_timed_run, host_timed_run))
    other = make_log(make_row(), device_name="H200", uuid_hash="bb")
    assert alarm not in FORMATTERS["table"](
        make_comparison_document(compare_logs(make_log(make_row()), other, anyway=True), 0.01), None
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.0, "no common change of these rows was found, but a uniform loss below 0.97 %"),
        (1.02, "slower by more than 0.25 %"),
        (0.98, "faster"),
    ],
)
def test_the_common_change_of_all_rows_is_printed(seconds, text):
    comparison = compare_logs(make_run(), make_run(seconds, 50))
    (line,) = [line for line in render_lines(comparison) if "together" in line]
    assert line.startswith("burst, 20 rows together (more than 10 minutes between runs): B/A ")
    assert text in line
    document = json.loads(FORMATTERS["json"](make_comparison_document(comparison, 0.01), None))
    assert document["chance_of_false_alarm"] == 0.01
    assert document["together"][0]["is_regression"] == (seconds > 1)


def test_the_command_takes_several_runs_per_side(tmp_path, capsys):
    def write(run_log):
        path = tmp_path / run_log.path.name
        with RunLogWriter.create(path, run_log.header) as writer:
            for measurement in run_log.measurements:
                writer.write("measurement", make_measurement_record(measurement))
            writer.write("summary", SUMMARY)
        return str(path)

    a = [write(make_run(minute=minute)) for minute in (0, 2, 4)]
    b = [write(make_run(1.005, minute)) for minute in (1, 3, 5)]
    assert main(["compare", *a, "--against", *b]) == 3
    out = capsys.readouterr().out
    assert "3 + 3 alternating runs" in out
    assert "slower by more than 0.25 %" in out
    assert main(["compare", *a, "--against", *a]) == 0


# -- error rates: tools/rates.py draws thousands of runs, docs/comparing.md has the figures ----------------------------


@pytest.fixture(scope="module")
def logs_by_card():
    """Return the logs of equal finds, grouped by card: five finds of one card, and two of each of two other cards."""
    paths_of_one_card = sorted(RESULTS.glob("find-bfloat16-burst-sustained-20261121-213*.jsonl"))
    paths_of_other_cards = [
        RESULTS / f"find-bfloat16-burst-sustained-20261122-1011{end}.jsonl" for end in ("53", "53-2")
    ]
    paths_of_other_cards += [
        RESULTS / f"find-bfloat16-burst-sustained-20261122-1012{end}.jsonl" for end in ("16", "16-2")
    ]
    logs = [read_run_log(path) for path in (*paths_of_one_card, *paths_of_other_cards)]
    logs_by_uuid = {run_log.header["device"]["uuid_hash"]: [] for run_log in logs}
    for run_log in logs:
        logs_by_uuid[run_log.header["device"]["uuid_hash"]].append(rates.convert_to_sweep(run_log))
    return list(logs_by_uuid.values())


def test_no_equal_runs_are_called_slower_and_a_loss_is_found(logs_by_card):
    pairs = list(rates.compare_equal_runs(logs_by_card))
    assert len(pairs) == 5 * 4 + 2 * 2
    assert not any(comparison.is_b_slower() for comparison in pairs)
    alternating = list(rates.compare_alternating_runs(logs_by_card))
    assert len(alternating) == 4
    assert not any(comparison.is_b_slower() for comparison in alternating)
    assert all(rates.slow_down_side_b(comparison, 0.005).is_b_slower() for comparison in alternating)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_drawn_runs_are_rarely_called_slower_and_a_loss_is_found(logs_by_card, regime):
    scatter = rates.compute_scatter(rates.compare_equal_runs(logs_by_card))
    (runs,) = (
        drawn_runs for drawn_runs in rates.make_drawn_runs(RESULTS.parent, scatter) if drawn_runs.regime == regime
    )
    run_order = rates.make_alternating_order(3)
    assert (
        runs.compute_exit_share(1, run_order, 100)
        == runs.compute_exit_share(79, run_order, 5)
        == runs.compute_exit_share(1279, SEPARATE_RUNS, 1)
        == 0
    )
    assert runs.compute_exit_share(79, rates.make_alternating_order(4), 5, loss=0.006) >= 0.8
