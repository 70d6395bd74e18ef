"""A document as aligned text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mamf.report.document import Block, Column, Document, Table
from mamf.report.text import prose, table
from mamf.text import visible

_GAP = 2


def render(document: Document, width: int | None = None) -> str:
    return "\n".join(_block(block, width) for block in document.visible_blocks)


def _block(block: Block, width: int | None) -> str:
    if not isinstance(block, Table):
        return prose([*([block.heading] if block.heading else []), *block.texts], "table")
    rows = block.top_rows
    columns = [_cut(column, block, width) for column in block.top_columns]
    kept = fitting(columns, rows, width)
    cells = [[column.cell(row) for column in kept] for row in rows]
    drawn = table([each.title for each in kept], cells, {each.title for each in kept if each.left}) if kept else ""
    dropped = ", ".join(column.title for column in columns if column not in kept)
    hidden = [f"hidden columns (use --wide): {dropped}"] if dropped else []
    return prose([block.title] if block.title else [], "table") + drawn + prose([*hidden, *block.notes], "table")


def _cut(column: Column[Any], table: Table[Any], width: int | None) -> Column[Any]:
    """A column with shorter texts, if it has long names and the table is too wide."""
    if width is None or not column.shortest:
        return column
    others = sum(_width(each, table.top_rows) + _GAP for each in table.top_columns if each is not column)
    room = max(column.shortest, width - others)
    return replace(column, format=lambda value: column.format(value)[:room])


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
