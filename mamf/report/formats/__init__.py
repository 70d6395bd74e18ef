"""Documents as text, a module for each format: ``render(document, width=None)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mamf.report.document import Document
from mamf.report.formats import csv, html, json, markdown, terminal

#: By the value of ``--format``. ``width``: columns of the terminal, None for all; only tables for a terminal use it.
FORMATS: Mapping[str, Callable[[Document, int | None], str]] = {
    "table": terminal.render,
    "csv": csv.render,
    "json": json.render,
    "markdown": markdown.render,
    "html": html.render,
}
#: The formats that people read on a terminal, in which further lines may follow a report.
FOR_PEOPLE = ("table", "markdown")
#: The formats that hold one table and nothing else.
TABLE_ALONE = ("csv",)
