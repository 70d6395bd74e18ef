"""Test that text from logs and devices is readable in a terminal, in CSV and in Markdown, and has no effect there."""

import csv
import io
import os
import re
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mamf.cli import terminal
from mamf.report.document import align_table, format_csv, format_markdown_table
from mamf.text import (
    Markup,
    convert_to_csv_cell,
    escape_invisible_characters,
    escape_markdown,
    escape_markdown_line,
    wrap_line,
)

HOSTILE_TEXT = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\x7f\u202egnp.exe\u2066\u200b\u2028\ud800\n"
ORDINARY_TEXTS = (
    "NVIDIA H100 80GB HBM3",
    "cublaslt[0]",
    "float8_e4m3fn",
    "Übergröße 加速器 😀",
    "4.5 +-1.5 %",
    "81.3 % of 9",
)
FORMULA_SIGNS = "=+-@\uff1d\uff0b\uff0d\uff20"
# _MARKUP matches what GitHub treats as markup. _ESCAPED matches escaped characters and entities. GitHub shows these
# literally, so the test replaces them before it searches for markup.
_ESCAPED = re.compile(r"\\[!-/:-@\[-`{-~]|&(?:lt|amp);")
_MARKUP = re.compile(r"[`|~$<]|\*\S|(?<![^\W_])_|_(?![^\W_])|!\[|\[\^|\]\(|\]\[|&#?\w+;")
any_text = st.text() | st.text(st.sampled_from(" ab1_*[]()!`|~$<>&;#:/\\=+-@.\t\n\r\x1b\u202e"))


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@given(any_text)
@example(HOSTILE_TEXT)
def test_a_terminal_shows_no_invisible_characters(text):
    escaped = escape_invisible_characters(text)
    assert not re.search("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]", escaped)
    assert escape_invisible_characters(escaped) == escaped
    assert align_table(["a", "b"], [[text, text]], ()).count("\n") == 2
    escaped.encode()


@pytest.mark.parametrize("text", ORDINARY_TEXTS)
def test_ordinary_text_is_the_same_in_every_format(text):
    assert escape_invisible_characters(text) == convert_to_csv_cell(text) == escape_markdown(text) == text


def test_an_invisible_character_is_shown_by_its_number():
    assert escape_invisible_characters("a\x1b[31m\x9b\u202e\n") == "a\\x1b[31m\\x9b\\u202e\\n"


@given(st.lists(any_text | st.floats(allow_nan=False) | st.integers() | st.none(), min_size=1))
@example([f"{blank}{sign}cmd|' /C calc'!A0" for blank in ("", " ", "\t", "\r", "\n") for sign in FORMULA_SIGNS])
@example(["-3.5", "+1e-3", -3.5, "-", "-1+1"])
def test_no_cell_of_csv_is_a_formula(values):
    text = format_csv([{str(number): value for number, value in enumerate(values)}])
    _, cells = csv.reader(io.StringIO(text))
    for value, cell in zip(values, cells, strict=True):
        assert cell.lstrip()[:1] not in set(FORMULA_SIGNS) or is_number(cell)
        if isinstance(value, (int, float)):
            assert cell == str(value)


@given(any_text)
@example("![i](http://evil/i.png) <b>bold</b> [a](b) [a][b] [^1] `code` | *a* __a__ ~~a~~ $a$ &lt; \\| \\")
@example("# heading")
@example("1. item")
@example("&<;")
def test_no_text_in_markdown_is_markup(text):
    lines = format_markdown_table(["a", "b"], [[text, "z"]], ()).splitlines()
    assert len(lines) == 3
    cells = re.split(r"(?<!\\) \| ", f" {_ESCAPED.sub(',', lines[2]).removeprefix('|').removesuffix('|')} ")
    assert len(cells) == 2
    assert not _MARKUP.search(cells[0])
    line = escape_markdown_line(text)
    assert "\n" not in line
    assert not _MARKUP.search(_ESCAPED.sub(",", line))
    assert not re.match(r"\s*(?:[#>+=*\[:-]|\d+[.)](?:\s|$))", _ESCAPED.sub(",", line))


def test_markup_of_mamf_is_not_escaped():
    assert "| **1** | \\*\\*1\\** |" in format_markdown_table(["a", "b"], [[Markup("**1**"), "**1**"]], ())


@pytest.mark.parametrize(
    ("line", "width", "wrapped"),
    [
        ("a line of words", None, "a line of words"),
        ("a line of words", 15, "a line of words"),
        ("a line of words", 10, "a line of\n    words"),
        ("  indented words of a line", 14, "  indented\n      words of\n      a line"),
        ("4096x4096x4096 is one", 8, "4096x4096x4096\n    is\n    one"),
    ],
)
def test_a_line_is_broken_at_blanks(line, width, wrapped):
    assert wrap_line(line, width) == wrapped


@pytest.mark.parametrize(
    ("variable", "size", "columns"), [("", 0, 80), ("", 132, 132), ("100", 132, 100), ("x", 132, 80)]
)
def test_a_terminal_that_does_not_say_its_width_has_80_columns(monkeypatch, variable, size, columns):
    monkeypatch.setenv("COLUMNS", variable)
    monkeypatch.setattr(terminal, "get_report_stream", lambda: SimpleNamespace(isatty=lambda: True, fileno=lambda: 1))
    monkeypatch.setattr(terminal.os, "get_terminal_size", lambda descriptor: os.terminal_size((size, 0)))
    assert terminal.find_terminal_width() == columns
