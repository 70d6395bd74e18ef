"""What a notebook shows as a table."""

from __future__ import annotations

import importlib


class Tabular:
    """Shown by a notebook as its table in ``mamf.report``, which stands above all that it shows: it is loaded by name,
    when a notebook asks.
    """

    def _repr_html_(self) -> str:
        return str(importlib.import_module("mamf.report.notebook").html_of(self))
