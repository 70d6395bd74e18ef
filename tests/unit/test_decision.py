"""Test how ``mamf compare`` decides whether two sides differ by more than equal runs do.

The tests cover the errors of runs, pooled rows, several runs per side, and how often a decision is wrong.
"""

import json
import math
import random
from pathlib import Path

import pytest
import rates
from test_compare import SHAPES, failed, log, row

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
KNOWN = Repeatability(run=0.0014)
ONE_VISIT = RunOrder("1 + 1 alternating runs", math.sqrt(2), 0)
SUMMARY = {"status": "complete", "reason": "", "measured": 20, "elapsed_seconds": 30.0, "best": {}}
MANY = tuple(MatmulShape(1024 * number, 1024, 1024) for number in range(1, 21))


def timed(*rows, minute=0, seconds=30.0, **named):
    """Return the log of a run that started ``minute`` minutes after 10:00 and took ``seconds``."""
    made = log(*rows, **named)
    made.header["started"] = f"2026-11-22T10:{minute:02d}:00+00:00"
    made.summary = SUMMARY | {"elapsed_seconds": seconds}
    return made


def run(factor=1.0, minute=0, shapes=MANY, **fields):
    """Return the log of a run with a row for each shape, in which every launch takes ``factor`` seconds."""
    rows = (row(factor, shape, spread=0.0002, repeatability=KNOWN, **fields) for shape in shapes)
    return timed(*rows, minute=minute, name=f"{minute}.jsonl")


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
    run_order = find_run_order(*([timed(minute=minute) for minute in side] for side in (a, b)))
    assert (run_order.description, run_order.extra_run_count) == (label, len(a) + len(b) - 2)
    assert run_order.shift_factor == pytest.approx(factor)


# -- the errors of runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [-0.03, 0.0, 0.03])
def test_equal_runs_in_classic_are_no_regression(apart):
    """Check rows that scatter by 2.5 % from run to run, as those of mamf-finder's loop do."""
    drawn = random.Random(1)
    a, b = (
        timed(*(row(1 + drawn.gauss(shift, 0.025), shape, spread=0.002, regime="classic") for shape in MANY))
        for shift in (0.0, apart)
    )
    assert not compare_logs(a, b).is_b_slower()


def test_temperatures_that_differ_widen_a_row_and_all_rows_together():
    known = look_up_repeatability("cuda", "burst", MatmulProblem())

    def at(celsius, factor, minute):
        conditions = Conditions(celsius=celsius)
        rows = (row(factor, shape, spread=0.0002, repeatability=known, conditions=conditions) for shape in MANY)
        return timed(*rows, minute=minute, name=f"{celsius}.jsonl")

    warm, cold = (compare_logs(at(celsius, 1.0, 0), at(46.0, 1.006, 1)) for celsius in (46.0, 34.0))
    assert (warm.is_b_slower(), cold.is_b_slower()) == (True, False)
    assert cold.pooled_rows[0].temperature_effect == pytest.approx(12 * known.per_degree)
    assert cold.pairs[0].interval.half_width > warm.pairs[0].interval.half_width + 0.004
    assert "A was at 34 C and B at 46 C, which makes the interval wider" in "\n".join(lines_of(cold))
    assert compare_logs(at(None, 1.0, 0), at(46.0, 1.006, 1)).pairs[0].temperature_effect == 0.0


def pair_of(ratio, **fields):
    interval = Interval(0.999, 1.001, 0.95)
    a, b = (
        ComparedRow({}, "", "", speed, interval, error=FigureUncertainty(0.001, 0.001, 8)) for speed in (1.0, ratio)
    )
    return RowPair({}, a, b, **fields)


def test_more_is_asked_of_a_row_among_many():
    alone, among_many = (pair_of(0.985, run_order=ONE_VISIT, row_count=rows) for rows in (1, 1279))
    assert (alone.decide_verdict(), alone.is_regression()) == ("SLOWER", True)
    assert (among_many.decide_verdict(), among_many.is_regression()) == ("UNDECIDED", False)
    assert pair_of(0.9, run_order=ONE_VISIT, row_count=1279).is_regression()


# -- pooled rows -------------------------------------------------------------------------------------------------------


def together(changes, run_order=ONE_VISIT):
    return pool_rows("burst", changes, run_order, 0.005)


def changed(logarithm, own=0.001, seconds=1e-3, rates=((), ())):
    return RowChange(logarithm, 0.001, own, 8, seconds, rates)


def test_the_timer_shifts_all_short_rows():
    assert together([changed(0.0, seconds=1e-5)] * 50).deviation > 0.03


def test_runs_of_a_side_that_lie_far_apart_are_believed():
    def of_runs(apart):
        rates = (1 + apart, 1 - apart), (1 - apart, 1 + apart)
        return together([changed(-0.01, rates=rates)] * 50, RunOrder("", 1.0, 2))

    assert of_runs(0.0005).is_regression(0.01)
    assert not of_runs(0.02).is_regression(0.01)
    assert of_runs(0.02).degrees_of_freedom == 2


def test_rows_that_changed_by_very_different_amounts_have_no_certain_common_change():
    """Check that one row with a small error does not decide for all others, which have large errors on a busy CPU."""
    pooled = together([changed(2.0, own=0.001), *([changed(0.0, own=0.3)] * 14)])
    assert abs(math.log(pooled.ratio)) < 0.5
    assert pooled.interval.low < 1 < pooled.interval.high
    assert together([changed(0.01, own=0.001), *([changed(0.01, own=0.3)] * 14)]).interval.low > 1


def test_the_smallest_loss_is_found_with_95_percent():
    drawn, known = random.Random(1), together([changed(0.0)] * 50)
    loss = known.compute_smallest_detectable_loss(0.01)
    shifts = (drawn.gauss(math.log(1 - loss), known.deviation) for _ in range(4000))
    found = sum(together([changed(shift)] * 50).is_regression(0.01) for shift in shifts) / 4000
    assert 0.94 < found < 0.99


# -- several runs per side ---------------------------------------------------------------------------------------------


def test_a_row_that_a_run_lacks_is_not_compared():
    whole, less = log(row(), row(shape=SHAPES[1])), log(row(), failed(shape=SHAPES[1]))
    for other in (less, log(row())):
        comparison = compare_logs([whole, other], [whole, whole])
        assert [pair.a.shape for pair in comparison.pairs] == ["1024x1024x1024"]
        assert [(entry.shape, there.status) for entry, there in comparison.rows_only_in_b] in (
            [("2048x1024x1024", "out_of_memory")],
            [("2048x1024x1024", "not measured in one of the runs")],
        )


def test_runs_of_a_side_are_of_one_software():
    newer = log(row())
    newer.header["environment"]["packages"]["torch"] = "2.12"
    with pytest.raises(IncomparableError, match=r"not comparable: torch 2\.11 against 2\.12"):
        compare_logs([log(row()), newer], [log(row()), log(row())])
    assert compare_logs(log(row()), newer).pairs


def test_a_uniform_loss_of_half_a_percent_is_found_by_runs_in_turns():
    slow = 1.005
    once = compare_logs(run(minute=0), run(slow, 1))
    turns = compare_logs([run(minute=0), run(minute=2)], [run(slow, 1), run(slow, 3)])
    assert not once.find_regressions()
    assert (once.is_b_slower(), turns.is_b_slower()) == (False, True) or once.is_b_slower()
    apart = compare_logs(run(minute=0), run(slow, 50))
    assert (apart.is_b_slower(), turns.is_b_slower()) == (False, True)
    assert apart.pooled_rows[0].compute_smallest_detectable_loss(0.01) > turns.pooled_rows[
        0
    ].compute_smallest_detectable_loss(0.01)
    assert turns.pooled_rows[0].compute_smallest_detectable_loss(0.01) < 0.005


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines_of(comparison):
    return FORMATTERS["table"](make_comparison_document(comparison, 0.01), None).splitlines()


def test_the_chance_of_a_false_alarm_is_printed():
    alarm = "chance of a false alarm (exit code 3) for the whole comparison: "
    assert f"{alarm}at most 1 %" in lines_of(compare_logs(run(), run(minute=1)))
    host = run()
    host.header["timer"] = "host clock"
    assert f"{alarm}unknown with a host clock" in lines_of(compare_logs(host, host))
    other = log(row(), device_name="H200", uuid_hash="bb")
    assert alarm not in FORMATTERS["table"](
        make_comparison_document(compare_logs(log(row()), other, anyway=True), 0.01), None
    )


@pytest.mark.parametrize(
    ("slow", "told"),
    [
        (1.0, "no common change of these rows was found, but a uniform loss below 0.97 %"),
        (1.02, "slower by more than 0.25 %"),
        (0.98, "faster"),
    ],
)
def test_what_all_rows_say_together_is_printed(slow, told):
    comparison = compare_logs(run(), run(slow, 50))
    (line,) = [line for line in lines_of(comparison) if "together" in line]
    assert line.startswith("burst, 20 rows together (more than 10 minutes between runs): B/A ")
    assert told in line
    found = json.loads(FORMATTERS["json"](make_comparison_document(comparison, 0.01), None))
    assert found["chance_of_false_alarm"] == 0.01
    assert found["together"][0]["is_regression"] == (slow > 1)


def test_the_command_takes_several_runs_per_side(tmp_path, capsys):
    def write(made):
        path = tmp_path / made.path.name
        with RunLogWriter.create(path, made.header) as writer:
            for each in made.measurements:
                writer.write("measurement", make_measurement_record(each))
            writer.write("summary", SUMMARY)
        return str(path)

    a = [write(run(minute=minute)) for minute in (0, 2, 4)]
    b = [write(run(1.005, minute)) for minute in (1, 3, 5)]
    assert main(["compare", *a, "--against", *b]) == 3
    out = capsys.readouterr().out
    assert "3 + 3 alternating runs" in out
    assert "slower by more than 0.25 %" in out
    assert main(["compare", *a, "--against", *a]) == 0


# -- error rates: tools/rates.py draws thousands of runs, docs/comparing.md has the figures ----------------------------


@pytest.fixture(scope="module")
def finds():
    """Return the logs of equal finds, grouped by card: five finds of one card, and two of each of two other cards."""
    same = sorted(RESULTS.glob("find-bfloat16-burst-sustained-20261121-213*.jsonl"))
    other = [RESULTS / f"find-bfloat16-burst-sustained-20261122-1011{end}.jsonl" for end in ("53", "53-2")]
    other += [RESULTS / f"find-bfloat16-burst-sustained-20261122-1012{end}.jsonl" for end in ("16", "16-2")]
    logs = [read_run_log(path) for path in (*same, *other)]
    cards = {log.header["device"]["uuid_hash"]: [] for log in logs}
    for each in logs:
        cards[each.header["device"]["uuid_hash"]].append(rates.all_rows(each))
    return list(cards.values())


def test_no_equal_runs_are_called_slower_and_a_loss_is_found(finds):
    pairs = list(rates.equal_pairs(finds))
    assert len(pairs) == 5 * 4 + 2 * 2
    assert not any(each.is_b_slower() for each in pairs)
    turns = list(rates.interleaved(finds))
    assert len(turns) == 4
    assert not any(each.is_b_slower() for each in turns)
    assert all(rates.with_loss(each, 0.005).is_b_slower() for each in turns)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_drawn_runs_are_rarely_called_slower_and_a_loss_is_found(finds, regime):
    scatter = rates.scatter_of(rates.equal_pairs(finds))
    (card,) = (each for each in rates.drawn_runs(RESULTS.parent, scatter) if each.regime == regime)
    three = rates.in_turns(3)
    assert card.exits(1, three, 100) == card.exits(79, three, 5) == card.exits(1279, SEPARATE_RUNS, 1) == 0
    assert card.exits(79, rates.in_turns(4), 5, loss=0.006) >= 0.8
