"""The verdict of one or more nodes, with the figures of every device: as a document, as a chart and for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import TERA
from mamf.node.figures import BURST, NOWHERE, SUSTAINED, UNITS, Device, shown
from mamf.node.gathering import Run
from mamf.node.verdict import Verdict, distribution, lost, pace_figure, slowest_line
from mamf.report import formats
from mamf.report.charts.chart import Axis, Chart, Line, Panel, Point
from mamf.report.columns import sensor_columns
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import list_once, significant, snake_case, whole
from mamf.text import visible

Sample = tuple[dict[str, object], float]


def exposition(devices: Sequence[Device], verdict: Verdict) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats. The reason is a comment in the first line."""
    lines = [f"# {visible(verdict.reason)}"]
    for name, description, samples in _families(devices, verdict):
        lines += [f"# HELP {name} {description}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _families(devices: Sequence[Device], verdict: Verdict) -> Iterator[tuple[str, str, list[Sample]]]:
    yield "mamf_node_verdict", "0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN", [({}, verdict.exit_code)]
    yield "mamf_node_lost_share", "What a synchronous job loses to the slowest device", [({}, lost(devices))]
    failed = [(_of(device), float(bool(device.failures))) for device in devices]
    yield "mamf_device_failed", "1 if the device failed", failed
    rates = [({**_of(each), "figure": name}, rate * TERA) for each in devices for name, rate in each.figures.items()]
    yield "mamf_device_rate", "FLOP or bytes a second", rates
    throttled = [({**_of(each), "reason": why}, share) for each in devices for why, share in each.throttled.items()]
    yield "mamf_device_throttled_share", "Share of the time", throttled
    for name, unit in (("clock_hz", "hertz"), ("watts", "watts"), ("celsius", "celsius")):
        readings = [(_of(each), getattr(each.conditions, name)) for each in devices]
        yield f"mamf_device_{unit}", "At the sustained ceiling", [each for each in readings if each[1] is not None]


def _of(device: Device) -> dict[str, object]:
    return {"node": device.node, "device": device.index, "uuid": device.uuid_hash or ""}


def _labels(labels: Mapping[str, object]) -> str:
    def quoted(value: object) -> str:
        return visible(str(value)).replace("\\", "\\\\").replace('"', '\\"')

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""


#: Formats of this report alone, by name.
_OWN_FORMATS = {"prometheus": exposition}
_NCCL_TESTS = "collectives: bus bandwidth in GB/s by nccl-tests' formulas, by the size of a rank's larger buffer"
_TEXTS = ("node", "index", "name", "uuid_hash", "host", "address")


def render_node(format: str, run: Run, devices: Sequence[Device], verdict: Verdict, width: int | None = None) -> str:
    """``width``: of the terminal, None for all columns."""
    if write := _OWN_FORMATS.get(format):
        return write(devices, verdict)
    return formats.FORMATS[format](node_document(run, devices, verdict), width)


def node_document(run: Run, devices: Sequence[Device], verdict: Verdict) -> Document:
    """Tables and markdown begin with the reason, for a pager, and end with the pace of a synchronous job."""
    others = list_once((finding.text, finding.level) for finding in verdict.findings[1:])
    nodes = [[each for each in devices if each.node == node] for node in sorted({each.node for each in devices})]
    spreads = [name for name in UNITS if len(values_of(name, devices)) > 1]
    buses = list(dict.fromkeys(name.partition(" ")[0] for name in slowest_collectives(devices)))
    apart = [f"not measured together: {run.apart}"] if run.apart else []
    blocks: list[Block] = [
        Lines([verdict.reason, *others]),
        Table(device_columns(devices), devices, key="figures"),
        Table(node_columns(pace_figure(devices)), nodes if len(nodes) > 1 else [], key="nodes"),
        Table(spread_columns(devices), spreads, key="spread"),
        Table(collective_columns(devices), buses, key="collectives"),
        Lines([*verdict.notes, *apart, *([_NCCL_TESTS] if buses else [])]),
        Answer([f"{verdict.level}, exit code {verdict.exit_code}: {slowest_line(devices)}"]),
    ]
    return Document("Node", blocks, node_data(run, devices, verdict))


def node_data(run: Run, devices: Sequence[Device], verdict: Verdict) -> dict[str, Any]:
    """What json holds beside the tables; rates in 1e12 FLOP or bytes a second."""
    return {
        "level": verdict.level,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "findings": [{"level": each.level, "rank": each.rank, "text": each.text} for each in verdict.findings],
        "notes": list(verdict.notes),
        "ranks": run.ranks,
        "not_together": run.apart,
        "slowest": slowest_line(devices),
        "lost_share": lost(devices),
        "pace": pace_figure(devices),
        "devices": [device.record() for device in devices],
    }


def device_columns(devices: Sequence[Device]) -> list[Column[Device]]:
    """Figures, what the sensors read, and the place among all devices by pace."""
    pace = pace_figure(devices)
    order = sorted((each for each in devices if pace in each.figures), key=lambda each: -each.figures[pace])
    places = {device.rank: place for place, device in enumerate(order, start=1)}
    return [
        Column("", "device", lambda device: device.who, left=True),
        Column("rank", "", lambda device: device.rank),
        *(Column(name, "", attrgetter(name)) for name in _TEXTS),
        *(column for name in UNITS for column in figure_columns(name)),
        Column("place", "place", lambda device: places.get(device.rank), importance=2),
        *sensor_columns(lambda device: device.conditions),
        Column("temperature_celsius", "C", lambda device: device.conditions.celsius, whole, importance=6),
        Column("throttled", "throttled", throttled, importance=3, left=True),
        Column("failures", "", lambda device: "; ".join(device.failures)),
        Column("lacks", "", lambda device: "; ".join(device.lacks)),
    ]


def figure_columns(name: str) -> list[Column[Device]]:
    """A figure in its unit, and half of its interval in percent."""
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


def throttled(device: Device) -> str:
    return ", ".join(f"{reason} {share:.0%}" for reason, share in device.throttled.items())


def node_columns(pace: str) -> list[Column[Sequence[Device]]]:
    """A row for the devices of each node: the slowest, and what the node loses to it."""

    def measured(own: Sequence[Device]) -> list[Device]:
        return [device for device in own if pace in device.figures]

    def slowest(own: Sequence[Device]) -> Device | None:
        return min(measured(own), key=lambda device: device.figures[pace], default=None)

    unit, factor = UNITS[pace]
    name = snake_case(unit)
    return [
        Column("node", "node", lambda own: "unknown" if own[0].node == NOWHERE else own[0].node, left=True),
        Column("devices", "devices", len),
        Column("failed", "failed", lambda own: sum(bool(each.failures) for each in own)),
        Column("host", "host", lambda own: ", ".join(sorted({each.host for each in own if each.host})), left=True),
        Column(
            f"{pace}_median_{name}",
            f"{pace} median {unit}",
            lambda own: distribution(values_of(pace, own))[1] * factor if measured(own) else None,
        ),
        Column(f"slowest_{name}", "slowest", lambda own: (each := slowest(own)) and each.figures[pace] * factor),
        Column("slowest_device", "of device", lambda own: (each := slowest(own)) and each.index),
        Column("lost_share", "lost", lambda own: lost(measured(own)) if measured(own) else None, "{:.1%}".format),
    ]


def values_of(figure: str, devices: Iterable[Device]) -> list[float]:
    """In 1e12 FLOP or bytes a second."""
    return [device.figures[figure] for device in devices if figure in device.figures]


def spread_columns(devices: Sequence[Device]) -> list[Column[str]]:
    """A row for each figure: how it spreads over all devices. Json holds 1e12 FLOP or bytes a second."""

    def spread(place: int) -> Callable[[str], float]:
        return lambda figure: distribution(values_of(figure, devices))[place]

    def text(read: Callable[[str], float]) -> Callable[[str], str]:
        return lambda figure: shown(figure, read(figure))

    ends = [("lowest", spread(0)), ("median", spread(1)), ("highest", spread(2))]
    return [
        Column("figure", "figure", str, left=True),
        *(Column("", name, text(read)) for name, read in ends),
        *(Column(f"{name}_tera_per_s", "", read) for name, read in ends),
        Column("spread", "spread", lambda figure: spread(2)(figure) / spread(0)(figure) - 1, "{:.1%}".format),
    ]


def collective_columns(devices: Sequence[Device]) -> list[Column[str]]:
    """A row for each collective, a column for each size: what the slowest rank saw, in GB/s."""
    rates = slowest_collectives(devices)

    def rate(size: str) -> Callable[[str], float | None]:
        return lambda bus: rates[f"{bus} {size}"] * 1e3 if f"{bus} {size}" in rates else None

    sizes = dict.fromkeys(name.partition(" ")[2] for name in rates)
    return [
        Column("collective", "collective", str, left=True),
        *(Column(f"bus_{snake_case(size)}_gb_per_s", size, rate(size), significant) for size in sizes),
    ]


def slowest_collectives(devices: Iterable[Device]) -> dict[str, float]:
    """Bus bandwidth in TB/s by collective and size: ranks end together, so their figures differ only by timing."""
    found: dict[str, float] = {}
    for device in devices:
        for name, rate in device.collectives.items():
            found[name] = min(rate, found.get(name, rate))
    return found


_MOST_NAMED = 12
_MOST_FINDINGS = 4
#: Panels side by side.
_MOST_ACROSS = 4


def node_chart(devices: Sequence[Device], verdict: Verdict) -> Chart:
    """A panel per figure, each on its own scale. Raises UsageError if no device has a figure."""
    figures = [name for name in UNITS if any(name in device.figures for device in devices)]
    if not figures:
        raise UsageError("nothing to draw: no device has a figure")
    panels = [_figure_panel(name, devices) for name in figures]
    rows = -(-len(panels) // _MOST_ACROSS)
    across = -(-len(panels) // rows)
    padded = [*panels, *[None] * (rows * across - len(panels))]
    notes = [slowest_line(devices), *(finding.text for finding in verdict.findings[:_MOST_FINDINGS])]
    ticks = tuple((float(each.rank), str(each.rank)) for each in devices if len(devices) <= _MOST_NAMED)
    return Chart(
        f"{len(devices)} device{'s' if len(devices) > 1 else ''} side by side: {verdict.level}",
        ", ".join(dict.fromkeys(device.name for device in devices if device.name)),
        Axis("rank" if len({each.node for each in devices}) > 1 else "device", ticks=ticks),
        tuple(tuple(padded[start : start + across]) for start in range(0, len(padded), across)),
        (*notes, "spread: highest to lowest; bars: 95 % repeat intervals; each panel has its own scale"),
        is_connected=False,
        has_intervals=True,
        has_own_scales=True,
    )


def _figure_panel(name: str, devices: Sequence[Device]) -> Panel:
    unit, factor = UNITS[name]
    lines: dict[str, list[Point]] = {}
    for device, line in zip(devices, _names(devices), strict=True):
        if name in device.figures:
            rate = device.figures[name] * factor
            half = rate * device.half_widths.get(name, 0.0)
            lines.setdefault(line, []).append(Point(float(device.rank), rate, rate - half, rate + half))
    lowest, _, highest = distribution(values_of(name, devices))
    title = f"{name}, spread {highest / lowest - 1:.1%}" if len(devices) > 1 else name
    return Panel(title, "tflops", tuple(Line(line, tuple(points)) for line, points in lines.items()), unit=unit)


def _names(devices: Sequence[Device]) -> list[str]:
    """Each device's name in the legend: if there are too many, its node's name."""
    if len(devices) <= _MOST_NAMED:
        return [device.place for device in devices]
    nodes = {device.node for device in devices}
    return [f"node {device.node}" if 1 < len(nodes) <= _MOST_NAMED else "a device" for device in devices]
