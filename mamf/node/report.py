"""Reports the verdict on one or more nodes with the figures of every device, as a document and as a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from mamf.errors import UsageError
from mamf.node.verdict import (
    BURST,
    SUSTAINED,
    UNITS,
    Device,
    NodeVerdict,
    compute_lost_share,
    pace_figure,
    slowest_line,
)
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    list_once,
    sensor_columns,
    significant,
    snake_case,
    whole,
)

_TEXTS = ("node", "index", "name", "uuid_hash", "address")


def node_document(devices: Sequence[Device], verdict: NodeVerdict, not_together: str = "") -> Document:
    """Make the report of ``mamf node``.

    The first line gives the reason for the verdict, for a pager; the last one the pace of a synchronous job.
    ``not_together``: why the devices did not measure together, empty if they did.
    """
    others = list_once((finding.text, finding.level) for finding in verdict.findings[1:])
    remarks = [f"not measured together: {not_together}"] if not_together else []
    blocks: list[Block] = [
        Lines([verdict.reason, *others]),
        Table(device_columns(devices), devices, key="figures"),
        Lines(remarks),
        Answer([f"{verdict.level}, exit code {verdict.exit_code}: {slowest_line(devices)}"]),
    ]
    data = {
        "level": verdict.level,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "findings": [{"level": each.level, "device": each.label, "text": each.text} for each in verdict.findings],
        "not_together": not_together,
        "slowest": slowest_line(devices),
        "lost_share": compute_lost_share(devices),
        "pace": pace_figure(devices),
        "devices": [device.record() for device in devices],
    }
    return Document("Node", blocks, data)


def device_columns(devices: Sequence[Device]) -> list[Column[Device]]:
    """Return columns with each device's figures and sensor readings, and its place in the order of pace."""
    pace = pace_figure(devices)
    order = sorted((each for each in devices if pace in each.figures), key=lambda each: -each.figures[pace])
    places = {device.label: place for place, device in enumerate(order, start=1)}
    return [
        Column("", "device", lambda device: device.full_label, left=True),
        *(Column(name, "", attrgetter(name)) for name in _TEXTS),
        *(column for name in UNITS for column in figure_columns(name)),
        Column("place", "place", lambda device: places.get(device.label), importance=2),
        *sensor_columns(lambda device: device.conditions),
        Column("temperature_celsius", "C", lambda device: device.conditions.celsius, whole, importance=6),
        Column("throttled", "throttled", format_throttling, importance=3, left=True),
        Column("failures", "", lambda device: "; ".join(device.failures)),
        Column("lacks", "", lambda device: "; ".join(device.lacks)),
    ]


def figure_columns(name: str) -> list[Column[Device]]:
    """Return columns with a figure in its unit, and the half-width of its interval in percent."""
    unit, factor = UNITS[name]
    return [
        Column(
            snake_case(f"{name} {unit}"),
            f"{name} {unit}",
            lambda device: device.figures[name] * factor if name in device.figures else None,
            significant,
            importance=0 if name == SUSTAINED else 1,
        ),
        Column(
            f"{name}_half_width_percent",
            f"{name} +-%" if name in (BURST, SUSTAINED) else "",
            lambda device: 100 * device.half_widths[name] if name in device.half_widths else None,
            "{:.2f}".format,
            importance=5,
        ),
    ]


def format_throttling(device: Device) -> str:
    return ", ".join(f"{reason} {share:.0%}" for reason, share in device.throttled.items())


def figure_values(figure: str, devices: Iterable[Device]) -> list[float]:
    """Return a figure of all devices that have it, in 1e12 FLOP/s or bytes/s."""
    return [device.figures[figure] for device in devices if figure in device.figures]


def relative_range(values: Sequence[float]) -> float:
    """Return how far the maximum is above the minimum, as a share of the minimum."""
    return max(values) / min(values) - 1


_MAX_NAMED = 12
_MAX_FINDINGS = 4
#: Maximum number of panels in a row.
_MAX_ACROSS = 4


def node_chart(devices: Sequence[Device], verdict: NodeVerdict) -> Chart:
    """Draw a panel per figure, each on its own scale. Raises UsageError if no device has a figure."""
    figures = [name for name in UNITS if any(name in device.figures for device in devices)]
    if not figures:
        raise UsageError("nothing to draw: no device has a figure")
    panels = [_figure_panel(name, devices) for name in figures]
    rows = -(-len(panels) // _MAX_ACROSS)
    across = -(-len(panels) // rows)
    padded = [*panels, *[None] * (rows * across - len(panels))]
    notes = [slowest_line(devices), *(finding.text for finding in verdict.findings[:_MAX_FINDINGS])]
    ticks = tuple((float(place), str(each.index)) for place, each in enumerate(devices) if len(devices) <= _MAX_NAMED)
    return Chart(
        f"{len(devices)} device{'s' if len(devices) > 1 else ''} side by side: {verdict.level}",
        ", ".join(dict.fromkeys(device.name for device in devices if device.name)),
        Axis("device", ticks=ticks),
        tuple(tuple(padded[start : start + across]) for start in range(0, len(padded), across)),
        notes=(*notes, "spread: highest to lowest; bars: 95 % repeat intervals; each panel has its own scale"),
        is_connected=False,
        has_intervals=True,
        has_own_scales=True,
    )


def _figure_panel(name: str, devices: Sequence[Device]) -> Panel:
    unit, factor = UNITS[name]
    lines: dict[str, list[Point]] = {}
    for place, (device, line) in enumerate(zip(devices, _legend_names(devices), strict=True)):
        if name in device.figures:
            rate = device.figures[name] * factor
            half = rate * device.half_widths.get(name, 0.0)
            lines.setdefault(line, []).append(Point(float(place), rate, rate - half, rate + half))
    title = f"{name}, spread {relative_range(figure_values(name, devices)):.1%}" if len(devices) > 1 else name
    return Panel(title, tuple(Line(line, tuple(points)) for line, points in lines.items()), unit=unit)


def _legend_names(devices: Sequence[Device]) -> list[str]:
    """Return each device's name for the legend: its label, or its node's name if there are too many devices."""
    if len(devices) <= _MAX_NAMED:
        return [device.label for device in devices]
    nodes = {device.node for device in devices}
    return [f"node {device.node}" if 1 < len(nodes) <= _MAX_NAMED else "a device" for device in devices]
