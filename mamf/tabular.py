"""Objects that a notebook shows as a table."""

from __future__ import annotations

from collections.abc import Callable


class Tabular:
    """Base class of objects that notebooks show as html. ``mamf/__init__.py`` sets ``render``, because the report
    modules import these classes.
    """

    render: Callable[[Tabular], str]

    def _repr_html_(self) -> str:
        return type(self).render(self)
