"""Bars as SVG: stacked ones, steps down from the datasheet, and ranges in rows. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from mamf.report.charts.chart import Chart, Panel
from mamf.report.charts.palette import Style
from mamf.report.charts.ranges import RangeChart
from mamf.report.charts.stacked import StackedChart, StackedPanel
from mamf.report.charts.waterfall import Bar, WaterfallChart
from mamf.report.svg.canvas import LETTER, LINE, Canvas, Drawn, Frame, color_class
from mamf.report.svg.panels import draw_chart
from mamf.report.svg.scale import Scale, scale_of

_HEIGHT, _TOP, _LEFT = 320.0, 26.0, 56.0
_LEAST_WIDTH, _WIDTH_OF_BAR, _SHARE_OF_BAR = 560.0, 100.0, 0.7
_ROW, _RANGES_WIDTH = 20.0, 1120.0
# A part that is lower than this has no room for its figure, in pixels.
_LEAST_ROOM = 14.0


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
    x = Scale(-0.5, max(len(labels), 3) - 0.5, _LEFT, width)
    frame = Frame(x, Scale(0.0, 1.15 * top or 1.0, _HEIGHT, _TOP))
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
