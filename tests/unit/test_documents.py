"""Test columns, tables and documents in every report format."""

import csv
import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mamf.report.document import (
    Answer,
    Column,
    Document,
    Lines,
    Table,
    choose_unit,
    format_four_digits,
    format_percent,
    format_rate,
    make_text_table,
)
from mamf.report.formats import FORMATTERS

ROWS = [
    {"name": "fast_one", "rate": 841.26, "share": 0.813, "note": "hot"},
    {"name": "slow", "rate": 12.0, "share": None, "note": "hot"},
    {"name": "idle", "rate": 3.0, "share": 0.1, "note": ""},
]
COLUMNS = [
    Column("kernel", "kernel", lambda row: row["name"], is_left_aligned=True),
    Column("rate_tflops", "TFLOPS", lambda row: row["rate"], format_four_digits),
    Column("watts", "power", lambda row: None, drop_priority=5),
    Column("rank", "a long heading", lambda row: 1, drop_priority=2),
    Column("share_of_peak", "% of peak", lambda row: row["share"], format_percent, drop_priority=1),
    Column("rate_mean_tflops", "", lambda row: row["rate"] / 2),
]


def make_table(**changes):
    remarks = {"get_remarks": lambda row: [row["note"]], "get_label": lambda row: row["name"]}
    return Table(COLUMNS, ROWS, **{"title": "burst", "key": "measurements", **remarks, **changes})


def make_document(*blocks, **changes):
    return Document("run", blocks or (Lines(["on a card"]), make_table(), Answer(["best: fast_one"])), **changes)


def render(format_name, *blocks, width=None, **changes):
    return FORMATTERS[format_name](make_document(*blocks, **changes), width)


def test_a_terminal_shows_aligned_columns_and_each_remark_once():
    assert render("table").splitlines() == [
        "on a card",
        "",
        "burst",
        "kernel    TFLOPS  a long heading  % of peak",
        "fast_one   841.3               1       81.3",
        "slow       12.00               1          -",
        "idle       3.000               1       10.0",
        "fast_one; slow: hot",
        "",
        "best: fast_one",
    ]


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (43, None),
        (42, "a long heading"),
        (27, "a long heading"),
        (26, "a long heading, % of peak"),
        (1, "a long heading, % of peak"),
    ],
)
def test_a_narrow_terminal_drops_the_least_important_columns(width, dropped):
    text = render("table", make_table(), width=width)
    assert text.splitlines()[1].startswith("kernel    TFLOPS")
    hidden = f"hidden columns (use --wide): {dropped}"
    assert (hidden in " ".join(text.split())) is bool(dropped)
    assert dropped or "hidden" not in text


def test_hidden_columns_are_named_below_the_tables_that_hide_them():
    narrow_table = Table(COLUMNS[:2], ROWS)
    lines = render(
        "table", make_table(), make_table(), narrow_table, make_table(shown_rows=ROWS[1:2]), width=27
    ).splitlines()
    notes = [(index, line) for index, line in enumerate(lines) if line.startswith("hidden columns")]
    headings = [index for index, line in enumerate(lines) if line.startswith("kernel")]
    assert len(headings) == 4
    assert [sum(index < note for index in headings) for note, _ in notes] == [2, 4]


@pytest.mark.parametrize("format_name", ["table", "markdown", "html"])
def test_an_empty_column_is_left_out_and_not_mentioned(format_name):
    assert "power" not in render(format_name)
    assert "--wide" not in render(format_name)


@pytest.mark.parametrize("format_name", ["table", "markdown", "html"])
def test_the_best_rows_are_shown_and_the_others_counted(format_name):
    text = render(format_name, make_table(max_shown_rows=1))
    assert "idle" not in text
    advice = "(in a terminal, --top all shows all)" if format_name == "html" else "(--top all shows all)"
    assert f"2 more rows {advice}" in text
    assert f"1 more row {advice}" in render(format_name, make_table(max_shown_rows=2))


def test_csv_and_json_have_all_rows_and_columns_with_full_precision():
    blocks = make_table(max_shown_rows=1, shown_rows=ROWS[:2]), Table(COLUMNS[:1], ROWS[:1], key="ceilings")
    content = json.loads(render("json", *blocks, json_data={"header": {"schema": 5}}))
    assert content["header"] == {"schema": 5}
    assert content["ceilings"] == [{"kernel": "fast_one"}]
    assert [row["rate_tflops"] for row in content["measurements"]] == [841.26, 12.0, 3.0]
    assert content["measurements"][0]["watts"] is None
    csv_rows = list(csv.DictReader(io.StringIO(render("csv", *blocks))))
    assert [float(row["rate_mean_tflops"]) for row in csv_rows] == [420.63, 6.0, 1.5]
    assert render("csv", *blocks, main_table_key="ceilings") == "kernel\nfast_one\n"


def test_markdown_has_blank_lines_around_a_table_and_escapes_texts():
    hostile_rows = [{"name": "*a* | _b_ `c`", "rate": 1.0, "share": 1.0, "note": "| x | y |"}]
    lines = render("markdown", replace(make_table(), rows=hostile_rows)).splitlines()
    table_lines = [number for number, line in enumerate(lines) if line.startswith("|")]
    assert table_lines == list(range(table_lines[0], table_lines[0] + 3))
    assert lines[table_lines[0] - 1] == lines[table_lines[-1] + 1] == ""
    assert r"\*a* \| \_b\_ \`c\`" in lines[table_lines[-1]]
    assert r"\| x \| y \|" in lines[-1]


class Page(HTMLParser):
    """A parser that collects the tags and texts of a page. It fails if a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open_tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_html_is_a_whole_page_with_escaped_texts():
    hostile_text = "<script>alert('&')</script>\x1b"
    text = FORMATTERS["html"](
        Document(hostile_text, [Lines([hostile_text], hostile_text), Table(COLUMNS, ROWS, hostile_text)]), None
    )
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert page.tags.count("script") == 1, "the page must contain only its own script, whose hash the policy lists"
    assert page.tags.count("tr") == 4
    assert sum("<script>alert('&')</script>\\x1b" in each for each in page.texts) == 5


@pytest.mark.parametrize(
    ("rate", "unit", "text"),
    [
        (841.26, "TFLOPS", "841.3 TFLOPS"),
        (0.1336, "TFLOPS", "0.1336 TFLOPS"),
        (0.00133, "TFLOPS", "1.330 GFLOPS"),
        (7.87e-05, "TB/s", "78.70 MB/s"),
        (7.87e-06, "TB/s", "7.870 MB/s"),
        (1e-10, "TB/s", "0.1000 kB/s"),
        (0.0, "TB/s", "0.000 TB/s"),
        (12345.6, "TFLOPS", "12346 TFLOPS"),
        (0.0001, "items", "0.0001000 items"),
    ],
)
def test_a_rate_is_formatted_with_a_unit_of_its_size(rate, unit, text):
    assert format_rate(rate, unit) == text


def test_one_unit_fits_all_rates_of_a_table():
    assert choose_unit("TB/s", [3.2, 7.87e-05]) == ("TB/s", 1.0)
    assert choose_unit("TFLOPS", []) == ("TFLOPS", 1.0)


def test_a_narrow_terminal_breaks_a_text_in_the_last_column_and_aligns_its_parts():
    table = make_text_table(("kernel", "on this device"), [("mm", "needs a GPU; use the CPU"), ("x", "available")])
    assert render("table", table, width=22) == (
        "kernel  on this device\nmm      needs a GPU;\n        use the CPU\nx       available\n"
    )


def test_a_narrow_terminal_keeps_both_ends_of_long_names():
    names = [{"name": f"void cutlass::Kernel<tile_128x128>::run_{end}"} for end in ("forward", "backward")]
    columns = [
        Column("kernel", "kernel", lambda row: row["name"], min_characters=16),
        Column("one", "one", lambda row: 1),
    ]
    wide, narrow = (render("table", Table(columns, names), width=width) for width in (80, 24))
    assert "void cutlass::Kernel<tile_128x128>::run_forward" in wide
    assert max(map(len, narrow.splitlines())) <= 24
    assert "forward" in narrow and "backward" in narrow
