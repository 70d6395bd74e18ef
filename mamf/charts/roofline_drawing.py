"""Draws a roofline with matplotlib: two logarithmic axes, and labels that touch neither one another nor a point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mamf.charts.figures import DPI, GREY, SMALL, TEXT, arrange, styles_of
from mamf.charts.roofline import Mark, Place, RoofLine, RooflineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    #: A label where it may stand, and what it would cover there, in pixels.
    Candidate = tuple[Text, list[Bbox]]

_INCHES = 8.0
_MARKER, _LABEL = 9, 10  # points
# Where along a line its label may stand, the best place first.
_ALONG_RISING = (0.5, 0.3, 0.4, 0.6, 0.2, 0.7, 0.1, 0.8, 0.04)
_ALONG_FLAT = (0.99, 0.7, 0.5, 0.3)
# Points from a mark to its label, the best place first: right, left, above, below, and further away with a line to it.
_AROUND = (
    *((8, 0, "left", "center"), (-8, 0, "right", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top")),
    *((8, 10, "left", "bottom"), (8, -10, "left", "top"), (-8, 10, "right", "bottom"), (-8, -10, "right", "top")),
    *((16, 26, "left", "bottom"), (16, -26, "left", "top"), (-16, 26, "right", "bottom"), (-16, -26, "right", "top")),
    *((24, 46, "left", "bottom"), (24, -46, "left", "top"), (-24, 46, "right", "bottom"), (-24, -46, "right", "top")),
    *((x, -y, "center", "top") for y in (70, 90, 110, 130, 150, 170) for x in (0, 40, -40)),
)
_FAR = 20
_AT_END = 0.9
# Stretches that a line is cut into where labels are held clear of it.
_STRETCHES = 60
_LEVEL_COLOURS = {"memory": "black", "cache": "#6b6b6b"}


def draw_roofline(figure: Figure, chart: RooflineChart) -> None:
    axes = figure.subplots()
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
    colours = {**styles_of([line.of for line in chart.lines if line.of not in _LEVEL_COLOURS])}
    for line in chart.lines:
        colour = _LEVEL_COLOURS.get(line.of) or colours[line.of]["color"]
        ends = ([line.start[0], line.end[0]], [line.start[1], line.end[1]])
        axes.plot(*ends, color=colour, linestyle="--" if line.is_sustained else "-", linewidth=2)
    styles = styles_of(chart.names)
    for mark in chart.marks:
        face = styles[mark.name]["color"] if mark.is_placed else "white"
        edge = "white" if mark.is_placed else styles[mark.name]["color"]
        style = {**styles[mark.name], "markerfacecolor": face, "markeredgecolor": edge}
        axes.plot(*mark.place, linestyle="none", markersize=_MARKER, markeredgewidth=1.0, zorder=4, **style)
    arrange(
        figure, chart, _INCHES, [(name, {"linewidth": 0, "markersize": _MARKER, **styles[name]}) for name in styles]
    )
    figure.draw_without_rendering()  # what is measured below stands where it will
    _Labels(axes, chart).place()


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


class _Labels:
    """Labels of lines and marks, each at the first place that is free; those that find none are counted."""

    def __init__(self, axes: Axes, chart: RooflineChart) -> None:
        self.axes, self.chart = axes, chart
        self.room: Bbox = axes.get_window_extent()
        self.taken: list[Bbox] = [self._around(mark.place) for mark in chart.marks]
        self.crossed: list[Bbox] = [box for line in chart.lines for box in self._stretches(line)]

    def place(self) -> None:
        left_out = 0
        for line in self.chart.lines:
            left_out += not self._placed(self._along(line))
        for mark in labelled(self.chart.marks):
            left_out += not self._placed(self._beside(mark))
        if left_out:
            told = f"{left_out} labels left out for want of room: the table has all"
            self.axes.set_title(told, loc="right", fontsize=SMALL, color=GREY)

    def _around(self, place: Place) -> Bbox:
        """What a marker covers, in pixels."""
        from matplotlib.transforms import Bbox

        x, y = self.axes.transData.transform(place)
        half = _MARKER / 72 * DPI / 2
        return Bbox.from_extents(x - half, y - half, x + half, y + half)

    def _stretches(self, line: RoofLine) -> Iterator[Bbox]:
        from matplotlib.transforms import Bbox

        (x0, y0), (x1, y1) = self.axes.transData.transform([line.start, line.end])
        shares = [number / _STRETCHES for number in range(_STRETCHES + 1)]
        points = [(x0 + share * (x1 - x0), y0 + share * (y1 - y0)) for share in shares]
        for (left, low), (right, high) in itertools.pairwise(points):
            yield Bbox.from_extents(left, min(low, high) - 1, right, max(low, high) + 1)

    def _placed(self, candidates: Iterable[Candidate]) -> bool:
        """Keep the first that is free, of lines too if there is one."""
        kept: Candidate | None = None
        for text, boxes in candidates:
            if not all(map(self._is_inside, boxes)) or overlap(boxes, self.taken):
                text.remove()
                continue
            is_clear = not overlap(boxes, self.crossed)
            if kept is not None and not is_clear:
                text.remove()
                continue
            if kept is not None:
                kept[0].remove()
            kept = text, boxes
            if is_clear:
                break
        if kept is not None:
            self.taken += kept[1]
        return kept is not None

    def _is_inside(self, box: Bbox) -> bool:
        return bool(self.room.contains(box.x0, box.y0) and self.room.contains(box.x1, box.y1))

    def _along(self, line: RoofLine) -> Iterator[Candidate]:
        (x0, y0), (x1, y1) = self.axes.transData.transform([line.start, line.end])
        angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
        is_flat = line.start[1] == line.end[1]
        for share in _ALONG_FLAT if is_flat else _ALONG_RISING:
            for side in ("top", "bottom") if line.is_sustained else ("bottom", "top"):
                text = self.axes.annotate(
                    line.label,
                    self.axes.transData.inverted().transform((x0 + share * (x1 - x0), y0 + share * (y1 - y0))),
                    xytext=_across(angle, 3 if side == "bottom" else -3),
                    textcoords="offset points",
                    fontsize=SMALL,
                    rotation_mode="anchor",
                    ha="right" if is_flat and share > _AT_END else "center",
                    va=side,
                )
                boxes = _turned(extent(text), angle, -1 if side == "top" else 1)
                text.set_rotation(angle)
                yield text, boxes

    def _beside(self, mark: Mark) -> Iterator[Candidate]:
        for x, y, ha, va in _AROUND:
            arrow: dict[str, Any] | None = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7}
            text = self.axes.annotate(
                mark.label,
                mark.place,
                xytext=(x, y),
                textcoords="offset points",
                fontsize=_LABEL,
                ha=ha,
                va=va,
                zorder=5,
                arrowprops=arrow if abs(y) > _FAR else None,
            )
            yield text, [extent(text)]


def overlap(boxes: Iterable[Bbox], others: Sequence[Bbox]) -> bool:
    return any(box.overlaps(other) for box in boxes for other in others)


def _turned(box: Bbox, angle: float, side: int) -> list[Bbox]:
    """What words cover once they are turned about the middle of their foot (``side`` 1) or head (-1): boxes in a row,
    where one around all would be mostly empty.
    """
    from matplotlib.transforms import Bbox

    if not angle:
        return [box]
    turned, half = math.radians(angle), box.height / 2
    foot = box.x0 + box.width / 2, box.y0 if side > 0 else box.y1
    middle = foot[0] - side * half * math.sin(turned), foot[1] + side * half * math.cos(turned)
    count = max(1, round(box.width / box.height))
    steps = [(number / count - 0.5) * box.width for number in range(count + 1)]
    places = [(middle[0] + step * math.cos(turned), middle[1] + step * math.sin(turned)) for step in steps]
    return [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in places]


def extent(text: Text) -> Bbox:
    """Of the words alone, in pixels: an annotation counts its line to the point too."""
    from matplotlib.text import Text

    text.get_window_extent()  # which puts it where it will stand
    return Text.get_window_extent(text)


def labelled(marks: Iterable[Mark]) -> list[Mark]:
    """One mark of those that would say the same at one intensity, as kernels of one shape do: the highest."""
    best: dict[tuple[str, float], Mark] = {}
    for mark in marks:
        key = mark.label, mark.place[0]
        if key not in best or mark.place[1] > best[key].place[1]:
            best[key] = mark
    return list(best.values())


def _across(angle: float, distance: float) -> Place:
    """So many points to the left of a line that rises at this angle."""
    turned = math.radians(angle + 90)
    return distance * math.cos(turned), distance * math.sin(turned)
