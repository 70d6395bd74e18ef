"""Test the figures in results/published, which other people published: which are valid, and how mamf reads them."""

import csv
import json
import re
from pathlib import Path

import pytest
from contribution_logs import write
from published_peaks import COLUMNS, read_published

from mamf.contribution.known_ceilings import PUBLISHED_FIGURES_FILE, PUBLISHED_NOTICE_FILE
from mamf.errors import UsageError

RESULTS = Path(__file__).resolve().parents[2] / "results"
PAGE = "https://github.com/stas00/ml-engineering/blob/abc/README.md"


@pytest.fixture
def published():
    return read_published(RESULTS)


def write_figures(folder, *rows, header=COLUMNS):
    path = folder / PUBLISHED_FIGURES_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return path


def make_row(**values):
    row = {**dict.fromkeys(COLUMNS, ""), "accelerator": "A", "vendor": "AMD", "dtype": "int8", "tflops": "1.5"}
    return list({**row, "source": PAGE, **values}.values())


# -- the files of this repository --------------------------------------------------------------------------------------


def test_the_notice_names_each_licensed_source(published):
    notice = (RESULTS / PUBLISHED_NOTICE_FILE).read_text(encoding="utf-8")
    licensed = {
        re.match(r"https://[^/]+/[^/]+/[^/]+", page)[0]: license for page, license in list_licensed_pages(published)
    }
    assert licensed
    for address, license in licensed.items():
        assert f"{address}. {license}, " in notice
    assert f"holds {len(published)} matmul figures" in notice


def list_licensed_pages(published):
    return {(figure["source"], figure["license"]) for figure in published if figure["license"]}


def test_rows_are_unique_and_sorted(published):
    names = [(row["vendor"].casefold(), row["accelerator"].casefold(), row["dtype"]) for row in published]
    assert names == sorted(names)
    assert len({tuple(row.values()) for row in published}) == len(published)


# -- the reader --------------------------------------------------------------------------------------------------------


def test_numbers_are_numbers_and_empty_cells_are_none(tmp_path):
    write_figures(tmp_path, make_row(m="16", power_limit_watts="700.5", statistic='<b>"x"\x1b[2J'))
    (figure,) = read_published(tmp_path)
    assert [figure[name] for name in ("tflops", "m", "n", "power_limit_watts")] == [1.5, 16, None, 700.5]
    assert figure["statistic"] == '<b>"x"\x1b[2J'  # reports escape the text when they print it


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(({"tflops": text}, "not above 0") for text in ("", "nan", "inf", "-1", "0")),
        *(({"k": text}, "invalid literal|not above 0") for text in ("1.5", "0", "-4")),
        *(
            ({"source": text}, "source: .* is not an http or https address")
            for text in (
                "",
                "javascript:alert(1)",
                "http://",
                "ftp://a/b",
                'https://a/"onclick',
                "https://a/ b",
                "//a/b",
            )
        ),
        ({"source": "https://a/\u202eb"}, r"source: 'https://a/\\u202eb' is not"),
    ],
)
def test_a_malformed_row_is_an_error(tmp_path, values, message):
    path = write_figures(tmp_path, make_row(), make_row(**values))
    with pytest.raises(UsageError, match=rf"^cannot read {re.escape(str(path))}: .*({message})"):
        read_published(tmp_path)


def test_the_check_of_results_accepts_only_the_known_files(run, sweep_records):
    results = run.folder / "results"
    write_figures(results, make_row())
    for name in ("README.md", PUBLISHED_NOTICE_FILE, "published/more.csv"):
        (results / name).write_text("")
    (results / "simulated").mkdir()
    write(results / "simulated" / "a.jsonl", sweep_records)
    logs = json.loads(run("results", "check", "results", "--format", "json")[1])["logs"]
    assert [log["path"] for log in logs[1:]] == ["results/published/more.csv"]
