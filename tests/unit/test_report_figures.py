"""Reports show the figures that they showed before, whatever the layout. All logs: tools/report_figures.py."""

import json
from dataclasses import replace

import pytest
import report_figures
from report_figures import EXPECTED, ROOT, differences, document_of, figures_of

from mamf.report.document import Table

EXPECTED_FIGURES = json.loads(EXPECTED.read_text())


def sample():
    """The smallest log of each command, dtype and regime."""
    smallest = {}
    for path in sorted(EXPECTED_FIGURES, key=lambda path: (ROOT / path).stat().st_size):
        kind = (ROOT / path).name.partition("-202")[0]
        if not kind.startswith("sweep-cublaslt"):
            smallest.setdefault(kind, path)
    return sorted(smallest.values())


@pytest.mark.parametrize("path", sample())
def test_a_report_shows_the_same_figures(path):
    assert list(differences(EXPECTED_FIGURES[path], figures_of(document_of(ROOT / path)))) == []


def test_a_changed_figure_a_missing_column_and_a_missing_line_are_seen():
    path = "results/nvidia-h200/sweep-f-scaled_mm-fp8_1x128_1x128-burst-20261121-212922.jsonl"
    document, expected = document_of(ROOT / path), EXPECTED_FIGURES[path]
    number, table = next((number, each) for number, each in enumerate(document.blocks) if isinstance(each, Table))

    def wrong(changed):
        blocks = [*document.blocks[:number], changed, *document.blocks[number + 1 :]]
        return " ".join(differences(expected, figures_of(replace(document, blocks=blocks))))

    (rate,) = [each for each in table.columns if each.name == "rate_mean_tflops"]
    others = [each for each in table.columns if each is not rate]
    read, shorter = rate.read, replace(table, columns=others)
    assert wrong(table) == ""
    assert "rate_mean_tflops: missing" in wrong(shorter)
    changed = replace(rate, read=lambda row: read(row) and read(row) * 1.0002)
    assert "rows, rate_mean_tflops: " in wrong(replace(table, columns=[*others, changed]))
    (watts,) = [each for each in table.columns if each.name == "power_watts"]
    rounded = replace(watts, format=lambda value: f"{value:.2f}")
    others = [each for each in table.columns if each is not watts]
    assert wrong(replace(table, columns=[*others, rounded])).startswith("shown rows, power_watts: ")
    nothing = figures_of(replace(document, blocks=document.blocks[:-1]))
    assert any(line.startswith("numbers without a line: ") for line in differences(expected, nothing))


def test_the_tool_names_the_log_and_the_figure(monkeypatch, capsys, tmp_path):
    path = min(EXPECTED_FIGURES, key=lambda path: (ROOT / path).stat().st_size)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.jsonl").write_text((ROOT / path).read_text())
    monkeypatch.setattr(report_figures, "ROOT", tmp_path)
    monkeypatch.setattr(report_figures, "EXPECTED", tmp_path / "expected.json")
    assert report_figures.main(["--write"]) == 0
    assert report_figures.main([]) == 0
    text = (tmp_path / "expected.json").read_text()
    (tmp_path / "expected.json").write_text(text.replace('"status":"', '"status":"9'))
    assert report_figures.main([]) == 1
    assert "results/a.jsonl: rows, status: " in capsys.readouterr().out
