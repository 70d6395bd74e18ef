"""Show the verdict of ``mamf node`` on the devices of one or more machines as a document and as a chart.

A figure is one measured rate of a device, such as ``burst``. A machine is called a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter

from mamf.errors import UsageError
from mamf.node.verdict import (
    BURST,
    FIGURE_UNITS,
    SUSTAINED,
    NodeDevice,
    NodeVerdict,
    choose_speed_figure,
    compute_lost_speed_share,
    describe_slowest_device,
)
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point
from mamf.report.document import (
    MAX_KNOWN_HALF_WIDTH,
    UNKNOWN_INTERVAL,
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    convert_to_snake_case,
    format_four_digits,
    format_whole_number,
    make_sensor_columns,
    merge_remarks,
)


def make_node_document(
    devices: Sequence[NodeDevice],
    verdict: NodeVerdict,
    separate_measurement_reason: str = "",
    baseline_name: str = "",
    is_interrupted: bool = False,
) -> Document:
    """Return the report that ``mamf node`` prints, with the verdict and the figures of all devices.

    The first line is the reason for the verdict, because a pager shows the beginning of the report. The last line
    repeats the reason with the exit code, because a terminal shows the end.

    - ``separate_measurement_reason``: why the devices did not measure at the same time; empty if they did.
    - ``baseline_name``: the baseline of --baseline; empty if there is none.
    - ``is_interrupted``: whether a signal ended the run. The exit code is then not that of the verdict.
    """
    models = Counter(device.name for device in devices if device.name)
    remarks = [
        *(f"{count} x {name}" for name, count in models.items()),
        f"the devices did not measure at the same time: {separate_measurement_reason}"
        if separate_measurement_reason
        else "",
        f"also compared with {baseline_name}" if baseline_name else "",
    ]
    # If there are no findings, the line with the verdict already names the slowest device.
    slowest = [describe_slowest_device(devices)] if verdict.findings else []
    blocks: list[Block] = [
        Lines([verdict.reason, *merge_remarks((each.text, each.level) for each in verdict.findings[1:])]),
        Table(make_device_columns(devices), devices, key="figures"),
        Lines(list(filter(None, remarks))),
        Answer([*slowest, f"{verdict.reason}{'' if is_interrupted else f' (exit code {verdict.exit_code})'}"]),
    ]
    return Document(
        "Node",
        blocks,
        {
            "level": verdict.level,
            "exit_code": verdict.exit_code,
            "reason": verdict.reason,
            "findings": [{"level": each.level, "device": each.label, "text": each.text} for each in verdict.findings],
            "not_together": separate_measurement_reason,
            "slowest": describe_slowest_device(devices),
            "lost_share": compute_lost_speed_share(devices),
            "pace": choose_speed_figure(devices),
            "devices": [asdict(device) for device in devices],
        },
    )


def make_device_columns(devices: Sequence[NodeDevice]) -> list[Column[NodeDevice]]:
    """Return the columns of the table of devices: figures, sensor readings, and the position of each device if the
    devices are sorted by speed (1 is the fastest).
    """
    speed_figure = choose_speed_figure(devices)
    fastest_first = sorted(
        (each for each in devices if speed_figure in each.figures), key=lambda each: -each.figures[speed_figure]
    )
    places = {device.label: place for place, device in enumerate(fastest_first, start=1)}
    return [
        Column("", "device", lambda device: device.full_label, is_left_aligned=True),
        *(Column(name, "", attrgetter(name)) for name in ("node", "index", "name", "uuid_hash", "address")),
        *(column for name in FIGURE_UNITS for column in make_figure_columns(name)),
        Column(
            "verified_problem_count", "problems verified", lambda device: device.verified_problem_count, drop_priority=1
        ),
        Column("place", "place", lambda device: places.get(device.label), drop_priority=2),
        *make_sensor_columns(lambda device: device.conditions),
        Column(
            "temperature_celsius", "C", lambda device: device.conditions.celsius, format_whole_number, drop_priority=6
        ),
        Column(
            "throttled",
            "throttled",
            lambda device: ", ".join(f"{reason} {100 * share:.0f} %" for reason, share in device.throttled.items()),
            drop_priority=3,
            is_left_aligned=True,
        ),
        Column("failures", "", lambda device: "; ".join(device.failures)),
        Column("lacks", "", lambda device: "; ".join(device.lacks)),
    ]


def make_figure_columns(name: str) -> list[Column[NodeDevice]]:
    """Return two columns for a figure: its value, and the half-width of its confidence interval in percent."""
    unit, factor = FIGURE_UNITS[name]
    return [
        Column(
            convert_to_snake_case(f"{name} {unit}"),
            f"{name} {unit}",
            lambda device: device.figures[name] * factor if name in device.figures else None,
            format_four_digits,
            drop_priority=0 if name == SUSTAINED else 1,
        ),
        Column(
            f"{name}_half_width_percent",
            f"{name} +-%" if name in (BURST, SUSTAINED) else "",
            lambda device: 100 * device.half_widths[name] if name in device.half_widths else None,
            lambda percent: f"{percent:.2f}" if percent <= 100 * MAX_KNOWN_HALF_WIDTH else UNKNOWN_INTERVAL,
            drop_priority=5,
        ),
    ]


# Maximum number of devices with a separate label on the axis or in the legend of the chart.
_MAX_DEVICE_LABELS = 12
# Maximum number of findings that are printed below the chart.
_MAX_CHART_FINDINGS = 4
# Maximum number of panels that are drawn side by side.
_MAX_PANELS_PER_ROW = 4


def make_node_chart(devices: Sequence[NodeDevice], verdict: NodeVerdict) -> Chart:
    """Draw a panel for each figure, in which each device is a point. Each panel has a separate scale. Raises UsageError
    if no device has a figure.
    """
    figures = [name for name in FIGURE_UNITS if any(name in device.figures for device in devices)]
    if not figures:
        raise UsageError("there is nothing to draw, because no device has a measured rate: run 'mamf node' again")
    panels = [_make_figure_panel(name, devices) for name in figures]
    row_count = -(-len(panels) // _MAX_PANELS_PER_ROW)
    column_count = -(-len(panels) // row_count)
    padded = [*panels, *[None] * (row_count * column_count - len(panels))]
    labeled = devices if len(devices) <= _MAX_DEVICE_LABELS else ()
    return Chart(
        f"{len(devices)} device{'s' if len(devices) > 1 else ''} side by side: {verdict.level}",
        ", ".join(dict.fromkeys(device.name for device in devices if device.name)),
        Axis("device", ticks=tuple((float(x), str(device.index)) for x, device in enumerate(labeled))),
        tuple(tuple(padded[start : start + column_count]) for start in range(0, len(padded), column_count)),
        notes=(
            describe_slowest_device(devices),
            *(finding.text for finding in verdict.findings[:_MAX_CHART_FINDINGS]),
            f"{'spread: highest value relative to lowest; ' if len(devices) > 1 else ''}bars: 95 % repeat intervals; "
            "each panel has its own scale",
        ),
        is_connected=False,
        has_intervals=True,
        has_own_scales=True,
    )


def _make_figure_panel(name: str, devices: Sequence[NodeDevice]) -> Panel:
    unit, factor = FIGURE_UNITS[name]
    lines: dict[str, list[Point]] = {}
    nodes = {device.node for device in devices}
    for x, device in enumerate(devices):
        if name in device.figures:
            # The points of one Line have the same color. Make one Line per device. If there are too many devices, make
            # one Line per node or, if there are too many nodes, a single Line.
            machine = f"node {device.node}" if 1 < len(nodes) <= _MAX_DEVICE_LABELS else "a device"
            line = device.label if len(devices) <= _MAX_DEVICE_LABELS else machine
            rate = device.figures[name] * factor
            half_width = device.half_widths.get(name, 0.0)
            half_width *= half_width <= MAX_KNOWN_HALF_WIDTH  # draw no unknown interval
            # The half-width is that of the time, so the interval of the rate is not symmetric.
            lines.setdefault(line, []).append(Point(float(x), rate, rate / (1 + half_width), rate / (1 - half_width)))
    values = [device.figures[name] for device in devices if name in device.figures]
    title = f"{name}, spread {100 * (max(values) / min(values) - 1):.1f} %" if len(devices) > 1 else name
    return Panel(title, tuple(Line(line, tuple(points)) for line, points in lines.items()), unit=unit)
