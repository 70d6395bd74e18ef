"""Figures in rows: points on a common axis, each with its interval; of many devices, logs or kernels."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mamf.measurement import group_pairs
from mamf.report.charts.palette import PEAK, styles_of
from mamf.report.charts.picture import HINTS, PAGE_WIDTH, SMALL, TEXT, DrawnPanel, Named, Picture, prepare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES, _INCHES_BELOW = 0.26, 0.9
_MAX_NAME = 34


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
class RangeChart(Picture):
    """``unit``: of all values."""

    unit: str
    rows: tuple[RangeRow, ...]

    @property
    def inches(self) -> float:
        lines = len(self.rows) + len({row.group for row in self.rows if row.group})
        return _ROW_INCHES * lines + _INCHES_BELOW

    def drawn_rows(self) -> list[list[DrawnPanel]]:
        draw = functools.partial(_draw_ranges, chart=self)
        return [[DrawnPanel(f"{self.title}, {self.unit}", draw, size=(PAGE_WIDTH, self.inches))]]

    def legend(self) -> Named:
        styles = styles_of(row.style for row in self.rows)
        names = dict.fromkeys(row.style for row in self.rows)
        return [(name, {"linewidth": 0, "markersize": 7, **vars(styles[name])}) for name in names]


def _draw_ranges(axes: Axes, chart: RangeChart) -> None:
    """A line for each row, under the name of its group."""
    prepare(axes, grid="x")
    styles, names, y = styles_of(row.style for row in chart.rows), {}, -1
    for group, rows in group_pairs((row.group, row) for row in chart.rows).items():
        y += bool(group)
        axes.text(0.005, y, group, fontsize=SMALL, weight="bold", va="center", transform=axes.get_yaxis_transform())
        for row in rows:
            y += 1
            names[y] = textwrap.shorten(row.name, _MAX_NAME, placeholder="...")
            _draw_row(axes, row, y, chart.unit, vars(styles[row.style]))
    axes.set_yticks(list(names), labels=list(names.values()))
    axes.set_ylim(y + 0.6, -0.6)
    axes.locator_params(axis="x", nbins=7)
    axes.set_xlabel(chart.unit, fontsize=TEXT)
    ends = [end for row in chart.rows for point in row.points for end in (point.low, point.high)]
    if min(ends) < max(ends) / 2:
        axes.set_xlim(left=0)


def _draw_row(axes: Axes, row: RangeRow, y: int, unit: str, style: dict[str, str]) -> None:
    values, ys = [point.value for point in row.points], [y] * len(row.points)
    axes.hlines(ys, [point.low for point in row.points], [point.high for point in row.points], style["color"])
    (drawn,) = axes.plot(values, ys, **style, linestyle="none", markersize=7, markeredgecolor="white")  # type: ignore[arg-type]
    HINTS[drawn] = [f"{row.name}: {point.value:.4g} {unit} {point.text}" for point in row.points]
    if row.peak is not None:
        axes.plot([row.peak] * 2, [y - 0.4, y + 0.4], **PEAK)
