"""Draws a roofline with matplotlib: two logarithmic axes, ceilings and marks, each with a label beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mamf.measurement import group_pairs
from mamf.report.charts.figures import HINTS, SMALL, TEXT, WIDTH, Named, PagePanel
from mamf.report.charts.palette import CEILING, Style, styles_of
from mamf.report.charts.roofline import Mark, RooflineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = 8.0
_MARKER = 9  # points
_BURST, _SUSTAINED = 2.4, 1.0  # points of a ceiling's line
# As shares of the axes: the height of a label, the width of a letter, and how far a label is from what it names.
_HEIGHT, _LETTER, _DISTANCE, _UP = 0.028, 0.0092, 0.015, 0.018
#: How far along a rising ceiling its label is, and how far the label of a flat sustained one is from the right end.
_ALONG_BURST, _ALONG_SUSTAINED, _LEFT_OF_BURST = 0.55, 0.16, 0.27
#: The left and right end of a label, and the height of its middle.
_Label = tuple[float, float, float]


def roofline_panels(chart: RooflineChart) -> Iterator[PagePanel]:
    described = "; ".join([chart.title, *(line.label for line in chart.lines)])
    yield PagePanel(described, functools.partial(_draw_roofs, chart=chart), (WIDTH, _INCHES))


def named_of_roofline(chart: RooflineChart) -> Named:
    styles = styles_of(chart.names)
    return [(name, {"linewidth": 0, "markersize": _MARKER, **vars(styles[name])}) for name in chart.names]


def _draw_roofs(axes: Axes, chart: RooflineChart) -> None:
    axes.set_axisbelow(True)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*chart.x_limits)
    axes.set_ylim(*chart.y_limits)
    _plain_numbers(axes)
    axes.set_xlabel("FLOP per byte", fontsize=TEXT)
    axes.set_ylabel("TFLOPS", fontsize=TEXT)
    axes.tick_params(labelsize=SMALL, color="#999999")
    styles = styles_of(chart.names)
    for line in chart.lines:
        ends = ([line.start[0], line.end[0]], [line.start[1], line.end[1]])
        axes.plot(*ends, **{**CEILING, "linewidth": _SUSTAINED if line.is_sustained else _BURST})
    _draw_marks(axes, chart, styles)
    _draw_labels(axes, chart)


def _draw_marks(axes: Axes, chart: RooflineChart, styles: Mapping[str, Style]) -> None:
    for marks in series_of(chart.marks):
        xs, ys = zip(*(mark.place for mark in marks), strict=True)
        axes.plot(xs, ys, color=styles[marks[0].name].color, linewidth=1, alpha=0.6, zorder=3)
    for mark in chart.marks:
        style = styles[mark.name]
        look: dict[str, Any] = {"marker": style.marker, "markerfacecolor": style.color, "markeredgecolor": "white"}
        (drawn,) = axes.plot(*mark.place, linestyle="none", markersize=_MARKER, markeredgewidth=1.0, zorder=4, **look)
        x, y = mark.place
        HINTS[drawn] = [f"{mark.name}, {mark.label}: {y:.4g} TFLOPS at {x:.3g} FLOP per byte"]


def _draw_labels(axes: Axes, chart: RooflineChart) -> None:
    """A ceiling's label is at its right end, or along it where it rises; a series has one at its first mark. Each moves
    down until it covers no mark and no label before it.
    """
    taken = [(x, x, y) for x, y in (_share(chart, *mark.place) for mark in chart.marks)]
    for line in sorted(chart.lines, key=lambda each: -each.end[1]):
        (x, y), slope, is_sustained = line.start, line.end[1] / line.end[0], line.is_sustained
        if line.start[1] == line.end[1]:
            end, y = _share(chart, *line.end)
            beside = end - (_LEFT_OF_BURST if is_sustained else _DISTANCE)
            _label(axes, (beside, y), (beside, y + (-_UP if is_sustained else _UP)), line.label, taken, "right")
        else:
            x *= (line.end[0] / x) ** (_ALONG_SUSTAINED if is_sustained else _ALONG_BURST)
            axes.text(
                x,
                x * slope,
                line.label,
                fontsize=SMALL,
                ha="center",
                va="bottom",
                rotation=math.degrees(math.atan(slope)),
                rotation_mode="anchor",
                transform_rotates_text=True,
            )
    named = [(marks[0], marks[0].series) for marks in series_of(chart.marks)]
    for mark, label in sorted(named, key=lambda each: -each[0].place[1]):
        x, y = _share(chart, *mark.place)
        _label(axes, (x, y), (x + _DISTANCE, y), label, taken, "left")


def _label(
    axes: Axes, at: tuple[float, float], place: tuple[float, float], text: str, taken: list[_Label], side: str
) -> None:
    """Write a label at the first free place from ``place`` down, with a line to what it names if that is far."""
    width = _LETTER * len(text)
    left, y = place[0] - (width if side == "right" else 0.0), place[1]
    while any(left < right and start < left + width and abs(y - other) < _HEIGHT for start, right, other in taken):
        y -= _HEIGHT / 4
    taken.append((left, left + width, y))
    arrow = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7} if at[1] - y > _HEIGHT else None
    where = "axes fraction"
    axes.annotate(text, at, (place[0], y), where, where, arrow, fontsize=SMALL, ha=side, va="center", zorder=5)


def _share(chart: RooflineChart, x: float, y: float) -> tuple[float, float]:
    """A place as shares of the width and height of the axes."""
    (left, right), (low, high) = chart.x_limits, chart.y_limits
    return math.log(x / left) / math.log(right / left), math.log(y / low) / math.log(high / low)


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def series_of(marks: Iterable[Mark]) -> list[list[Mark]]:
    """Marks that are joined, from left to right: of one kernel and series."""
    found = group_pairs(((mark.name, mark.series), mark) for mark in marks if mark.series)
    return [sorted(each, key=lambda mark: mark.place) for each in found.values()]
