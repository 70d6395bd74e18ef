"""Turn documents into text. ``FORMATTERS`` has a function for each value of ``--format``.

Each function takes a document and ``width``, the number of columns of the terminal (None for unlimited), which only the
terminal format uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mamf.report.document import (
    COLUMN_GAP,
    Column,
    Details,
    Document,
    Table,
    align_table,
    format_csv,
    format_markdown_table,
)
from mamf.text import Markup, escape_invisible_characters, escape_markdown_line, wrap_line


def format_for_terminal(document: Document, width: int | None = None) -> str:
    """Return a document as aligned text for a terminal. A line below a table names the columns that are hidden because
    they do not fit ``width``. Successive tables that hide the same columns share one line, below the last of them.
    """
    texts: list[str] = []
    hidden_titles_by_place: dict[int, list[str]] = {}
    for block in document.visible_blocks:
        if isinstance(block, Table):
            text, hidden_titles_by_place[len(texts)] = _format_terminal_table(block, width)
        elif width is not None and isinstance(block, Details):
            continue
        else:
            text = _format_lines([block.heading, *block.texts] if block.heading else block.texts, width)
        texts.append(text)
    for (place, titles), (_, next_titles) in pairwise([*hidden_titles_by_place.items(), (0, [])]):
        if titles and titles != next_titles:
            texts[place] += _format_lines([f"hidden columns (use --wide): {', '.join(titles)}"], width)
    return "\n".join(texts)


def _format_terminal_table(block: Table[Any], width: int | None) -> tuple[str, list[str]]:
    """Return a table as text for a terminal, and the titles of the columns that do not fit ``width``."""
    rows = block.visible_rows
    columns = [
        _shorten_column(column, block, width) if width and column.min_characters else column
        for column in block.visible_columns
    ]
    shown_columns = drop_columns_to_fit(columns, rows, width)
    cells = [[column.format_cell(row) for column in shown_columns] for row in rows]
    table_text = (
        align_table(
            [each.title for each in shown_columns],
            cells,
            {each.title for each in shown_columns if each.is_left_aligned},
        )
        if shown_columns
        else ""
    )
    if width is not None and shown_columns and shown_columns[-1].is_left_aligned:
        # Wrap long cells in the last column at spaces, and align the further lines with the first one.
        widths = [_measure_column_width(each, rows) + len(COLUMN_GAP) for each in shown_columns[:-1]]
        indent = min(sum(widths), width // 2)
        table_text = "".join(
            f"{wrap_line(each, width, indent - len(each) + len(each.lstrip()))}\n" for each in table_text.splitlines()
        )
    text = _format_lines([block.title] if block.title else [], width) + table_text + _format_lines(block.notes, width)
    return text, list(dict.fromkeys(column.title for column in columns if column not in shown_columns))


def _format_lines(texts: Iterable[str], width: int | None) -> str:
    return "".join(f"{wrap_line(escape_invisible_characters(text), width)}\n" for text in texts)


def _shorten_column(column: Column[Any], table: Table[Any], width: int) -> Column[Any]:
    """Return a copy of a column with cells shortened until all columns fit ``width``. No cell is cut to fewer
    characters than ``column.min_characters``.
    """
    other_columns_width = sum(
        _measure_column_width(each, table.visible_rows) + len(COLUMN_GAP)
        for each in table.visible_columns
        if each is not column
    )
    max_characters = max(column.min_characters, width - other_columns_width)
    return replace(column, format_value=lambda value: shorten_middle(column.format_value(value), max_characters))


def shorten_middle(text: str, max_characters: int) -> str:
    """Replace the middle of a string that is longer than ``max_characters`` by two dots. Keep both ends, because long
    kernel names often differ only there.
    """
    tail = (max_characters - 2) // 2
    return text if len(text) <= max_characters else f"{text[: max_characters - 2 - tail]}..{text[-tail:]}"


def _measure_column_width(column: Column[Any], rows: Sequence[Any]) -> int:
    return max(len(escape_invisible_characters(text)) for text in (column.title, *map(column.format_cell, rows)))


def drop_columns_to_fit(columns: Sequence[Column[Any]], rows: Sequence[Any], width: int | None) -> list[Column[Any]]:
    """Return as many columns as fit ``width`` characters. Drop columns with the highest ``drop_priority`` first, and
    never drop columns with ``drop_priority`` 0.
    """
    shown_columns = list(columns)
    widths = {id(each): len(COLUMN_GAP) + _measure_column_width(each, rows) for each in shown_columns}
    while width is not None and sum(widths[id(each)] for each in shown_columns) > width + len(COLUMN_GAP):
        next_dropped = max(reversed(shown_columns), key=lambda each: each.drop_priority)
        if not next_dropped.drop_priority:
            break
        shown_columns.remove(next_dropped)
    return shown_columns


def format_main_csv(document: Document, width: int | None = None) -> str:
    """Return the main table of a document as CSV."""
    tables = document.make_records_by_key()
    return format_csv(tables.get(document.main_table_key or next(iter(tables), ""), []))


def format_json(document: Document, width: int | None = None) -> str:
    """Return the data and all tables of a document as JSON."""
    return json.dumps({**document.json_data, **document.make_records_by_key()}, indent=2) + "\n"


def format_html(document: Document, width: int | None = None) -> str:
    """Return a document as a self-contained HTML page in which every text is escaped."""
    # Import the code of pages only here, so that commands that print other formats do not load it.
    from mamf.report.page import Page, Section, render_page

    return render_page(Page(document.title, sections=[Section("", document.visible_blocks)]))


def format_markdown(document: Document, width: int | None = None) -> str:
    """Return a document as GitHub markdown with every text escaped. A blank line follows each table, so that GitHub
    does not take the next line for a row.
    """
    blocks = []
    for block in document.visible_blocks:
        heading = block.title if isinstance(block, Table) else block.heading
        parts = [f"**{escape_markdown_line(heading.strip())}**\n"] if heading else []
        if isinstance(block, Table):
            parts += [format_visible_rows_as_markdown(block), _format_markdown_list(block.notes)]
        else:
            parts.append(_format_markdown_list(block.texts))
        blocks.append("\n".join(filter(None, parts)))
    return "\n".join(blocks)


def format_visible_rows_as_markdown(table: Table[Any]) -> str:
    """Return the visible rows of a table in GitHub markdown, without the title and notes of the table."""
    columns = table.visible_columns
    lines = [[column.format_cell(row) for column in columns] for row in table.visible_rows]
    left = {column.title for column in columns if column.is_left_aligned}
    return format_markdown_table([column.title for column in columns], lines, left) if columns else ""


def _format_markdown_list(texts: Iterable[str]) -> str:
    """Return a markdown list. Lines that begin with a space are nested one level deeper; Markup stays unchanged."""
    return "".join(
        f"{text}\n"
        if isinstance(text, Markup)
        else f"{'  ' if text.startswith(' ') else ''}- {escape_markdown_line(text.strip())}\n"
        for text in texts
    )


#: Functions that return a document as text, by the value of ``--format``.
FORMATTERS: Mapping[str, Callable[[Document, int | None], str]] = {
    "table": format_for_terminal,
    "csv": format_main_csv,
    "json": format_json,
    "markdown": format_markdown,
    "html": format_html,
}
#: The formats that people read on a terminal. Commands may print further lines after a report in these formats.
TERMINAL_FORMATS = ("table", "markdown")
#: The formats that contain a single table and no other text.
SINGLE_TABLE_FORMATS = ("csv",)
