"""The main table of a document as csv."""

from __future__ import annotations

from mamf.report.document import Document
from mamf.report.text import csv_text


def render(document: Document, width: int | None = None) -> str:
    return csv_text(document.main_records())
