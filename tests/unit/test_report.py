"""Test the report of a run as text, CSV and JSON, and how it compares kernels."""

import json
from dataclasses import replace

import pytest
from made_plans import setup_of, sweep_plan
from made_rates import ceiling
from rendering import render

from mamf.engine.strategies.rows import OneKernelStrategy
from mamf.logs.recording import RunEnd, make_plan_record
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape, matmul_grid
from mamf.report import kernels
from mamf.report.kernels import choose_baselines, compute_speed_up, find_best_kernels, make_best_kernel_table
from mamf.report.rows import list_row_remarks, make_summary_record, select_ranked_rows
from mamf.report.shares import ShareCalculator
from mamf.statistics import Interval
from mamf.testing import SimulatedMatmul

PLAN = sweep_plan(
    tuple(matmul_grid([1024, 2048, 4096], [2048], [1024])), MatmulProblem(), reference=MatmulShape(8192, 8192, 8192)
)
HEADER = {
    "device": {
        "name": "NVIDIA H100 80GB HBM3",
        "vendor": "nvidia",
        "backend": "cuda",
        "index": 0,
        "compute_units": 132,
        "power_limit_watts": 700.0,
        "driver": "580",
    },
    "environment": {"packages": {"torch": "2.11"}},
    "timer": "device events",
    "kernel": "simulated.mm",
    "plan": make_plan_record(PLAN),
}


@pytest.fixture
def rows(backend):
    backend.faults[PLAN.shapes[0]] = "wrong_result"
    return list(OneKernelStrategy(setup_of(PLAN, [SimulatedMatmul()], backend)).yield_results())


def test_the_text_names_regime_interval_peak_and_how_it_ended(rows):
    text = render("table", rows, HEADER, make_summary_record(rows, RunEnd("interrupted", "by the user", 2.0, 5)), top=1)
    assert "best burst, bfloat16: " in text
    assert "95 % repeat interval: " in text
    assert "of 989, the dense bf16 peak of H100 SXM" in text
    assert "simulated.mm 1024x2048x1024: wrong_result: relative error" in text
    assert "interrupted: by the user; 2 measurements in 2.0 s; 5 measurements left: continue with --resume" in text
    assert "--top all" in text


def test_a_default_that_the_run_compares_with_another_value_is_named(rows):
    problems = {"problems": [*HEADER["plan"]["problems"], {**HEADER["plan"]["problems"][0], "layout": "nn"}]}
    text = render("table", rows, {**HEADER, "plan": {**HEADER["plan"], **problems}}, None)
    assert "\nburst, bfloat16, layout nt\n" in text
    assert "\nbest burst, bfloat16, layout nt: " in text
    assert "layout" not in render("table", rows, HEADER, None)


def test_an_out_of_memory_row_has_a_short_remark_and_its_reason_in_json(rows):
    reason = "CUDA out of memory. Tried to allocate 99 GiB. " * 5
    failed = replace(next(row for row in rows if not row.ok), status="out_of_memory", reason=reason)
    assert "simulated.mm 1024x2048x1024: out of memory\n" in render("table", [failed, rows[-1]], HEADER, None)
    assert [row["reason"] for row in json.loads(render("json", [failed], HEADER, None))["measurements"]] == [reason]


def test_csv_and_json_leave_the_ends_of_an_unknown_interval_empty(rows):
    row = next(row for row in rows if row.ok)
    noisy = replace(row, repeatability=replace(row.repeatability, run=0.9))
    (known,), (unknown,) = (
        json.loads(render("json", [measurement], HEADER, None))["measurements"] for measurement in (row, noisy)
    )
    for key in ("rate_low_tflops", "rate_high_tflops", "low_ms", "high_ms"):
        assert known[key] > 0 and unknown[key] is None


# -- comparisons of kernels --------------------------------------------------------------------------------------------


@pytest.fixture
def kernel_rows(rows):
    """Return rows of two kernels on two shapes.

    The second kernel is 25 % faster on the first shape, and does not support the other shape.
    """
    first, second = (row for row in select_ranked_rows(rows))
    summary = replace(first.summary, **{name: getattr(first.summary, name) / 1.25 for name in ("mean", "median")})
    faster = replace(first, kernel="faster", summary=summary)
    unsupported = replace(
        second, kernel="faster", status="unsupported", reason="no such shape", summary=None, samples=()
    )
    return [first, second, faster, unsupported]


def test_the_best_kernel_of_each_shape_is_named(kernel_rows):
    assert [(best.row.kernel, best.runner_up and best.runner_up.kernel) for best in find_best_kernels(kernel_rows)] == [
        ("faster", "simulated.mm"),
        ("simulated.mm", None),
    ]
    shares = ShareCalculator(HEADER)
    records = make_best_kernel_table(find_best_kernels(kernel_rows), shares, None).make_records()
    assert [record["ahead"] for record in records] == [pytest.approx(0.25), None]
    assert find_best_kernels(kernel_rows[:2]) == []  # only one kernel
    interrupted = {**HEADER, "plan": {**HEADER["plan"], "kernels": ["simulated.mm", "faster", "not measured yet"]}}
    assert "best kernel per shape" not in render("table", kernel_rows, interrupted, None)
    rows_with_unfinished_shape = [*kernel_rows, replace(kernel_rows[0], shape=MatmulShape(64, 64, 64))]
    assert "not all kernels were measured in 1 other case (" in render(
        "table", rows_with_unfinished_shape, HEADER, None
    )
    assert "not all kernels were measured" not in render("table", kernel_rows, HEADER, None)
    tied_table = make_best_kernel_table(
        find_best_kernels([kernel_rows[0], replace(kernel_rows[0], kernel="same")]), shares, None
    )
    assert [record["ahead"] for record in tied_table.make_records()] == [None]
    assert [column.format_cell(tied_table.rows[0]) for column in tied_table.columns if column.title == "ahead %"] == [
        "tied"
    ]
    lines = render("table", kernel_rows, HEADER, None).splitlines()
    heading_index = next(index for index, line in enumerate(lines) if line.startswith("best kernel per shape"))
    assert [line.split()[1] for line in lines[heading_index + 2 : heading_index + 4]] == ["faster", "simulated.mm"]
    assert [best["kernel"] for best in json.loads(render("json", kernel_rows, HEADER, None))["best_kernels"]] == [
        "faster",
        "simulated.mm",
    ]


@pytest.mark.parametrize("rank", ["second", "last"])
def test_a_best_kernel_is_doubted_if_any_kernel_of_its_shape_ran_on_a_device_that_drifted_far(
    kernel_rows, monkeypatch, rank
):
    slowest = replace(
        kernel_rows[0],
        kernel="slowest",
        samples=tuple(2 * seconds for seconds in kernel_rows[0].samples),
    )
    table = make_best_kernel_table(find_best_kernels([*kernel_rows, slowest]), ShareCalculator(HEADER), None)
    assert table.notes == []
    drifted = kernel_rows[0] if rank == "second" else slowest
    monkeypatch.setattr(kernels, "has_card_drifted", lambda row, ceilings, limit: row is drifted and limit == 0.1)
    (note,) = table.notes
    remark = "device speed drifted by more than 10 % and out of the ceiling's interval: another kernel may be best"
    assert note == f"{drifted.shape}: {remark}"


def test_a_lead_is_unknown_with_its_reason_if_the_interval_of_either_kernel_is_unknown(kernel_rows):
    noisy = replace(kernel_rows[0], repeatability=replace(kernel_rows[0].repeatability, run=0.9))
    table = make_best_kernel_table(find_best_kernels([noisy, *kernel_rows[1:]]), ShareCalculator(HEADER), None)
    assert [column.format_cell(table.rows[0]) for column in table.columns if column.title == "ahead %"] == ["unknown"]
    reason = "ahead % is unknown, because the interval of one of the two kernels is unknown"
    assert table.notes == [f"{noisy.shape}: {reason}"]


def test_a_speed_up_is_over_the_named_kernel_else_eager_else_the_slowest(kernel_rows):
    slow, _, faster, _ = kernel_rows
    shape = slow.regime, slow.problem, slow.shape
    assert choose_baselines(kernel_rows, None)[shape] is slow
    assert choose_baselines(kernel_rows, "faster")[shape] is faster
    assert choose_baselines(kernel_rows, "nobody")[shape] is None
    assert choose_baselines([*kernel_rows, replace(faster, kernel="eager")], None)[shape].kernel == "eager"
    assert choose_baselines(kernel_rows[:2], None) == {}
    assert compute_speed_up(faster, slow) == pytest.approx(1.25)
    assert compute_speed_up(kernel_rows[3], slow) is compute_speed_up(faster, None) is None


def test_remarks_name_the_kernel_that_ran_and_a_card_that_drifted(rows):
    (row, *_) = select_ranked_rows(rows)
    assert "ran cudnn" in list_row_remarks(replace(row, details={"ran": "cudnn"}), ShareCalculator(HEADER))
    row_ceiling = ceiling(800.0, problem=row.problem, regime=row.regime, shape=row.shape)
    shares = ShareCalculator(HEADER, {(row.problem.dtype, row.regime): row_ceiling})
    drift_remarks = {}
    for reference_tflops in (799.0, 770.0, 700.0):
        remarks = list_row_remarks(replace(row, details={"reference_tflops": reference_tflops}), shares)
        drift_remarks[reference_tflops] = [text for text in remarks if "device speed drifted" in text]
    assert drift_remarks[799.0] == []
    assert any("the drift of the device is unknown" in text for text in list_row_remarks(row, shares))
    assert not any("drift" in text for text in list_row_remarks(row, ShareCalculator(HEADER)))
    assert ["more than 1 %" in text and "do not compare" not in text for text in drift_remarks[770.0]] == [True]
    assert ["more than 10 %" in text and "do not compare" in text for text in drift_remarks[700.0]] == [True]
    uncertain_ceiling = replace(
        row_ceiling, interval=Interval(720.0, 960.0, 0.95)
    )  # wider above the ceiling than below it
    shares = ShareCalculator(HEADER, {(row.problem.dtype, row.regime): uncertain_ceiling})
    for reference_tflops, is_outside in ((770.0, False), (950.0, False), (700.0, True), (990.0, True)):
        remarks = list_row_remarks(replace(row, details={"reference_tflops": reference_tflops}), shares)
        assert any("device speed drifted" in text for text in remarks) == is_outside
