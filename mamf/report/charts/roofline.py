"""The roofline as data: ceilings as lines, rows as points, TFLOPS against FLOP per byte. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.roof import RoofPoint, Roofs
from mamf.regime_names import SUSTAINED
from mamf.report.charts.chart import machine

#: From one to the other, as (FLOP per byte, TFLOPS).
Place = tuple[float, float]
#: How far the axes go on beyond what they show: to the left, the right, down and up.
_LEFT, _RIGHT, _DOWN, _UP = 3.0, 20.0, 2.0, 2.0


@dataclass(frozen=True)
class RoofLine:
    """A ceiling: flat, of a dtype, or rising, of a memory level."""

    label: str
    start: Place
    end: Place
    is_sustained: bool


@dataclass(frozen=True)
class Mark:
    """A row: ``name`` decides color and marker, ``label`` says which it is. ``series``: what the marks joined with it
    share.
    """

    label: str
    name: str
    place: Place
    series: str = ""


@dataclass(frozen=True)
class RooflineChart:
    title: str
    subtitle: str
    lines: tuple[RoofLine, ...]
    marks: tuple[Mark, ...]
    x_limits: Place
    y_limits: Place
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(mark.name for mark in self.marks))


def roofline_chart(roofs: Roofs, points: Sequence[RoofPoint], header: Mapping[str, Any]) -> RooflineChart:
    """``header``: of a log of the device. Points that do no FLOP have no place."""
    shown = [point for point in points if point.tflops is not None and point.intensity is not None]
    x_limits = _x_limits(roofs, shown)
    lines = tuple(_lines(roofs, x_limits))
    marks = tuple(map(_mark, shown))
    heights = [y for line in lines for _, y in (line.start, line.end)] + [mark.place[1] for mark in marks]
    return RooflineChart(
        f"Roofline, {', '.join(dict.fromkeys(dtype for dtype, _ in roofs.compute)) or 'bandwidth alone'}",
        machine(header),
        lines,
        marks,
        x_limits,
        (min(heights) / _DOWN, max(heights) * _UP),
        (
            "thick: burst ceilings; thin: sustained ones. Bytes: each operand read and each result written once."
            " Joined marks: a layer with more tokens from left to right.",
        ),
    )


def _x_limits(roofs: Roofs, points: Iterable[RoofPoint]) -> Place:
    """An axis that holds every point and every ridge, where a flat ceiling meets a rising one."""
    ridges = [flat.rate / rising.rate for flat in roofs.compute.values() for rising in roofs.bandwidth.values()]
    known = [point.intensity for point in points if point.intensity] + ridges
    return min(known, default=1.0) / _LEFT, max(known, default=1.0) * _RIGHT


def _lines(roofs: Roofs, x_limits: Place) -> Iterable[RoofLine]:
    left, right = x_limits
    for regime in roofs.regimes:
        compute = {dtype: each for (dtype, of), each in roofs.compute.items() if of == regime}
        bandwidth = {level: each for (level, of), each in roofs.bandwidth.items() if of == regime}
        top = max((each.rate for each in compute.values()), default=None)
        steepest = max((each.rate for each in bandwidth.values()), default=None)
        for level, each in bandwidth.items():
            ends_at = right if top is None else top / each.rate
            label = f"{level} {each.rate:.3g} TB/s, {regime}"
            start, end = (left, left * each.rate), (ends_at, ends_at * each.rate)
            yield RoofLine(label, start, end, regime == SUSTAINED)
        for dtype, each in compute.items():
            begins_at = left if steepest is None else each.rate / steepest
            label = f"{dtype} {each.rate:.4g} TFLOPS, {regime}"
            yield RoofLine(label, (begins_at, each.rate), (right, each.rate), regime == SUSTAINED)


def _mark(point: RoofPoint) -> Mark:
    assert point.tflops is not None and point.intensity is not None, "those without are left out"
    place = point.intensity, point.tflops
    regime = ", sustained" if point.regime == SUSTAINED else ""
    series = f"{point.layer}{regime}" if point.layer else ""
    return Mark(f"{point.name}{regime}", point.kernel, place, series)
