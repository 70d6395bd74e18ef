"""A document as aligned text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from mamf.report.document import Block, Column, Document, Table
from mamf.report.text import table
from mamf.text import visible, wrapped

_GAP = 2


def render(document: Document, width: int | None = None) -> str:
    return "\n".join(_block(block, width) for block in document.visible_blocks)


def _block(block: Block, width: int | None) -> str:
    if not isinstance(block, Table):
        return _lines([block.heading, *block.texts] if block.heading else block.texts, width)
    rows = block.top_rows
    columns = [_cut(column, block, width) for column in block.top_columns]
    kept = fitting(columns, rows, width)
    cells = [[column.cell(row) for column in kept] for row in rows]
    drawn = table([each.title for each in kept], cells, {each.title for each in kept if each.left}) if kept else ""
    dropped = ", ".join(column.title for column in columns if column not in kept)
    hidden = [f"hidden columns (use --wide): {dropped}"] if dropped else []
    return _lines([block.title] if block.title else [], width) + drawn + _lines([*hidden, *block.notes], width)


def _lines(texts: Iterable[str], width: int | None) -> str:
    return "".join(f"{wrapped(visible(text), width)}\n" for text in texts)


def _cut(column: Column[Any], table: Table[Any], width: int | None) -> Column[Any]:
    """A column with shorter texts, if it has long names and the table is too wide."""
    if width is None or not column.shortest:
        return column
    others = sum(_width(each, table.top_rows) + _GAP for each in table.top_columns if each is not column)
    room = max(column.shortest, width - others)
    return replace(column, format=lambda value: shortened(column.format(value), room))


def shortened(text: str, room: int) -> str:
    """Both ends of a text that is longer than ``room``: names of kernels often differ at their ends alone."""
    tail = (room - 2) // 2
    return text if len(text) <= room else f"{text[: room - 2 - tail]}..{text[-tail:]}"


def _width(column: Column[Any], rows: Sequence[Any]) -> int:
    return max(len(visible(text)) for text in (column.title, *map(column.cell, rows)))


def fitting(columns: Sequence[Column[Any]], rows: Sequence[Any], width: int | None) -> list[Column[Any]]:
    """The columns that a line of ``width`` holds, without the least important ones; those of importance 0 stay."""
    kept = list(columns)
    widths = {id(each): _width(each, rows) for each in kept}
    while width is not None and sum(widths[id(each)] + _GAP for each in kept) - _GAP > width:
        least = max(reversed(kept), key=lambda each: each.importance)
        if not least.importance:
            break
        kept.remove(least)
    return kept
