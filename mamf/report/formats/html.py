"""A document as a self-contained html page, or as a fragment for a notebook. Every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

from mamf.report.document import Answer, Block, Column, Document, Table
from mamf.text import visible

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ font-weight: bold; text-align: left; }}
th, td {{ border-bottom: 1px solid #ccc; padding: 0.2em 0.6em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}</body>
</html>
"""


def render(document: Document, width: int | None = None) -> str:
    return _PAGE.format(title=escaped(document.title), body=fragment(document))


def fragment(document: Document) -> str:
    """The blocks without a page around them."""
    return "".join(map(_block, document.visible_blocks))


def escaped(text: str) -> str:
    """Text that is no markup, with invisible characters shown."""
    return html.escape(visible(text))


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block) + (_paragraph(block.notes) if block.notes else "")
    heading = f"<h2>{escaped(block.heading)}</h2>\n" if block.heading else ""
    return heading + _paragraph(block.texts, "strong" if isinstance(block, Answer) else "")


def _paragraph(texts: Iterable[str], tag: str = "") -> str:
    lines = "<br>\n".join(map(escaped, texts))
    return f"<p><{tag}>{lines}</{tag}></p>\n" if tag else f"<p>{lines}</p>\n"


def _table(table: Table[Any]) -> str:
    columns = table.top_columns
    if not columns:
        return _paragraph([table.title]) if table.title else ""
    head = _line("th", columns, [column.title for column in columns])
    body = "".join(_line("td", columns, [column.cell(row) for column in columns]) for row in table.top_rows)
    caption = f"<caption>{escaped(table.title)}</caption>\n" if table.title else ""
    return f"<table>\n{caption}<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _line(tag: str, columns: Iterable[Column[Any]], texts: Iterable[str]) -> str:
    cells = (
        f'<{tag} style="text-align: {"left" if column.left else "right"}">{escaped(text)}</{tag}>'
        for column, text in zip(columns, texts, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>\n"
