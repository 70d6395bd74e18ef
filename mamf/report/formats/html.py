"""A document as a self-contained html page, or as a fragment for a notebook. Every text is escaped."""

from __future__ import annotations

from mamf.report.document import Document
from mamf.report.page import page_of, render_blocks, render_page


def render(document: Document, width: int | None = None) -> str:
    return render_page(page_of(document))


def fragment(document: Document) -> str:
    """The blocks without a page around them."""
    return render_blocks(document.visible_blocks)
