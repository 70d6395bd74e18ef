"""Any chart as the parts of a page's figure: pictures, legend, title and notes. Draws stacked bars, steps down from the
datasheet, ranges and the roofline as SVG. Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mamf.report.charts.chart import Chart, Panel, with_visible_texts
from mamf.report.charts.palette import Style, styles_of
from mamf.report.charts.plotting import Picture
from mamf.report.charts.ranges import RangeChart
from mamf.report.charts.roofline import RooflineChart
from mamf.report.charts.stacked import StackedChart, StackedPanel
from mamf.report.charts.waterfall import Bar, WaterfallChart
from mamf.report.svg.canvas import LETTER, LINE, Canvas, Drawn, Frame, Scale, color_class, outline, scale_of
from mamf.report.svg.panels import draw_chart

_HEIGHT, _TOP, _LEFT = 320.0, 26.0, 56.0
_LEAST_WIDTH, _WIDTH_OF_BAR, _SHARE_OF_BAR = 560.0, 100.0, 0.7
_ROW, _RANGES_WIDTH = 20.0, 1120.0
# A part that is lower than this has no room for its figure, in pixels.
_LEAST_ROOM = 14.0
_ROOFS_WIDTH, _ROOFS_HEIGHT, _ROOFS_LEFT, _ROOFS_TOP, _ROOFS_BOTTOM = 1120.0, 560.0, 60.0, 26.0, 44.0


@dataclass(frozen=True)
class Key:
    """A name in the legend, with the class of its color and the outline of its marker around (0, 0)."""

    name: str
    color: str
    outline: str


@dataclass(frozen=True)
class FigureParts:
    title: str
    subtitle: str
    pictures: Sequence[Drawn]
    legend: Sequence[Key]
    notes: Sequence[str]


def figure_parts(picture: Picture | RangeChart) -> FigureParts:
    """The parts of a picture, with foreign texts made harmless."""
    chart = with_visible_texts(picture)
    names = [] if isinstance(chart, WaterfallChart) else list(chart.names)
    styles = styles_of([*names, *getattr(chart, "palette", ())])
    if isinstance(chart, RooflineChart):
        levels = ("memory", "cache")
        styles |= styles_of([*names, *(line.of for line in chart.lines if line.of not in levels)])
        pictures = draw_roofline(chart, styles)
    elif isinstance(chart, StackedChart):
        names += [line.name for line in chart.lines.lines] if chart.lines else []
        styles = styles_of(names)
        pictures = draw_stacked(chart, styles)
    elif isinstance(chart, WaterfallChart):
        pictures = draw_waterfall(chart)
    elif isinstance(chart, RangeChart):
        pictures = draw_ranges(chart, styles)
    else:
        assert isinstance(chart, Chart), "no other picture exists"
        pictures = draw_chart(chart, styles)
    labels = chart.labels if isinstance(chart, Chart) else {}
    legend = [
        Key(labels.get(name, name), color_class(styles[name].color), outline(styles[name].marker)) for name in names
    ]
    return FigureParts(chart.title, chart.subtitle, pictures, legend, chart.notes)


# -- bars, ranges and roofs --------------------------------------------------------------------------------------------


def draw_stacked(chart: StackedChart, styles: Mapping[str, Style]) -> list[Drawn]:
    top = max(bar.height for panel in chart.panels for bar in panel.bars)
    drawn = [Drawn(panel.title, _stacked_panel(panel, chart, styles, top)) for panel in chart.panels]
    if (below := chart.lines) is not None:
        lines = Chart(below.title, "", below.axis, ((Panel(below.title, "tflops", below.lines, unit=below.unit),),))
        drawn += draw_chart(lines, styles)
    return drawn


def _stacked_panel(panel: StackedPanel, chart: StackedChart, styles: Mapping[str, Style], top: float) -> str:
    label = "; ".join(f"{bar.label}: {bar.height:.4g} {chart.unit}" for bar in panel.bars)
    canvas, frame, width = _bar_axes([bar.label for bar in panel.bars], top, chart.unit, chart.below, label)
    for place, bar in enumerate(panel.bars):
        bottom, left = 0.0, frame.x(place) - width / 2
        for name, height in bar.parts:
            hint = f"{bar.label}, {name}: {height:.4g} {chart.unit} ({height / bar.height:.1%})" if bar.height else name
            _bar(canvas, frame, left, width, bottom, height, color_class(styles[name].color), hint)
            if frame.y(bottom) - frame.y(bottom + height) > _LEAST_ROOM:
                canvas.label(frame.x(place), frame.y(bottom + height / 2) + 4, f"{height:.3g}", "label on")
            bottom += height
        canvas.label(frame.x(place), frame.y(bottom) - 5, f"{bottom:.4g}", "label strong")
    return canvas.text()


def draw_waterfall(chart: WaterfallChart) -> list[Drawn]:
    top = max(bar.tflops + max(bar.lost, 0.0) for bar in (*chart.steps, *chart.data))
    drawn = [Drawn("step by step", _waterfall_panel(chart.steps, top, "c0"))]
    if chart.data:
        drawn.append(Drawn("burst, by what the operands hold", _waterfall_panel(chart.data, top, "c2")))
    return drawn


def _waterfall_panel(bars: Sequence[Bar], top: float, color: str) -> str:
    label = "; ".join(f"{bar.label}: {bar.tflops:.4g} TFLOPS {bar.note}" for bar in bars)
    canvas, frame, width = _bar_axes([bar.label for bar in bars], top, "TFLOPS", "", label)
    for place, bar in enumerate(bars):
        left, lost = frame.x(place) - width / 2, max(bar.lost, 0.0)
        _bar(canvas, frame, left, width, 0.0, bar.tflops, color, f"{bar.label}: {bar.tflops:.4g} TFLOPS {bar.note}")
        if lost:
            _bar(canvas, frame, left, width, bar.tflops, lost, "c1 lost", f"lost: {lost:.4g} TFLOPS")
        if bar.interval is not None:
            canvas.line(frame.x(place), frame.y(bar.interval[0]), frame.x(place), frame.y(bar.interval[1]), "interval")
        y = frame.y(bar.tflops + lost)
        canvas.label(frame.x(place), y - 5 - (LINE if bar.note else 0), f"{bar.tflops:.4g}", "label strong")
        if bar.note:
            canvas.label(frame.x(place), y - 5, bar.note)
    return canvas.text()


def _bar_axes(labels: Sequence[str], top: float, unit: str, below: str, described: str) -> tuple[Canvas, Frame, float]:
    """A canvas with axes for bars that stand at 0, 1, 2 and so on; their width in pixels."""
    width = max(_LEAST_WIDTH, _LEFT + _WIDTH_OF_BAR * len(labels))
    room = (width - _LEFT) / max(len(labels), 3)
    letters = int(room / LETTER) - 1
    texts = [textwrap.wrap(label, letters)[:4] for label in labels]
    lines = max((len(text) for text in texts), default=1)
    frame = Frame(Scale(-0.5, max(len(labels), 3) - 0.5, _LEFT, width), Scale(0.0, 1.15 * top or 1.0, _HEIGHT, _TOP))
    canvas = Canvas(width, _HEIGHT + (lines + 1.5) * LINE, described)
    canvas.axes(frame, "", unit, [(float(place), "") for place in range(len(labels))])
    for place, text in enumerate(texts):
        for number, line in enumerate(text, start=1):
            canvas.label(frame.x(place), frame.bottom + number * LINE, line)
    canvas.label((frame.left + frame.right) / 2, frame.bottom + (lines + 1.2) * LINE, below, "name")
    return canvas, frame, _SHARE_OF_BAR * room


def _bar(
    canvas: Canvas, frame: Frame, left: float, width: float, bottom: float, height: float, kind: str, hint: str
) -> None:
    top = frame.y(bottom + height)
    size = {"x": left, "y": top, "width": width, "height": frame.y(bottom) - top}
    canvas.add("rect", {**size, "class": f"{kind} bar"}, hint=hint)


def draw_ranges(chart: RangeChart, styles: Mapping[str, Style]) -> list[Drawn]:
    """A line for each row, under the name of its group."""
    groups = list(dict.fromkeys(row.group for row in chart.rows))
    height = _TOP + _ROW * (len(chart.rows) + len(groups)) + 3 * LINE
    ends = [end for row in chart.rows for point in row.points for end in (point.low, point.high)]
    ends += [row.peak for row in chart.rows if row.peak is not None]
    names = max(len(text) for row in chart.rows for text in (row.group, row.name))
    start = min(LETTER * names + 2 * LINE, _RANGES_WIDTH / 2)
    x = scale_of(ends, start, _RANGES_WIDTH - LINE, from_zero=min(ends) < max(ends) / 2)
    frame = Frame(x, Scale(0.0, 1.0, height - 3 * LINE, _TOP))
    canvas = Canvas(_RANGES_WIDTH, height, f"{chart.title}, {chart.unit}")
    for value, text in x.ticks():
        canvas.line(x(value), frame.top, x(value), frame.bottom, "grid")
        canvas.label(x(value), frame.bottom + LINE, text)
    canvas.label((frame.left + frame.right) / 2, frame.bottom + 2.2 * LINE, chart.unit, "name")
    y = _TOP
    for group in groups:
        y += _ROW
        canvas.label(0, y - 4, group, "label strong", "start")
        for row in (row for row in chart.rows if row.group == group):
            y += _ROW
            middle = y - _ROW / 2
            canvas.label(LINE, middle + 4, row.name, anchor="start")
            if row.peak is not None:
                canvas.line(x(row.peak), middle - 6, x(row.peak), middle + 6, "peak")
            for point in row.points:
                style = styles[row.style]
                canvas.line(x(point.low), middle, x(point.high), middle, f"{color_class(style.color)} interval")
                canvas.marker(x(point.value), middle, style, f"{row.name}: {point.value:.4g} {chart.unit} {point.text}")
    return [Drawn("", canvas.text())]


def draw_roofline(chart: RooflineChart, styles: Mapping[str, Style]) -> list[Drawn]:
    """Labels of lines stand at their right ends, or along them where they rise; marks say on hover what they are."""
    frame = Frame(
        Scale(*chart.x_limits, _ROOFS_LEFT, _ROOFS_WIDTH - LINE, True),
        Scale(*chart.y_limits, _ROOFS_HEIGHT - _ROOFS_BOTTOM, _ROOFS_TOP, True),
    )
    canvas = Canvas(_ROOFS_WIDTH, _ROOFS_HEIGHT, "; ".join([chart.title, *(line.label for line in chart.lines)]))
    canvas.axes(frame, "FLOP per byte", "TFLOPS")
    ends: list[float] = []
    for line in chart.lines:
        (x1, y1), (x2, y2) = ((frame.x(x), frame.y(y)) for x, y in (line.start, line.end))
        kind = color_class(styles[line.of].color) if line.of in styles else "roof"
        canvas.line(x1, y1, x2, y2, f"{kind} line{' companion' if line.is_sustained else ''}")
        y = y1 - 5 if y1 == y2 else (y1 + y2) / 2
        while any(abs(y - other) < LINE for other in ends):  # beside the one before, not on it
            y += LINE
        ends.append(y)
        place = (x2, "end") if y1 == y2 else ((x1 + x2) / 2 + 8, "start")
        canvas.label(place[0], y, line.label, anchor=place[1])
    for mark in dict.fromkeys(chart.marks):
        hint = f"{mark.name}, {mark.label}: {mark.place[1]:.4g} TFLOPS at {mark.place[0]:.3g} FLOP per byte"
        canvas.marker(frame.x(mark.place[0]), frame.y(mark.place[1]), styles[mark.name], hint)
    return [Drawn("", canvas.text())]
