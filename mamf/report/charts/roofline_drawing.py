"""Draws a roofline with matplotlib: two logarithmic axes, and labels that touch neither one another nor a point."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mamf.measurement import group_pairs
from mamf.report.charts.figures import DPI, GREY, SMALL, TEXT, arrange
from mamf.report.charts.palette import CEILING, Style, styles_of
from mamf.report.charts.roofline import Mark, Place, RoofLine, RooflineChart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Left, lower, right and upper edge in pixels.
Box = tuple[float, float, float, float]
#: Points to the right and up, and how a label stands there.
Offset = tuple[float, float, str, str]
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
_FAR = 18
_AT_END = 0.9
# Stretches that a line is cut into where labels are held clear of it.
_STRETCHES = 60
# Marks with more names than this have none beside them: the legend says the kernel, the table the rest.
_MOST_LABELED = 8
# Points from the first mark of a series to its label: to the right, and down or up.
_BESIDE_SERIES = tuple((24, -3 * step, "left", "center") for step in (*range(40), *range(-1, -20, -1)))
_BURST, _SUSTAINED = 2.4, 1.0  # points of a ceiling's line


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
    for line in chart.lines:
        ends = ([line.start[0], line.end[0]], [line.start[1], line.end[1]])
        axes.plot(*ends, **{**CEILING, "linewidth": _SUSTAINED if line.is_sustained else _BURST})
    styles = styles_of(chart.names)
    _draw_marks(axes, chart, styles)
    common = {"linewidth": 0, "markersize": _MARKER}
    arrange(figure, chart, _INCHES, [(name, {**common, **vars(styles[name])}) for name in chart.names])
    figure.draw_without_rendering()  # what is measured below stands where it will
    _Labels(axes, chart).place()


def _draw_marks(axes: Axes, chart: RooflineChart, styles: Mapping[str, Style]) -> None:
    for marks in series_of(chart.marks):
        xs, ys = zip(*(mark.place for mark in marks), strict=True)
        axes.plot(xs, ys, color=styles[marks[0].name].color, linewidth=1, alpha=0.6, zorder=3)
    for mark in chart.marks:
        style = styles[mark.name]
        face, edge = (style.color, "white") if mark.is_placed else ("white", style.color)
        look: dict[str, Any] = {"marker": style.marker, "markerfacecolor": face, "markeredgecolor": edge}
        axes.plot(*mark.place, linestyle="none", markersize=_MARKER, markeredgewidth=1.0, zorder=4, **look)


def _plain_numbers(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


class _Labels:
    """Labels of lines and marks, each at the first place that is free; those that find none are counted."""

    def __init__(self, axes: Axes, chart: RooflineChart) -> None:
        self.axes, self.chart = axes, chart
        self.room: Box = axes.get_window_extent().extents
        half = _points(_MARKER / 2)
        self.taken: list[Box] = [square(self._pixels(mark.place), half) for mark in chart.marks]
        self.crossed: list[Box] = [box for line in chart.lines for box in self._stretches(line)]

    def place(self) -> None:
        left_out = 0
        first = sorted((marks[0] for marks in series_of(self.chart.marks)), key=lambda mark: -mark.place[1])
        for mark in first:
            left_out += not self._placed(mark.series, SMALL, self._beside(mark, _BESIDE_SERIES))
        for line in self.chart.lines:
            left_out += not self._placed(line.label, SMALL, self._along(line))
        others = labelled(mark for mark in self.chart.marks if not mark.series)
        for mark in others if len(others) <= _MOST_LABELED else ():
            left_out += not self._placed(mark.label, _LABEL, self._beside(mark, _AROUND))
        if left_out:
            message = f"labels that do not fit: {left_out} (the table has all)"
            self.axes.set_title(message, loc="right", fontsize=SMALL, color=GREY)

    def _pixels(self, place: Place) -> Place:
        x, y = self.axes.transData.transform(place)
        return float(x), float(y)

    def _stretches(self, line: RoofLine) -> Iterator[Box]:
        """What a line covers: boxes in a row, where one around all would be mostly empty."""
        start, end = self._pixels(line.start), self._pixels(line.end)
        points = [between(start, end, number / _STRETCHES) for number in range(_STRETCHES + 1)]
        for (left, low), (right, high) in itertools.pairwise(points):
            yield left, min(low, high) - 1, right, max(low, high) + 1

    def _placed(self, label: str, size: int, candidates: Iterable[Candidate]) -> bool:
        """Write the label where it is free, of lines too if there is such a place."""
        width, height = self._size(label, size)
        kept: tuple[Candidate, list[Box]] | None = None
        for candidate in candidates:
            boxes = candidate.boxes(width, height)
            if not all(within(box, self.room) for box in boxes) or overlap(boxes, self.taken):
                continue
            is_clear = not overlap(boxes, self.crossed)
            if kept is None or is_clear:
                kept = candidate, boxes
            if is_clear:
                break
        if kept is None:
            return False
        self.taken += kept[1]
        kept[0].write(self.axes, label, size)
        return True

    def _size(self, label: str, size: int) -> Place:
        """Of a label in pixels."""
        text = self.axes.text(0, 0, label, fontsize=size)
        box = text.get_window_extent()
        text.remove()
        return float(box.width), float(box.height)

    def _along(self, line: RoofLine) -> Iterator[Candidate]:
        start, end = self._pixels(line.start), self._pixels(line.end)
        angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
        is_flat = line.start[1] == line.end[1]
        for share in _ALONG_FLAT if is_flat else _ALONG_RISING:
            for side in ("top", "bottom") if line.is_sustained else ("bottom", "top"):
                at = between(start, end, share)
                offset = _across(angle, 3 if side == "bottom" else -3)
                yield Candidate(at, offset, "right" if is_flat and share > _AT_END else "center", side, angle)

    def _beside(self, mark: Mark, offsets: Iterable[Offset]) -> Iterator[Candidate]:
        at = self._pixels(mark.place)
        return (Candidate(at, (x, y), horizontal, vertical) for x, y, horizontal, vertical in offsets)


class Candidate(NamedTuple):
    """Where a label may stand: ``at`` in pixels, and ``offset`` from there in points."""

    at: Place
    offset: Place
    horizontal: str
    vertical: str
    angle: float = 0.0

    def boxes(self, width: float, height: float) -> list[Box]:
        """What a label of this size covers there, in pixels: boxes in a row where it is turned."""
        x, y = self.at[0] + _points(self.offset[0]), self.at[1] + _points(self.offset[1])
        right = {"left": 0.5, "center": 0.0, "right": -0.5}[self.horizontal] * width
        up = {"bottom": 0.5, "center": 0.0, "top": -0.5}[self.vertical] * height
        if not self.angle:
            return [(x + right - width / 2, y + up - height / 2, x + right + width / 2, y + up + height / 2)]
        turned, count = math.radians(self.angle), max(1, round(width / height))
        middle = x - up * math.sin(turned), y + up * math.cos(turned)
        steps = [(number / count - 0.5) * width for number in range(count + 1)]
        places = [(middle[0] + step * math.cos(turned), middle[1] + step * math.sin(turned)) for step in steps]
        return [square(place, height / 2) for place in places]

    def write(self, axes: Axes, label: str, size: int) -> None:
        side = {"left": 0.0, "center": 0.5, "right": 1.0}[self.horizontal]
        arrow: dict[str, Any] = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.7, "relpos": (side, 0.5)}
        x, y = axes.transData.inverted().transform(self.at)
        axes.annotate(
            label,
            (x, y),
            xytext=self.offset,
            textcoords="offset points",
            fontsize=size,
            rotation=self.angle,
            rotation_mode="anchor",
            ha=self.horizontal,
            va=self.vertical,
            zorder=5,
            arrowprops=arrow if math.hypot(*self.offset) > _FAR else None,
        )


def square(middle: Place, half: float) -> Box:
    x, y = middle
    return x - half, y - half, x + half, y + half


def within(box: Box, room: Box) -> bool:
    return room[0] <= box[0] and room[1] <= box[1] and box[2] <= room[2] and box[3] <= room[3]


def overlap(boxes: Iterable[Box], others: Iterable[Box]) -> bool:
    return any(
        left < other[2] and other[0] < right and low < other[3] and other[1] < high
        for left, low, right, high in boxes
        for other in others
    )


def between(start: Place, end: Place, share: float) -> Place:
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _points(points: float) -> float:
    """As pixels."""
    return points * DPI / 72


def series_of(marks: Iterable[Mark]) -> list[list[Mark]]:
    """Marks that are joined, from left to right: of one kernel and series."""
    found = group_pairs(((mark.name, mark.series), mark) for mark in marks if mark.series)
    return [sorted(each, key=lambda mark: mark.place) for each in found.values()]


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
