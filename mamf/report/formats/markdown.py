"""A document as GitHub markdown. Only this file writes markup: every text of a document is escaped.

A blank line ends each block, so that no line below a table becomes one of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mamf.report.document import Block, Document, Table
from mamf.report.text import markdown
from mamf.text import Markup, markdown_line


def render(document: Document, width: int | None = None) -> str:
    return "\n".join(map(_block, document.visible_blocks))


def _block(block: Block) -> str:
    parts = (
        [_bold(block.title), table_text(block), _list(block.notes)]
        if isinstance(block, Table)
        else [_bold(block.heading), _list(block.texts)]
    )
    return "\n".join(filter(None, parts))


def table_text(table: Table[Any]) -> str:
    """The rows that people see, without title and notes."""
    columns = table.top_columns
    lines = [[column.cell(row) for column in columns] for row in table.top_rows]
    left = {column.title for column in columns if column.left}
    return markdown([column.title for column in columns], lines, left) if columns else ""


def _bold(text: str) -> str:
    return f"**{markdown_line(text.strip())}**\n" if text else ""


def _list(texts: Iterable[str]) -> str:
    """A list; indented lines are one level deeper, and Markup stays as it is."""
    return "".join(f"{text if isinstance(text, Markup) else _item(text)}\n" for text in texts)


def _item(text: str) -> str:
    return f"{'  ' if text.startswith(' ') else ''}- {markdown_line(text.strip())}"
