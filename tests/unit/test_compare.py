"""Test the comparison of two logs: which rows it pairs, which verdict it gives, and which logs it refuses."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_plans import kernels_plan, search_plan, sweep_plan
from refusals import assert_refused

from mamf.cli import main
from mamf.errors import IncomparableError
from mamf.logs.compare import compare_logs
from mamf.logs.compared_rows import list_compared_rows
from mamf.logs.recording import make_plan_record
from mamf.logs.records import make_measurement_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Conditions, Measurement
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MatmulGrid, MatmulProblem, MatmulShape
from mamf.report.comparison import make_comparison_document, yield_pair_remarks
from mamf.report.formats import FORMATTERS
from mamf.statistics import Repeatability, summarize_samples

SHAPES = (MatmulShape(1024, 1024, 1024), MatmulShape(2048, 1024, 1024))
ATTENTION = AttentionShape(1, 8, 8, 512, 512, 64, 64)
PLAN = sweep_plan(SHAPES, MatmulProblem())
FIND_PLAN = search_plan(MatmulProblem(), ("torch.mm",), MatmulGrid((1024,), (1024,), (1024,)), ("burst",))
ATTENTION_PLAN = kernels_plan("attention", (ATTENTION,), (AttentionProblem(),), ("eager",))


def make_header(plan=PLAN, device_name="H100", uuid_hash="aa"):
    return {
        "schema": 5,
        "tool": {"name": "mamf", "version": "0", "commit": None},
        "device": {"backend": "cuda", "index": 0, "name": device_name, "vendor": "NVIDIA", "uuid_hash": uuid_hash},
        "timer": "device events",
        "environment": {"packages": {"torch": "2.11"}},
        "kernel": "torch.mm",
        "plan": make_plan_record(plan),
    }


def make_row(seconds=1.0, shape=SHAPES[0], count=8, spread=0.001, **fields):
    """Return a row with a median of ``seconds`` and ``count`` samples, which deviate by up to the share ``spread``."""
    samples = tuple(seconds * (1 + spread * (2 * number / max(1, count - 1) - 1)) for number in range(count))
    defaults = {
        "kernel": "torch.mm",
        "problem": MatmulProblem(),
        "regime": "burst",
        "ranking_statistic": "median",
        "status": "ok",
    }
    return Measurement(shape=shape, summary=summarize_samples(samples), samples=samples, **defaults | fields)


def make_failed_row(**fields):
    return replace(make_row(**fields), status="out_of_memory", summary=None, samples=(), reason="because")


def make_log(*rows, name="a.jsonl", plan=PLAN, **device):
    return RunLog(Path(name), make_header(plan, **device), list(rows))


def make_attention_row(**fields):
    return make_row(**{"shape": ATTENTION, "problem": AttentionProblem(), "kernel": "eager"} | fields)


@pytest.fixture
def write_log(tmp_path):
    """Return a function that writes a log to a file and returns the path."""

    def write_to_file(log):
        path = tmp_path / log.path.name
        with RunLogWriter.create(path, log.header) as writer:
            for row in log.measurements:
                writer.write("measurement", make_measurement_record(row))
        return str(path)

    return write_to_file


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("check", "verdict"), [("cpu load", "UNDECIDED"), ("host load", "SLOWER")])
def test_rows_of_a_cpu_that_other_work_used_are_undecided(check, verdict):
    idle_log, busy_log = make_log(make_row(1.0)), make_log(make_row(15.0))
    busy_log.header["findings"] = [f"WARN {check}: 60 % busy; rates are lower"]
    comparison = compare_logs(idle_log, busy_log)
    assert [pair.decide_verdict() for pair in comparison.pairs] == [verdict]
    text = FORMATTERS["table"](make_comparison_document(comparison, 0.01))
    assert ("other work used the CPU" in text) is (verdict == "UNDECIDED")


@pytest.mark.parametrize("speed", [2.0, 100.0])
def test_rows_that_depend_on_the_host_stay_undecided_and_do_not_affect_other_rows(speed):
    host_bound = Repeatability(run=0.002, launch_seconds=0.3)
    device_bound = Repeatability(run=0.002)
    shapes = [MatmulShape(size, size, size) for size in (4096, 5120, 6144)]

    common = {"regime": "sustained", "ranking_statistic": "mean", "launch_count": 100}

    def make_sweep(host_speed):
        host_bound_row = make_row(1 / host_speed, repeatability=host_bound, **common)
        device_bound_rows = [make_row(1.0, shape=shape, repeatability=device_bound, **common) for shape in shapes]
        return make_log(host_bound_row, *device_bound_rows)

    comparison = compare_logs(make_sweep(1.0), make_sweep(speed))
    verdicts_by_shape = {pair.a.shape: pair.decide_verdict(0.03) for pair in comparison.pairs}
    assert verdicts_by_shape.pop(str(SHAPES[0])) == "UNDECIDED"
    assert set(verdicts_by_shape.values()) == {"SAME"}
    assert [abs(pooled.ratio - 1) < 0.001 for pooled in comparison.pooled_rows] == [True]
    text = FORMATTERS["table"](make_comparison_document(comparison, 0.03))
    assert "the interval of A or of B is unknown" in text and "longer runs" not in text
    assert "no regression beyond 3 % was found, but 1 row stayed undecided" in text
    assert re.search(r"  -  +UNDECIDED", text), text


@pytest.mark.parametrize(
    ("seconds", "spread", "verdict"),
    [
        (1.0, 0.001, "SAME"),
        (1.005, 0.001, "SAME"),  # certainly slower, but by less than the tolerance
        (1.02, 0.001, "SLOWER"),
        (0.98, 0.001, "FASTER"),
        (1.0, 0.02, "UNDECIDED"),  # too noisy for SAME
        (1.02, 0.02, "UNDECIDED"),
        (1.0095, 0.003, "SLOWER"),  # certainly slower, and perhaps by more than the tolerance
    ],
)
def test_a_verdict_follows_from_the_interval(seconds, spread, verdict):
    (pair,) = compare_logs(make_log(make_row(spread=spread)), make_log(make_row(seconds, spread=spread))).pairs
    assert pair.decide_verdict(0.01) == verdict
    assert pair.ratio == pytest.approx(1 / seconds)


@pytest.mark.parametrize(("count", "verdict"), [(1, "UNDECIDED"), (2, "UNDECIDED"), (3, "SLOWER")])
def test_fewer_than_three_samples_prove_nothing(count, verdict):
    (pair,) = compare_logs(make_log(make_row(count=count)), make_log(make_row(2.0, count=count))).pairs
    assert pair.decide_verdict(0.01) == verdict


def format_comparison(comparison, top=0):
    return FORMATTERS["table"](make_comparison_document(comparison, 0.01, top), None)


def test_a_row_whose_interval_is_wider_than_the_tolerance_is_too_short_to_decide():
    short_logs = make_log(make_row(20e-6, spread=0.001)), make_log(make_row(20e-6, spread=0.001))
    (pair,) = compare_logs(*short_logs).pairs
    assert (pair.decide_verdict(0.01), pair.was_measured_too_briefly(0.01)) == ("UNDECIDED", True)
    assert "the interval is wider than +-1 %: longer runs, or more of them, can decide" in format_comparison(
        compare_logs(*short_logs)
    )
    assert compare_logs(*short_logs).rows()[0]["is_too_short"] is True
    shapes = [MatmulShape(1024 * number, 1024, 1024) for number in range(1, 99)]
    a, b = (make_log(*(make_row(seconds, shape) for shape in shapes)) for seconds in (1.0075, 1.0))
    precise_pair = compare_logs(a, b).pairs[0]
    assert (precise_pair.decide_verdict(0.01), precise_pair.was_measured_too_briefly(0.01)) == ("UNDECIDED", False)


@pytest.mark.parametrize("tolerance", [0.003, 0.01, 0.03])
def test_each_undecided_row_has_one_reason(tolerance):
    seconds_by_shape = {MatmulShape(1024 * number, 1024, 1024): 1 + 0.002 * number for number in range(1, 9)}
    counts = {shape: 1 if shape.m == 1024 else 8 for shape in seconds_by_shape}
    a, b = (
        make_log(*(make_row(changed_seconds.get(shape, 1.0), shape, counts[shape]) for shape in seconds_by_shape))
        for changed_seconds in ({}, seconds_by_shape)
    )
    reasons = (
        "too few samples to decide",
        "does not contain 1",
        "longer runs, or more of them",
        "may be larger or smaller",
    )
    pairs = [pair for pair in compare_logs(a, b).pairs if pair.decide_verdict(tolerance) == "UNDECIDED"]
    assert pairs
    for pair in pairs:
        remarks = " ".join(yield_pair_remarks(pair, tolerance))
        assert sum(reason in remarks for reason in reasons) == 1


def test_a_comparison_without_decided_rows_says_so():
    noisy_log = make_log(make_row(spread=0.5))
    assert "every row is undecided: the remarks" in format_comparison(compare_logs(noisy_log, noisy_log))
    assert "no regression" not in format_comparison(compare_logs(noisy_log, noisy_log))


def test_the_table_shows_rows_that_differ_first_and_counts_the_others():
    shapes = [MatmulShape(1024 * number, 1024, 1024) for number in range(1, 9)]
    seconds_by_shape = {shapes[6]: 1.5, shapes[7]: 0.5}
    a, b = (
        make_log(*(make_row(changed_seconds.get(shape, 1.0), shape) for shape in shapes))
        for changed_seconds in ({}, seconds_by_shape)
    )
    table = format_comparison(compare_logs(a, b))
    assert [line.split()[-1] for line in table.splitlines() if "x1024x1024 " in line][:2] == ["SLOWER", "FASTER"]
    assert "5 more rows (--top all shows all)" in table
    assert "8 rows: 6 SAME, 1 FASTER, 1 SLOWER, 0 UNDECIDED" in table
    assert "more rows" not in format_comparison(compare_logs(a, b), top=None)


# -- pairing -----------------------------------------------------------------------------------------------------------


def test_rates_with_different_units_each_have_their_unit():
    results = Path(__file__).parents[2] / "results"
    name = "overlap-bfloat16-sustained-20261124"
    logs = [
        read_run_log(results / folder / f"{name}-{time}.jsonl")
        for folder, time in (("nvidia-h200", "023603"), ("nvidia-h100-80gb-hbm3", "192132"))
    ]
    text = FORMATTERS["table"](make_comparison_document(compare_logs(logs[:1], logs[1:], True), 0.01, None))
    assert "\nrates; B/A above 1" in text
    for work, unit in (("products", "TFLOPS"), ("other", "TB/s")):
        lines = [line for line in text.splitlines() if line.startswith(f"{work} ")]
        assert lines and all(line.count(f" {unit} ") == 2 for line in lines)


def test_rows_are_paired_by_shape_and_slowest_first():
    a = make_log(make_row(1.0), make_row(2.0, SHAPES[1]))
    b = make_log(make_row(2.0, SHAPES[1]), make_row(1.5))
    assert [(pair.a.shape, round(pair.ratio, 3)) for pair in compare_logs(a, b).pairs] == [
        ("1024x1024x1024", 0.667),
        ("2048x1024x1024", 1.0),
    ]


def test_rows_with_different_seeds_are_paired_and_reference_rows_are_left_out():
    a = make_log(make_row(), make_row(9.0, is_reference=True))
    b = make_log(make_row(problem=MatmulProblem(seed=7)), make_row(1.0, SHAPES[1], is_reference=True))
    comparison = compare_logs(a, b)
    assert len(comparison.pairs) == 1
    assert comparison.rows_only_in_a == comparison.rows_only_in_b == ()


def test_logs_of_one_kernel_each_are_paired_across_kernels_with_a_note():
    comparison = compare_logs(make_log(make_row()), make_log(make_row(kernel="cublaslt")))
    assert str(comparison.ignored_differences[0]) == "kernel torch.mm against cublaslt"
    assert "kernel torch.mm against cublaslt" in FORMATTERS["table"](make_comparison_document(comparison, 0.01), None)


def test_several_kernels_are_paired_by_name():
    a = make_log(make_attention_row(), make_attention_row(kernel="flex"), plan=ATTENTION_PLAN)
    b = make_log(make_attention_row(kernel="flex"), make_attention_row(kernel="sdpa"), plan=ATTENTION_PLAN)
    comparison = compare_logs(a, b)
    assert [pair.a.kernel for pair in comparison.pairs] == ["flex"]
    assert [entry.kernel for entry, _ in comparison.rows_only_in_a] == ["eager"]
    assert [entry.kernel for entry, _ in comparison.rows_only_in_b] == ["sdpa"]


def test_a_row_that_fails_in_one_log_is_reported():
    comparison = compare_logs(
        make_log(make_row(), make_row(shape=SHAPES[1])), make_log(make_row(), make_failed_row(shape=SHAPES[1]))
    )
    assert len(comparison.pairs) == 1
    assert comparison.rows_only_in_a[0][1].status == "out_of_memory"
    assert "1 only in A (1 out_of_memory in B), 0 only in B" in FORMATTERS["table"](
        make_comparison_document(comparison, 0.01), None
    )


# -- logs of mamf find -------------------------------------------------------------------------------------------------


def make_rounds(seconds, shape, count=6, **fields):
    """Return the rows of one candidate: one row per round, each 0.1 % slower than the one before."""
    return [
        make_row(seconds * (1 + 0.001 * number), shape, phase="confirm", round_number=number, **fields)
        for number in range(1, count + 1)
    ]


def test_two_finds_compare_their_ceilings_whatever_the_shape():
    scout = make_row(0.1, MatmulShape(4096, 1024, 1024), phase="scout")
    a = make_log(scout, *make_rounds(1.0, SHAPES[0]), *make_rounds(3.0, SHAPES[1]), plan=FIND_PLAN)
    b = make_log(*make_rounds(2.0, SHAPES[1]), *make_rounds(9.0, SHAPES[0]), plan=FIND_PLAN)
    (pair,) = compare_logs(a, b).pairs
    assert (pair.a.shape, pair.b.shape) == ("1024x1024x1024", "2048x1024x1024")
    assert pair.ratio == pytest.approx(1.0)


def test_a_round_is_a_sample_of_a_candidate():
    log = make_log(*make_rounds(1.0, SHAPES[0]), *make_rounds(1.0, SHAPES[1], count=2), plan=FIND_PLAN)
    (entry,) = list_compared_rows(log)
    assert entry.shape == "1024x1024x1024"  # the other shape has only two rounds, which are too few to confirm it
    rates = sorted(each.compute_rate("median") for each in log.measurements if each.shape == SHAPES[0])
    assert entry.rate == pytest.approx((rates[2] + rates[3]) / 2)
    assert entry.interval.low < rates[0] and entry.interval.high > rates[-1]


# -- refused comparisons -----------------------------------------------------------------------------------------------

INCOMPARABLE_LOGS = {
    "device H100 against H200": make_log(make_row(), name="b.jsonl", device_name="H200", uuid_hash="bb"),
    "card H100 aa against bb": make_log(make_row(), name="b.jsonl", uuid_hash="bb"),
    "regime burst against sustained": make_log(make_row(regime="sustained"), name="b.jsonl"),
    "dtype bfloat16 against float16": make_log(make_row(problem=MatmulProblem("float16", "float16")), name="b.jsonl"),
    "layout nt against nn": make_log(make_row(problem=MatmulProblem(layout="nn")), name="b.jsonl"),
}


@pytest.mark.parametrize(
    ("difference", "other_log"), INCOMPARABLE_LOGS.items(), ids=[text.split()[0] for text in INCOMPARABLE_LOGS]
)
def test_logs_with_a_difference_that_a_ratio_would_hide_are_refused_without_anyway(difference, other_log):
    with pytest.raises(IncomparableError, match=difference):
        compare_logs(make_log(make_row()), other_log)
    comparison = compare_logs(make_log(make_row()), other_log, anyway=True)
    assert len(comparison.pairs) == 1
    (line,) = [
        line
        for line in FORMATTERS["table"](make_comparison_document(comparison, 0.01), None).splitlines()
        if "anyway" in line
    ]
    assert difference in line


def make_row_with_cycles(used_cycle_share, seconds=1.0, **fields):
    return make_row(seconds, conditions=Conditions(true_clock_hz=1.6e9, used_cycle_share=used_cycle_share), **fields)


@pytest.mark.parametrize(("used_cycle_share", "verdict"), [(0.975, "SAME"), (0.90, "SLOWER"), (1.0, "FASTER")])
def test_rows_of_different_cards_are_compared_by_the_cycles_that_they_used(used_cycle_share, verdict):
    a = make_log(make_row_with_cycles(0.973), make_row(shape=SHAPES[1]))
    b = make_log(
        make_row_with_cycles(used_cycle_share, seconds=1.2),
        make_row(shape=SHAPES[1]),
        device_name="H200",
        uuid_hash="bb",
    )
    comparison = compare_logs(a, b)
    (pair,) = comparison.pairs
    assert (pair.a.rate, pair.b.rate, pair.a.unit) == (97.3, pytest.approx(100 * used_cycle_share), "% of cycles")
    assert pair.decide_verdict(0.03) == verdict
    text = FORMATTERS["table"](make_comparison_document(comparison, 0.03), None)
    assert "cycles in percent" in text and "device H100 against H200" in text
    assert compare_logs(a, b, anyway=True).pairs[0].a.unit == "TFLOPS"


def test_a_share_of_cycles_is_not_scaled_to_the_speed_of_its_device():
    """Check two devices of one run. The second device is 3 % faster, but only because its clock is 3 % higher."""
    (first,) = list_compared_rows(make_log(make_row_with_cycles(0.973)))
    second = replace(first, device="bb", device_speed=1.03)
    assert second.convert_to_cycle_share().scale_to_device_of(first.convert_to_cycle_share()).rate == pytest.approx(
        97.3
    )
    assert second.scale_to_device_of(first).rate == pytest.approx(first.rate / 1.03)


def test_warm_and_flushed_caches_are_not_compared():
    warm_log = make_log(make_attention_row(), plan=replace(ATTENTION_PLAN, flush=False))
    with pytest.raises(IncomparableError, match="caches flushed against warm"):
        compare_logs(make_log(make_attention_row(), plan=ATTENTION_PLAN), warm_log)


def test_a_log_of_an_unknown_card_can_be_compared():
    assert compare_logs(make_log(make_row(), uuid_hash=None), make_log(make_row())).pairs


def test_software_that_differs_is_reported_but_not_refused():
    newer_log = make_log(make_row())
    newer_log.header = copy.deepcopy(newer_log.header)
    newer_log.header["environment"]["packages"]["torch"] = "2.12"
    newer_log.header["device"]["driver"] = "590"
    text = FORMATTERS["table"](make_comparison_document(compare_logs(make_log(make_row()), newer_log), 0.01), None)
    assert "the runs differ in torch 2.11 against 2.12, driver unknown against 590" in text


def test_a_log_is_not_compared_with_itself_silently(write_log, capsys):
    path = write_log(make_log(make_row()))
    assert main(["compare", path, path]) == 0
    assert "A and B are the same log, so no row can differ" in capsys.readouterr().err


@pytest.mark.parametrize("anyway", [False, True])
def test_no_common_row_is_refused(anyway):
    other_log = make_log(make_row(shape=SHAPES[1]), make_failed_row(), name="b.jsonl")
    with pytest.raises(
        IncomparableError,
        match=r"the two logs have no measured row in common: a.jsonl has, for example, a row of shape 1024x",
    ):
        compare_logs(make_log(make_row()), other_log, anyway)


@pytest.mark.parametrize("anyway", [False, True])
def test_attention_is_not_compared_with_matmul(anyway):
    with pytest.raises(IncomparableError, match="A measured matmul, but B measured attention"):
        compare_logs(make_log(make_row()), make_log(make_attention_row(), plan=ATTENTION_PLAN), anyway)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "options", "code"),
    [(1.0, [], 0), (1.02, [], 3), (0.9, [], 0), (1.02, ["--tolerance", "5%"], 0), (1.008, ["--tolerance", "0.1%"], 3)],
)
def test_the_exit_code_is_3_for_a_regression(write_log, capsys, seconds, options, code):
    a, b = (
        write_log(make_log(make_row(spread=0.0001))),
        write_log(make_log(make_row(seconds, spread=0.0001), name="b.jsonl")),
    )
    assert main(["compare", a, b, *options]) == code
    assert ("slower by more than" in capsys.readouterr().out) == (code == 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a.jsonl", "nothing.jsonl"], "cannot read nothing.jsonl"),
        (["a.jsonl", "b.jsonl"], "regime burst against sustained; add --anyway to compare"),
        (["a.jsonl"], "'mamf compare' takes two logs, not 1: for several runs per side, write A1 A2 --against B1 B2"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(write_log, run, arguments, complaint):
    write_log(make_log(make_row()))
    write_log(make_log(make_row(regime="sustained"), name="b.jsonl"))
    assert_refused(run("compare", *arguments), complaint)


def test_the_warnings_that_a_log_records_are_shown_with_the_verdict():
    busy_log = make_log(make_row())
    busy_log.header["findings"] = ["ok   power limit: 700 W", "WARN cpu load: the CPU is 60 % busy; rates scatter"]
    text = FORMATTERS["table"](make_comparison_document(compare_logs(make_log(make_row()), busy_log), 0.01), None)
    assert "\nB: WARN cpu load: the CPU is 60 % busy\n" in text and "A: WARN" not in text
