"""Panels of lines and points as SVG, one picture per panel. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point
from mamf.report.charts.palette import Style
from mamf.report.svg.canvas import LETTER, LINE, Canvas, Drawn, Frame, Scale, color_class, scale_of

_HEIGHT = 300.0
#: A panel alone is as wide as the page; several stand side by side where there is room.
_WIDTH, _WIDTH_OF_SEVERAL = 1120.0, 560.0
_TOP, _BOTTOM = 26.0, 44.0
#: A datasheet that is further above would push all points into a corner.
_FAR_ABOVE = 1.3
#: Beyond so many points, a connected line has no markers.
_MOST_MARKED = 100
# Characters of the labels of the vertical axis.
_LABEL_LETTERS = 6


def draw_chart(chart: Chart, styles: Mapping[str, Style]) -> list[Drawn]:
    """A picture per panel. Panels of one quantity share their scale where the axis is shared."""
    width = _WIDTH if len(chart.panels) == 1 else _WIDTH_OF_SEVERAL
    return [Drawn(panel.title, _draw_panel(panel, chart, styles, width)) for panel in chart.panels]


def _draw_panel(panel: Panel, chart: Chart, styles: Mapping[str, Style], width: float) -> str:
    frame = Frame(_x_scale(panel, chart, width), _y_scale(panel, chart))
    unit = "milliseconds" if panel.quantity == "ms" else panel.unit
    canvas = Canvas(width, _HEIGHT, _described(panel, chart, unit))
    canvas.axes(frame, chart.axis.label, unit, list(chart.axis.ticks) or None)
    for value, _, kind in _limits_of(panel):
        canvas.line(frame.left, frame.y(value), frame.right, frame.y(value), kind)
    for line in panel.lines:
        _draw_line(canvas, frame, line, chart, styles[line.name], unit)
    for value, name, kind in _limits_of(panel):  # over the points
        share = f" ({100 * value / panel.peak:.1f} % of the datasheet)" if panel.peak and kind == "ceiling" else ""
        canvas.label(frame.right, frame.y(value) - 5, f"{name} {value:.4g}{share}", f"label {kind}-name", "end")
    if panel.best is not None:
        x, y = frame.x(panel.best.x), frame.y(panel.best.y)
        canvas.add("circle", {"cx": x, "cy": y, "r": 8, "class": "best"})
        canvas.label(x, y - 12, f"best {panel.best.y:.4g}", "label strong")
    return canvas.text()


def _draw_line(canvas: Canvas, frame: Frame, line: Line, chart: Chart, style: Style, unit: str) -> None:
    color = color_class(style.color)
    points = _merged(line.points)
    if chart.bar_width is not None:
        for point in points:
            left, right = (frame.x(point.x + side * chart.bar_width / 2) for side in (-1, 1))
            size = {"x": left, "y": frame.y(point.y), "width": right - left, "height": frame.bottom - frame.y(point.y)}
            canvas.add("rect", {**size, "class": f"{color} bar"}, hint=_hint(line, point, chart.axis, unit))
        return
    if chart.is_connected:
        path = "M" + "L".join(f"{frame.x(point.x):.1f} {frame.y(point.y):.1f}" for point in points)
        canvas.add("path", {"d": path, "class": f"{color} line{' companion' if line.is_companion else ''}"})
    for point in points:
        hint = _hint(line, point, chart.axis, unit)
        if len(points) <= _MOST_MARKED and point.high > point.low:
            x = frame.x(point.x)
            canvas.line(x, frame.y(point.low), x, frame.y(point.high), f"{color} interval")
        if len(points) <= _MOST_MARKED or not chart.is_connected:
            canvas.marker(frame.x(point.x), frame.y(point.y), style, hint)
        else:  # a place for the pointer
            canvas.add(
                "circle", {"cx": frame.x(point.x), "cy": frame.y(point.y), "r": 3, "class": f"{color} dot"}, "", hint
            )


def _merged(points: tuple[Point, ...]) -> list[Point]:
    """Points that coincide once."""
    return list(dict.fromkeys(points))


def _hint(line: Line, point: Point, axis: Axis, unit: str) -> str:
    named = {value: text for value, text in axis.ticks if text}
    place = named.get(point.x, f"{point.x:g}")
    interval = f", {point.low:.4g} to {point.high:.4g}" if point.high > point.low else ""
    return f"{line.name}: {point.y:.4g} {unit}{interval} ({axis.label} {place})"


def _limits_of(panel: Panel) -> Iterator[tuple[float, str, str]]:
    """The datasheet's peak unless it is far above all points, and the ceiling: value, name and class of the line."""
    highest = max(point.y for line in panel.lines for point in line.points)
    if panel.peak is not None and panel.quantity == "tflops" and panel.peak < _FAR_ABOVE * highest:
        yield panel.peak, "datasheet", "peak"
    if panel.ceiling is not None:
        yield panel.ceiling, "ceiling", "ceiling"


def _x_scale(panel: Panel, chart: Chart, width: float) -> Scale:
    panels = chart.panels if chart.axis.is_shared else [panel]
    aside = (chart.bar_width or 0.0) / 2
    places = [
        point.x + side for each in panels for line in each.lines for point in line.points for side in (-aside, aside)
    ]
    start, end = LETTER * _LABEL_LETTERS + 6, width - LINE
    return scale_of(places, start, end, is_log=chart.axis.is_log)


def _y_scale(panel: Panel, chart: Chart) -> Scale:
    """Time by its logarithm; rates from 0 where a bar is drawn or they spread that far."""
    panels = [each for each in chart.panels if (each.quantity, each.unit) == (panel.quantity, panel.unit)]
    panels = [panel] if chart.has_own_scales else panels
    ends = [
        end
        for each in panels
        for line in each.lines
        for point in line.points
        for end in (point.y, point.high, point.low)
    ]
    limits = [limit for each in panels for limit, _, _ in _limits_of(each)]
    is_log = panel.quantity == "ms" and min(ends) > 0
    spreads = not chart.has_own_scales and min(ends) < max(ends) / 2
    from_zero = not is_log and (chart.bar_width is not None or spreads)
    return scale_of([*ends, *limits], _HEIGHT - _BOTTOM, _TOP, is_log=is_log, from_zero=from_zero)


def _described(panel: Panel, chart: Chart, unit: str) -> str:
    """The picture in a sentence: each line with its highest figure."""
    highest = (f"{line.name} up to {max(point.y for point in line.points):.4g}" for line in panel.lines)
    limits = (f"{name} {value:.4g}" for value, name, _ in _limits_of(panel))
    return f"{panel.title or chart.title}, {unit}: {'; '.join([*highest, *limits])}"
