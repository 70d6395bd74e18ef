import csv
import io
import json

import pytest
from made_plans import sweep_plan

from mamf.logs.plan_records import plan_record
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape, matmul_grid
from mamf.report import bests, ranked, render, significant, summary_record
from mamf.report.sweeps import COLUMNS, LEFT_ALIGNED, cells, flat_rows, remarks
from mamf.report.text import csv_text, fitted_table, table
from mamf.strategies.shapes import Sweep
from mamf.testing import SimulatedMatmul

PLAN = sweep_plan(
    tuple(matmul_grid([1024, 2048, 4096], [2048], [1024])), MatmulProblem(), reference=MatmulShape(8192, 8192, 8192)
)
HEADER = {
    "device": {
        "name": "NVIDIA H100 80GB HBM3",
        "backend": "cuda",
        "index": 0,
        "compute_units": 132,
        "power_limit_watts": 700.0,
        "driver": "580",
    },
    "environment": {"packages": {"torch": "2.11"}},
    "timer": "device events",
    "kernel": "simulated.mm",
    "plan": plan_record(PLAN),
}


@pytest.fixture
def rows(backend):
    backend.faults[PLAN.shapes[0]] = "wrong_result"
    return list(Sweep(PLAN, SimulatedMatmul(), backend).results())


def test_only_measured_shapes_are_ranked_and_never_a_reference(rows):
    best_first = ranked(rows)
    assert {row.shape for row in best_first} == {PLAN.shapes[2], PLAN.shapes[1]}
    assert best_first[0].best_rate >= best_first[1].best_rate


def test_means_are_over_the_measured_shapes(rows):
    best = bests(rows)["burst"]
    figures = [row.best_rate for row in ranked(rows)]
    assert best.arithmetic_mean == pytest.approx(sum(figures) / 2)
    assert best.geometric_mean == pytest.approx((figures[0] * figures[1]) ** 0.5)


def test_the_table_lines_up_and_keeps_failures(rows):
    lines = table(COLUMNS, [cells(row) for row in rows], LEFT_ALIGNED).splitlines()
    assert len(lines) == len(rows) + 1
    assert any("wrong_result: relative error" in line for line in lines)
    position = lines[0].index("MxNxK")
    assert all(line[position] != " " for line in lines)


def test_csv_has_a_row_a_measurement_with_units_in_the_names(rows):
    read = list(csv.DictReader(io.StringIO(csv_text(flat_rows(rows, {"plan": {}})))))
    assert len(read) == len(rows)
    for cells_read, row in zip(read, rows, strict=True):
        assert cells_read["status"] == row.status
        if row.ok:
            assert float(cells_read["tflops_median"]) == pytest.approx(row.tflops("median"))


def test_json_carries_header_rows_and_summary(rows):
    summary = summary_record(rows, "complete", "", 1.0, 0)
    content = json.loads(render("json", rows, HEADER, summary))
    assert content["summary"]["best"]["burst"]["shape"] == str(ranked(rows)[0].shape)
    assert len(content["measurements"]) == len(rows)


def test_the_text_names_regime_interval_peak_and_how_it_ended(rows):
    text = render("table", rows, HEADER, summary_record(rows, "interrupted", "by the user", 2.0, 5), top=1)
    assert "best burst:" in text
    assert "95 % repeat interval: " in text
    assert "of 989, the dense bf16 peak of H100 SXM" in text
    assert "wrong_result: 1 shape, 1024x2048x1024: relative error" in text
    assert "interrupted: by the user; 2 measured, 5 left to resume in 2.0 s" in text
    assert "--top all" in text


def test_a_log_without_a_summary_was_killed(rows):
    assert "killed" in render("table", rows, HEADER, None)


def test_nothing_measured_is_said(backend):
    assert "nothing was measured" in render("table", [], HEADER, summary_record([], "interrupted", "by the user", 0, 3))


def test_markdown_is_a_table(rows):
    lines = [line for line in render("markdown", rows, HEADER, None, top=None).splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1


def test_cells_never_invent_a_figure(rows):
    failed = next(row for row in rows if row.status == "wrong_result")
    assert cells(failed)[2:6] == ["-"] * 4


@pytest.mark.parametrize(
    ("value", "text"), [(841.26, "841.3"), (805.0, "805.0"), (1591.2, "1591"), (0.13364, "0.1336"), (51.18, "51.18")]
)
def test_figures_have_four_digits(value, text):
    assert significant(value) == text


def test_no_table_wraps_on_a_terminal(rows):
    """What is left out is named, and remarks go below the table, each once."""
    wrong = next(row for row in rows if remarks(row))
    lines = fitted_table(60, COLUMNS, [cells(row) for row in (*rows, wrong)], LEFT_ALIGNED).splitlines()
    drawn = lines[: len(rows) + 2]
    assert max(map(len, drawn)) <= 60
    assert "remarks" not in lines[0]
    left_out = next(line for line in lines if line.startswith("not shown for want of width (--wide shows all): "))
    assert {*lines[0].split(), *left_out.split(": ")[1].split(", "), "remarks"} == set(COLUMNS)
    assert sum(remarks(wrong) in line for line in lines) == 1
