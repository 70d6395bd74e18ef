"""Devices side by side: each figure as a share of its median over all, with its interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mamf.errors import UsageError
from mamf.node.figures import UNITS, Device, shown
from mamf.node.verdict import Verdict, distribution, slowest_line
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point

#: Width of a figure's group of devices and of one device, as shares of the distance between figures.
_WIDTH_OF_GROUP, _WIDTH_OF_DEVICE = 0.7, 0.15
_MOST_NAMED = 12
_MOST_FINDINGS = 4


def node_chart(devices: Sequence[Device], verdict: Verdict) -> Chart:
    """Raises UsageError if no device has a figure."""
    figures = [name for name in UNITS if any(name in device.figures for device in devices)]
    if not figures:
        raise UsageError("nothing to draw: no device has a figure")
    medians = {
        name: distribution([each.figures[name] for each in devices if name in each.figures])[1] for name in figures
    }
    names, lines = _names(devices), dict[str, list[Point]]()
    width = min(_WIDTH_OF_GROUP / len(devices), _WIDTH_OF_DEVICE)
    for place, device in enumerate(devices):
        aside = (place - (len(devices) - 1) / 2) * width
        for number, name in enumerate(figures):
            if name in device.figures:
                share = 100 * device.figures[name] / medians[name]
                half = share * device.half_widths.get(name, 0.0)
                lines.setdefault(names[place], []).append(Point(number + aside, share, share - half, share + half))
    ticks = tuple((float(number), f"{name}: {shown(name, medians[name])}") for number, name in enumerate(figures))
    drawn = tuple(Line(name, tuple(points)) for name, points in lines.items())
    notes = [slowest_line(devices), *(finding.text for finding in verdict.findings[:_MOST_FINDINGS])]
    return Chart(
        f"{len(devices)} device{'s' if len(devices) > 1 else ''} side by side: {verdict.level}",
        ", ".join(dict.fromkeys(device.name for device in devices if device.name)),
        Axis("figure, and its median over all devices", ticks=ticks),
        ((Panel("", "tflops", drawn, unit="% of the median"),),),
        (*notes, "bars: 95 % repeat intervals"),
        is_connected=False,
        has_intervals=True,
    )


def _names(devices: Sequence[Device]) -> list[str]:
    """Each device's name in the legend: if there are too many, its node's name."""
    if len(devices) <= _MOST_NAMED:
        return [device.place for device in devices]
    nodes = {device.node for device in devices}
    return [f"node {device.node}" if 1 < len(nodes) <= _MOST_NAMED else "a device" for device in devices]
