"""A document's data and tables as json."""

from __future__ import annotations

import json

from mamf.report.document import Document


def render(document: Document, width: int | None = None) -> str:
    return json.dumps({**document.data, **document.tables()}, indent=2) + "\n"
