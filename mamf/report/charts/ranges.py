"""Figures of many devices in rows, as data: one point per log on a common axis, with its interval. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RangePoint:
    """``text``: what it says beside its figure, such as card and log."""

    value: float
    low: float
    high: float
    text: str = ""


@dataclass(frozen=True)
class RangeRow:
    """``group``: rows of one group stand under its name. ``style_name``: decides the color in place of ``name``.
    ``peak``: the datasheet's.
    """

    group: str
    name: str
    points: tuple[RangePoint, ...]
    peak: float | None = None
    style_name: str = ""

    @property
    def style(self) -> str:
        return self.style_name or self.name


@dataclass(frozen=True)
class RangeChart:
    """``unit``: of all values."""

    title: str
    subtitle: str
    unit: str
    rows: tuple[RangeRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row.style for row in self.rows))
