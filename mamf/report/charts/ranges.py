"""Figures of many devices in rows: one point per log on a common axis, with its interval."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mamf.measurement import group_pairs
from mamf.report.charts.figures import GREY, HINTS, PAGE_WIDTH, SMALL, TEXT, Named, PagePanel
from mamf.report.charts.palette import PEAK, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES, _INCHES_BESIDE = 0.26, 0.9
_LONGEST_NAME = 34


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


def range_panels(chart: RangeChart) -> Iterator[PagePanel]:
    lines = len(chart.rows) + len({row.group for row in chart.rows if row.group})
    size = PAGE_WIDTH, _ROW_INCHES * lines + _INCHES_BESIDE
    yield PagePanel(f"{chart.title}, {chart.unit}", functools.partial(_draw_ranges, chart=chart), size)


def named_of_ranges(chart: RangeChart) -> Named:
    return [(name, {"linewidth": 0, "markersize": 7, **vars(style)}) for name, style in styles_of(chart.names).items()]


def _draw_ranges(axes: Axes, chart: RangeChart) -> None:
    """A line for each row, under the name of its group."""
    styles, names, y = styles_of(chart.names), {}, -1
    for group, rows in group_pairs((row.group, row) for row in chart.rows).items():
        y += bool(group)
        axes.text(0.005, y, group, fontsize=SMALL, weight="bold", va="center", transform=axes.get_yaxis_transform())
        for row in rows:
            y += 1
            names[y] = textwrap.shorten(row.name, _LONGEST_NAME, placeholder="...")
            style, values = styles[row.style], [point.value for point in row.points]
            axes.hlines(
                [y] * len(values), [each.low for each in row.points], [each.high for each in row.points], style.color
            )
            (drawn,) = axes.plot(
                values, [y] * len(values), **vars(style), linestyle="none", markersize=7, markeredgecolor="white"
            )
            HINTS[drawn] = [f"{row.name}: {point.value:.4g} {chart.unit} {point.text}" for point in row.points]
            if row.peak is not None:
                axes.plot([row.peak] * 2, [y - 0.4, y + 0.4], **PEAK)
    axes.set_yticks(list(names), labels=list(names.values()))
    axes.set_ylim(y + 0.6, -0.6)
    axes.locator_params(axis="x", nbins=7)
    axes.set_xlabel(chart.unit, fontsize=TEXT)
    axes.tick_params(labelsize=SMALL, color=GREY)
    axes.set_axisbelow(True)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.8)
    ends = [end for row in chart.rows for point in row.points for end in (point.low, point.high)]
    if min(ends) < max(ends) / 2:
        axes.set_xlim(left=0)
