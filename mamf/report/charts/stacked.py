"""Stacked bars and lines below them, as data. Pure; mamf.report.charts.stacked_drawing draws it."""

from __future__ import annotations

from dataclasses import dataclass

from mamf.report.charts.chart import Chart


@dataclass(frozen=True)
class Stack:
    """A bar: ``parts`` from the bottom to the top, each with its name; ``label`` stands below it."""

    label: str
    parts: tuple[tuple[str, float], ...]

    @property
    def height(self) -> float:
        return sum(height for _, height in self.parts)


@dataclass(frozen=True)
class StackedPanel:
    title: str
    bars: tuple[Stack, ...]


@dataclass(frozen=True)
class StackedChart:
    """``unit``: of the bars' heights; ``below``: what their labels are; ``lines``: a chart of one panel beneath."""

    title: str
    subtitle: str
    unit: str
    below: str
    panels: tuple[StackedPanel, ...]
    lines: Chart | None = None
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of all parts, in the order that they come."""
        return list(dict.fromkeys(name for panel in self.panels for bar in panel.bars for name, _ in bar.parts))
