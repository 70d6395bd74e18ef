"""Objects that a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Callable


class Tabular:
    """Shown by a notebook as html. ``mamf/__init__.py`` sets ``render``, because reports import what they show."""

    render: Callable[[Tabular], str]

    def _repr_html_(self) -> str:
        return type(self).render(self)
