"""The roofline as SVG: ceilings as lines, rows as points. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from mamf.report.charts.palette import Style
from mamf.report.charts.roofline import RooflineChart
from mamf.report.svg.canvas import LINE, Canvas, Drawn, Frame, color_class
from mamf.report.svg.scale import Scale

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1120.0, 560.0, 60.0, 26.0, 44.0


def draw_roofline(chart: RooflineChart, styles: Mapping[str, Style]) -> list[Drawn]:
    """Labels of lines stand at their right ends, or along them where they rise; marks say on hover what they are."""
    frame = Frame(
        Scale(*chart.x_limits, _LEFT, _WIDTH - LINE, True), Scale(*chart.y_limits, _HEIGHT - _BOTTOM, _TOP, True)
    )
    canvas = Canvas(_WIDTH, _HEIGHT, "; ".join([chart.title, *(line.label for line in chart.lines)]))
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
        canvas.marker(frame.x(mark.place[0]), frame.y(mark.place[1]), styles[mark.name], hint, not mark.is_placed)
    return [Drawn("", canvas.text())]
