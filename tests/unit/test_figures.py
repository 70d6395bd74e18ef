"""Check that the figures in README.md and docs/ agree with their logs, and test tools/figures.py, which writes them."""

import json
import statistics

import figures
import pytest
from figure_tables import ROOT, make_table

H100 = "results/nvidia-h100-80gb-hbm3"
#: Logs of three runs that each measured the same three matmuls in sustained. mamf subtracts no timer overhead from
#: sustained samples, so the tests can compute rates from the samples only.
REPEATS = [f"{H100}/sweep-torch-mm-bfloat16-sustained-20261121-{time}.jsonl" for time in ("031610", "031643", "031715")]
NO_LOG_COMMENT = "<!-- not from a log: simulated by a tool -->"
TABLE = "| shape | TFLOPS |\n|:--|--:|\n| 8192x8192x8192 | 679.2 |\n"


@pytest.fixture
def write_page(tmp_path):
    """Return a function that writes a page into an empty folder and returns its path."""

    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write


def read_median_seconds(path, shape):
    """Return the median of a row's samples. Read the log as JSON, without the library's readers."""
    records = [json.loads(line) for line in (ROOT / path).read_text().splitlines()]
    (samples,) = [
        record["samples_seconds"]
        for record in records
        if record["record"] == "measurement" and [record["shape"][name] for name in "mnk"] == shape
    ]
    return statistics.median(samples)


def split_row(table_text, row):
    """Return the cells of a row of a markdown table. ``row``: the index of the row below the head, from 0."""
    return [cell.strip() for cell in table_text.splitlines()[2 + row].strip("|").split("|")]


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.docs
@pytest.mark.parametrize("path", figures.PAGES, ids=lambda path: path.stem)
def test_no_figure_of_a_page_is_stale_and_each_has_a_source(path, capsys):
    assert figures.main(["--check", str(path)]) == 0, capsys.readouterr().err


def test_a_stale_table_is_reported_and_rewritten(write_page, capsys):
    path = write_page(
        f"<!-- figures: matrix rows=shape columns=log\n{REPEATS[0]}\n-->\n{TABLE}<!-- end of figures -->\n"
    )
    before = path.read_text()
    assert figures.main(["--check", str(path)]) == 1
    error = capsys.readouterr().err
    assert "-| 8192x8192x8192 | 679.2 |" not in error  # this row agrees with the log, so the diff must not remove it
    assert "-| shape | TFLOPS |" in error and "+| shape | 1 |" in error
    assert "run 'python tools/figures.py'" in error
    assert path.read_text() == before
    assert figures.main([str(path)]) == 0
    assert "| 8192x8192x8192 | 679.2 |" in path.read_text()
    assert figures.main(["--check", str(path)]) == 0


def test_a_stale_figure_in_running_text_is_reported_and_rewritten(write_page, capsys):
    path = write_page(f'The best is [1.0][best] TFLOPS.\n\n[best]: {ROOT / REPEATS[0]} "sustained best"\n')
    assert figures.main(["--check", str(path)]) == 1
    assert "+The best is [719.5][best] TFLOPS." in capsys.readouterr().err
    assert figures.main([str(path)]) == 0
    assert "The best is [719.5][best] TFLOPS." in path.read_text()


# -- figures without a log ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        "```\nbest 679.2 TFLOPS\n```\n",
        "It reaches 679.2 TFLOPS on an H100.\n",
        f"{NO_LOG_COMMENT}\n\nA paragraph between.\n\n{TABLE}",
        "| loss |\n|--:|\n| 3 % |\n",
    ],
)
def test_figures_without_a_source_are_refused(write_page, text, capsys):
    assert figures.main(["--check", str(write_page(text))]) == 1
    assert "no log backs" in capsys.readouterr().err


# -- contents of tables ------------------------------------------------------------------------------------------------


def test_a_matrix_has_the_rates_of_the_raw_samples():
    table_text = make_table(f"matrix rows=shape columns=log {' '.join(REPEATS)}")
    rates = [2 * 8192**3 / read_median_seconds(path, [8192] * 3) / 1e12 for path in REPEATS]
    assert split_row(table_text, 1) == ["8192x8192x8192", *(f"{rate:.1f}" for rate in rates)]
