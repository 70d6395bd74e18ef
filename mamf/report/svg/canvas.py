"""An SVG picture that is drawn element by element, and its axes: from values to places, and the ticks between them. Its
texts are escaped by the XML library. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from mamf.report.charts.palette import COLORS, MARKERS, Style

_MARGIN = 0.05
_STEPS = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` at places from ``start`` to ``end``; by their logarithm if ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low * 1e-3) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Round values within the scale, at most about ``most``, with their texts."""
        values = _log_ticks(self.low, self.high, most) if self.is_log else _even_ticks(self.low, self.high, most)
        return [(value, f"{value:.6g}") for value in values]


def scale_of(
    values: Iterable[float], start: float, end: float, *, is_log: bool = False, from_zero: bool = False
) -> Scale:
    """A scale that holds all values, with a margin at both ends; ``from_zero``: it begins at 0."""
    low, high = _ends(list(values))
    if is_log:
        margin = max((high / low) ** _MARGIN, 1.05)
        return Scale(low / margin, high * margin, start, end, True)
    if from_zero:
        return Scale(0.0, (high or 1.0) * (1 + _MARGIN), start, end)
    margin = _MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low - margin, high + margin, start, end)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values, default=0.0), max(values, default=1.0)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(each for each in _STEPS if each * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, and 2 and 5 between them where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for parts in ((1, 2, 5), (1, 3), (1,)):
        found = [part * 10.0**decade for decade in decades for part in parts]
        within = [value for value in found if low <= value <= high]
        if len(within) <= most + 2:
            return within if len(within) > 1 else _even_ticks(low, high, most)
    return within[:: -(-len(within) // most)]


# -- the canvas --------------------------------------------------------------------------------------------------------


#: Characters of labels are about this wide, and lines of text this high.
LETTER, LINE = 7.0, 16.0
# Outlines of the markers around (0, 0), by matplotlib's names.
_OUTLINES = dict(
    zip(
        MARKERS,
        (
            "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
            "M-3.5-3.5h7v7h-7z",
            "M0-4.5L4.3 3.5h-8.6z",
            "M0-5L4 0L0 5L-4 0z",
            "M0 4.5L4.3-3.5h-8.6z",
            "M-1.6-4.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2v-2.9h-2.9v-3.2h2.9z",
            "M-4.5-2.5l2-2L0-2l2.5-2.5l2 2L2 0l2.5 2.5l-2 2L0 2l-2.5 2.5l-2-2L-2 0z",
            "M0-4.7L4.5-1.5L2.8 4h-5.6L-4.5-1.5z",
            "M-4.5 0L3.5-4.3v8.6z",
            "M-4-2.3L0-4.6L4-2.3v4.6L0 4.6L-4 2.3z",
            "M4.5 0L-3.5-4.3v8.6z",
        ),
        strict=True,
    )
)


@dataclass(frozen=True)
class Drawn:
    """A picture as SVG, and the heading above it."""

    title: str
    svg: str


@dataclass(frozen=True)
class Frame:
    """Where an axis pair lies on a canvas."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return min(self.x.start, self.x.end)

    @property
    def right(self) -> float:
        return max(self.x.start, self.x.end)

    @property
    def top(self) -> float:
        return min(self.y.start, self.y.end)

    @property
    def bottom(self) -> float:
        return max(self.y.start, self.y.end)


class Canvas:
    """``label``: what a screen reader says in place of the picture."""

    def __init__(self, width: float, height: float, label: str) -> None:
        size = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}"}
        self._root = Element("svg", {**size, "role": "img", "aria-label": label})

    def text(self) -> str:
        return tostring(self._root, encoding="unicode")

    def add(self, tag: str, attributes: Mapping[str, object], text: str = "", hint: str = "") -> None:
        """An element. ``hint``: shown while the pointer is on it. Numbers are rounded to a tenth of a pixel."""
        element = SubElement(self._root, tag, {name: _value(each) for name, each in attributes.items()})
        element.text = text or None
        if hint:
            SubElement(element, "title").text = hint

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})

    def label(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        self.add("text", {"x": x, "y": y, "text-anchor": anchor, "class": kind or "label"}, text)

    def marker(self, x: float, y: float, style: Style, hint: str, is_hollow: bool = False) -> None:
        kind = f"{color_class(style.color)}{' hollow' if is_hollow else ''} mark"
        place = f"translate({x:.1f} {y:.1f})"
        self.add("path", {"d": outline(style.marker), "transform": place, "class": kind}, hint=hint)

    def axes(self, frame: Frame, x_label: str, y_label: str, x_ticks: list[tuple[float, str]] | None = None) -> None:
        """Grid, ticks and labels. Labels of ticks that would touch the one before are left out."""
        for value, text in frame.y.ticks():
            self.line(frame.left, frame.y(value), frame.right, frame.y(value), "grid")
            self.label(frame.left - 6, frame.y(value) + 4, text, anchor="end")
        end = -1e9
        for value, text in frame.x.ticks() if x_ticks is None else x_ticks:
            place, half = frame.x(value), LETTER * len(text) / 2
            self.line(place, frame.bottom, place, frame.bottom + 4, "tick")
            if text and place - half > end:
                self.label(place, frame.bottom + LINE, text)
                end = place + half + LETTER
        self.line(frame.left, frame.bottom, frame.right, frame.bottom, "axis")
        self.label((frame.left + frame.right) / 2, frame.bottom + 2.2 * LINE, x_label, "name")
        self.label(0, frame.top - 8, y_label, "name", "start")


def color_class(color: str) -> str:
    """The class of a color of the palette."""
    return f"c{COLORS.index(color)}"


def outline(marker: str) -> str:
    return _OUTLINES[marker]


def _value(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
