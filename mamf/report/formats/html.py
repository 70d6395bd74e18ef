"""A document as a self-contained html page, or as a fragment for a notebook. Every text is escaped.

What draws pages is imported when a page is asked for: every command that prints a report imports this module.
"""

from __future__ import annotations

from mamf.report.document import Document


def render(document: Document, width: int | None = None) -> str:
    from mamf.report.page import page_of, render_page

    return render_page(page_of(document))


def fragment(document: Document) -> str:
    """The blocks without a page around them."""
    from mamf.report.page import render_blocks

    return render_blocks(document.visible_blocks)
