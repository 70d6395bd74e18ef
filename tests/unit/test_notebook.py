"""Test the HTML tables that notebooks show. Text from third-party logs must never become markup."""

from dataclasses import replace

import pytest

import mamf
from mamf.kinds.notebook import render_html
from mamf.measurement import Measurement
from mamf.report.document import Document, make_text_table
from mamf.report.page import render_fragment

MARKUP = "<script>alert('&')</script>"


@pytest.mark.parametrize("name", ["sweep", "find", "attention", "bandwidth"])
def test_a_log_is_a_table(machine, name):
    log = mamf.read_log(f"{name}.jsonl")
    html = log._repr_html_()
    assert "Simulated H100" in html
    assert "complete" in html
    assert html.count("<tr>") >= 2
    best = log.ceilings["burst"] if name == "find" else max(log.measurements, key=lambda row: row.best_rate)
    assert best.kernel in html or str(best.shape) in html


@pytest.mark.parametrize("name", ["sweep", "attention", "bandwidth"])
def test_a_row_is_a_table(machine, name):
    row = mamf.read_log(f"{name}.jsonl").measurements[0]
    assert all(text in row._repr_html_() for text in (row.kernel if name != "sweep" else "burst", str(row.shape)))
    failed = replace(row, status="failed", reason="because", summary=None, samples=())
    assert "failed: because" in failed._repr_html_()


def test_a_ceiling_is_a_table(machine):
    ceiling = mamf.load_ceiling("find.jsonl")
    assert all(text in ceiling._repr_html_() for text in ("burst (MAMF)", "Simulated H100", str(ceiling.shape)))


def test_a_comparison_is_a_table(machine):
    html = mamf.compare("before.jsonl", "after.jsonl")._repr_html_()
    assert html.count(">SAME<") == 2
    assert "2 rows: 2 SAME" in html


def test_text_from_logs_never_becomes_markup(machine):
    log = mamf.read_log("bandwidth.jsonl")
    hostile_row = replace(log.measurements[0], kernel=MARKUP)
    device = {**log.header["device"], "name": MARKUP}
    hostile_log = replace(log, measurements=[hostile_row], header={**log.header, "device": device})
    for value in (hostile_row, hostile_log, replace(mamf.load_ceiling("find.jsonl"), device=MARKUP)):
        assert "<script" not in render_html(value)
        assert "&lt;script&gt;" in render_html(value)
    assert "<script" not in render_fragment(Document(MARKUP, [make_text_table([MARKUP], [[MARKUP]])]))


def test_a_value_without_a_table_is_refused():
    with pytest.raises(TypeError, match="cannot render a int"):
        render_html(1)


def test_reprs_fit_in_a_line(machine):
    log = mamf.read_log("sweep.jsonl")
    row = replace(log.measurements[0], samples=(1e-3,) * 1000)
    values = [row, log, mamf.load_ceiling("find.jsonl"), mamf.compare("before.jsonl", "after.jsonl")]
    assert max(len(repr(value)) for value in values) < 160
    unmeasured = Measurement(row.shape, row.kernel, row.problem, "burst", "median", "out_of_memory", "too large")
    assert "out_of_memory, too large" in repr(unmeasured)
