"""Decides whether a device is slow, faulty or missing, by fixed limits. Pure code: it measures and reads nothing.

Each device is compared with the median of all *other* devices of its model, and with a baseline. The limits suit the
spread of 26 H200 cards (standard deviation 1.1 % in burst, 1.0 % in sustained). ``tools/rates.py node`` computes how
often they give a false result at this and other spreads.

Here is also the report on the verdict, with the figures of every device, as a document and as a chart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from mamf.errors import CRITICAL, OK, UNKNOWN, VERDICT_EXIT_CODES, WARN, UsageError
from mamf.measurement import Conditions, group_pairs
from mamf.report.charts.lines import Axis, Chart, Line, Panel, Point
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    convert_to_snake_case,
    format_significant,
    format_whole_number,
    make_sensor_columns,
    merge_remarks,
)

#: The figures by which devices are compared.
BURST, SUSTAINED, COPY, READ = "burst", "sustained", "copy", "read"
TO_DEVICE, TO_HOST, TO_PEER = "to_device", "to_host", "to_peer"
#: The unit in which each figure is printed, and the factor from 1e12/s to that unit.
UNITS = {
    BURST: ("TFLOPS", 1.0),
    SUSTAINED: ("TFLOPS", 1.0),
    COPY: ("GB/s", 1e3),
    READ: ("GB/s", 1e3),
    TO_DEVICE: ("GB/s", 1e3),
    TO_HOST: ("GB/s", 1e3),
    TO_PEER: ("GB/s", 1e3),
}


@dataclass(frozen=True)
class Device:
    """One device, with what was measured on it.

    - ``index``, ``node``: its index on its node, and the number of the node among those that are judged together.
    - ``address``: its address on the bus, known only in the measuring process.
    - ``dtype``: the dtype of its matmul figures.
    - ``build``: its number of compute units and its power limit in watts.
    - ``figures``: 1e12 FLOP/s or bytes/s, by the names in UNITS. ``half_widths``: of their intervals, as a share.
    - ``conditions``: sensor readings of the sustained ceiling, or of the burst ceiling if there is no other.
    - ``throttled``: the largest share of time in any part, by reason.
    - ``failures``: why the device failed, a line each. ``lacks``: what was not measured, and why.
    """

    index: int
    node: int = 0
    name: str = ""
    uuid_hash: str | None = None
    address: str | None = None
    dtype: str = ""
    build: tuple[int | None, float | None] = (None, None)
    figures: Mapping[str, float] = field(default_factory=dict)
    half_widths: Mapping[str, float] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)
    throttled: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The device's name within the run, such as ``node 1 device 3``."""
        return f"node {self.node} device {self.index}" if self.node else f"device {self.index}"

    @property
    def full_label(self) -> str:
        """The label with bus address and uuid, if they are known."""
        uuid = self.uuid_hash and f"uuid {self.uuid_hash}"
        known = [each for each in (self.address, uuid) if each]
        return f"{self.label} ({', '.join(known)})" if known else self.label

    def record(self) -> dict[str, Any]:
        """Return the device as JSON values."""
        return asdict(self)


def format_figure(figure: str, value: float) -> str:
    """Format a figure with its unit. ``value``: in 1e12/s."""
    unit, factor = UNITS[figure]
    return f"{format_significant(value * factor)} {unit}"


#: Name of the mean of the burst and sustained shortfalls: a slow card is slow in both.
BOTH = "burst and sustained"
#: Maximum share by which a device may be below the median of the others. Copies to and from the host differ by 5 %
#: between healthy cards, and by up to 20 % while all devices copy. A link with half of its lanes loses 50 %.
LIMITS = {BOTH: 0.04, BURST: 0.05, SUSTAINED: 0.05, COPY: 0.02, READ: 0.02, TO_PEER: 0.05, TO_DEVICE: 0.4, TO_HOST: 0.4}
#: A shortfall of more than this multiple of its limit is CRITICAL.
CRITICAL_FACTOR = 2.0
#: If the other devices have a larger relative standard deviation, a shortfall may be normal and is never CRITICAL.
WIDE_SPREAD = 0.015
#: Factors for the limits when a device is compared with a baseline. A card repeats its matmul rates within 0.3 %, so
#: its own earlier run allows half the limit; memory rates repeat no better than cards differ. A baseline of other cards
#: may have only one, or the fastest of many, so its limits are wider.
_SAME_CARD_FACTORS = dict.fromkeys((BOTH, BURST, SUSTAINED), 0.5)
_OTHER_CARD_FACTORS = dict.fromkeys(LIMITS, 1.5)

_SEVERITY = (OK, UNKNOWN, WARN, CRITICAL)
#: Throttling reasons that are normal under load, and the minimum share of time for any other reason to be a finding.
_EXPECTED_REASONS = ("power cap",)
_MIN_THROTTLED_SHARE = 0.1
#: A figure with a larger half-width (as a share) is a finding and is not compared. Healthy cards stay below 3 %. Copies
#: to and from the host are exempt, because devices slow one another's copies.
_MAX_HALF_WIDTH = 0.1
_HOST_COPIES = (TO_DEVICE, TO_HOST)


@dataclass(frozen=True)
class Baseline:
    """Cards that are known to be good. ``source``: how messages name it."""

    source: str
    cards: Sequence[Device]

    def select_cards(self, device: Device) -> tuple[list[Device], bool]:
        """Return the cards to compare a device with, and whether they are its own earlier run.

        Without an earlier run these are all cards of its model and dtype.
        """
        cards = [card for card in self.cards if card.name == device.name]
        cards = [card for card in cards if not card.dtype or not device.dtype or card.dtype == device.dtype]
        same = [card for card in cards if device.uuid_hash and card.uuid_hash == device.uuid_hash]
        return (same, True) if same else (cards, False)


@dataclass(frozen=True)
class NodeFinding:
    """One line about a device. ``label``: the device's label, or None if the finding is about all devices."""

    level: str
    label: str | None
    text: str


@dataclass(frozen=True)
class NodeVerdict:
    """The result for a node. ``reason``: one line, for a pager. ``findings``: sorted, the worst first."""

    level: str
    reason: str
    findings: tuple[NodeFinding, ...] = ()

    @property
    def exit_code(self) -> int:
        return VERDICT_EXIT_CODES[self.level]


def judge(devices: Sequence[Device], baseline: Baseline | None = None, must_fit: bool = False) -> NodeVerdict:
    """Judge all devices of a run. ``must_fit``: a device for which the baseline has no card is a finding."""
    findings = [finding for device in devices for finding in _list_standalone_findings(device)]
    is_compared = False
    for peers in group_pairs((device.name, device) for device in devices if not device.failures).values():
        findings += _list_slow_findings(peers, baseline)
        has_baseline = baseline is not None and any(baseline.select_cards(device)[0] for device in peers)
        is_compared = is_compared or len(peers) > 1 or has_baseline
        if baseline and must_fit and not has_baseline:
            model = " in ".join(filter(None, (peers[0].name, peers[0].dtype)))
            findings.append(NodeFinding(UNKNOWN, None, f"{baseline.source} has no figures for {model}"))
    if not is_compared:
        message = "cannot tell whether a device is slow: there is no second device of its model and no baseline"
        findings.append(NodeFinding(UNKNOWN, None, message if devices else "no device was measured"))
    findings.sort(key=lambda finding: -_SEVERITY.index(finding.level))
    level = findings[0].level if findings else OK
    return NodeVerdict(level, f"{level}: {_summarize_reason(devices, findings)}", tuple(findings))


def _summarize_reason(devices: Sequence[Device], findings: Sequence[NodeFinding]) -> str:
    if not findings:
        return f"{len(devices)} device{'s' if len(devices) > 1 else ''}, {describe_slowest(devices)}"
    others = len({finding.label for finding in findings} - {findings[0].label, None})
    more = f"; and {others} more device{'s' if others > 1 else ''}" if others else ""
    return f"{findings[0].text}{more}"


def _list_standalone_findings(device: Device) -> Iterator[NodeFinding]:
    """Yield the findings about a device that need no comparison with others."""
    for failure in device.failures:
        yield NodeFinding(CRITICAL, device.label, f"{device.full_label}: {failure}")
    for lacking in device.lacks:
        yield NodeFinding(UNKNOWN, device.label, f"{device.full_label}: {lacking}")
    for figure, value in device.figures.items():
        if not _is_steady(device, figure):
            noise = (
                f"{figure} {format_figure(figure, value)} is too noisy to compare (+-{device.half_widths[figure]:.0%})"
            )
            cause = "another process uses the device, or something slows it from time to time"
            yield NodeFinding(WARN, device.label, f"{device.full_label}: {noise}: {cause}")
    for reason, share in device.throttled.items():
        if reason not in _EXPECTED_REASONS and share >= _MIN_THROTTLED_SHARE:
            yield NodeFinding(WARN, device.label, f"{device.full_label}: throttled {share:.0%} of the time by {reason}")


def _is_steady(device: Device, figure: str) -> bool:
    return figure in _HOST_COPIES or device.half_widths.get(figure, 0.0) <= _MAX_HALF_WIDTH


# -- comparisons -------------------------------------------------------------------------------------------------------


class Shortfall(NamedTuple):
    """A figure below its reference by a ``share`` of the reference. The share may be at most ``limit``."""

    figure: str
    share: float
    limit: float


def compute_shortfalls(device: Device, others: Sequence[Device]) -> dict[str, float]:
    """Compute how far each figure of a device is below the median of the other devices, as a share."""
    shares = {}
    for figure in UNITS:
        own = _get_steady_value(device, figure)
        values = [value for other in others if (value := _get_steady_value(other, figure)) is not None]
        if own is not None and values:
            shares[figure] = 1 - own / median(values)
    if BURST in shares and SUSTAINED in shares:
        shares[BOTH] = (shares[BURST] + shares[SUSTAINED]) / 2
    return shares


def _get_steady_value(device: Device, figure: str) -> float | None:
    return device.figures.get(figure) if _is_steady(device, figure) else None


def find_worst_shortfall(
    device: Device, others: Sequence[Device], factors: Mapping[str, float] = MappingProxyType({})
) -> Shortfall | None:
    """Return the shortfall that exceeds its limit by the largest factor, or None. ``factors``: multiply the limits."""
    candidates = [
        Shortfall(figure, share, LIMITS[figure] * factors.get(figure, 1.0))
        for figure, share in compute_shortfalls(device, others).items()
    ]
    worst = max(candidates, key=lambda each: each.share / each.limit, default=None)
    return worst if worst is not None and worst.share > worst.limit else None


def _list_slow_findings(peers: Sequence[Device], baseline: Baseline | None) -> Iterator[NodeFinding]:
    """Yield devices that are slower than the others of their model, or slower than their baseline."""
    slow = [find_worst_shortfall(device, [*peers[:place], *peers[place + 1 :]]) for place, device in enumerate(peers)]
    healthy = [device for device, shortfall in zip(peers, slow, strict=True) if shortfall is None]
    others = f"the median of {len(peers) - 1} other{'s' if len(peers) > 2 else ''}"
    for device, shortfall in zip(peers, slow, strict=True):
        if shortfall is not None:
            yield _describe_shortfall(device, shortfall, others, _compute_relative_spread(shortfall.figure, healthy))
    if baseline is None:
        return
    for device in peers:
        cards, is_same = baseline.select_cards(device)
        if shortfall := find_worst_shortfall(device, cards, _SAME_CARD_FACTORS if is_same else _OTHER_CARD_FACTORS):
            against = f"the same card in {baseline.source}" if is_same else baseline.source
            spread = None if is_same else _compute_relative_spread(shortfall.figure, healthy)
            yield _describe_shortfall(device, shortfall, against, spread or 0.0)


def _compute_relative_spread(figure: str, devices: Sequence[Device]) -> float | None:
    """Return the relative standard deviation of a figure between devices; None for fewer than two."""
    values = [shares[figure] for device in devices if figure in (shares := compute_shortfalls(device, devices))]
    return stdev(values) if len(values) > 1 else None


def _describe_shortfall(device: Device, slow: Shortfall, against: str, spread: float | None) -> NodeFinding:
    """Describe a slow device. ``spread``: relative standard deviation of the healthy ones, None if too few."""
    is_critical = slow.share > CRITICAL_FACTOR * slow.limit and spread is not None and spread <= WIDE_SPREAD
    value = f" {format_figure(slow.figure, device.figures[slow.figure])}" if slow.figure in UNITS else ""
    text = f"{slow.figure}{value}, {slow.share:.1%} below {against} (limit {slow.limit:.1%})"
    if spread is None:
        text += "; there are too few other devices to tell how much healthy ones differ"
    elif spread > WIDE_SPREAD:
        text += f"; the other devices differ by {spread:.1%} (standard deviation)"
    return NodeFinding(CRITICAL if is_critical else WARN, device.label, f"{device.full_label}: {text}")


# -- the pace of a synchronous job -------------------------------------------------------------------------------------


def describe_slowest(devices: Sequence[Device]) -> str:
    """Return a line with the slowest device and the share of speed that a synchronous job loses to it."""
    figure = choose_pace_figure(devices)
    measured = [device for device in devices if figure in device.figures]
    if not measured:
        return "no burst or sustained rate was measured"
    if len(measured) == 1:
        return f"{figure} {format_figure(figure, measured[0].figures[figure])}"
    slowest = min(measured, key=lambda device: device.figures[figure])
    rate = f"{format_figure(figure, slowest.figures[figure])} {figure}"
    return (
        f"the slowest is {slowest.label} with {rate}: a synchronous job loses {compute_lost_share(devices):.1%} to it"
    )


def choose_pace_figure(devices: Iterable[Device]) -> str:
    """Return the name of the figure that sets the pace of a job: sustained, or burst if it was not measured."""
    return SUSTAINED if any(SUSTAINED in device.figures for device in devices) else BURST


def compute_lost_share(devices: Sequence[Device]) -> float:
    """Return the share of the devices' mean speed that is lost if all wait for the slowest."""
    figure = choose_pace_figure(devices)
    values = [device.figures[figure] for device in devices if figure in device.figures]
    return 1 - min(values) / fmean(values) if values else 0.0


_TEXT_COLUMNS = ("node", "index", "name", "uuid_hash", "address")


def make_node_document(devices: Sequence[Device], verdict: NodeVerdict, not_together: str = "") -> Document:
    """Make the report of ``mamf node``.

    The first line gives the reason for the verdict, for a pager; the last one repeats it with the exit code.
    ``not_together``: why the devices did not measure together, empty if they did.
    """
    others = merge_remarks((finding.text, finding.level) for finding in verdict.findings[1:])
    models = Counter(device.name for device in devices if device.name)
    remarks = [f"{count} x {name}" for name, count in models.items()]
    remarks += [f"not measured together: {not_together}"] if not_together else []
    pace = [describe_slowest(devices)] if verdict.findings else []  # without findings the reason contains this line
    blocks: list[Block] = [
        Lines([verdict.reason, *others]),
        Table(make_device_columns(devices), devices, key="figures"),
        Lines(remarks),
        Answer([*pace, f"{verdict.reason} (exit code {verdict.exit_code})"]),
    ]
    data = {
        "level": verdict.level,
        "exit_code": verdict.exit_code,
        "reason": verdict.reason,
        "findings": [{"level": each.level, "device": each.label, "text": each.text} for each in verdict.findings],
        "not_together": not_together,
        "slowest": describe_slowest(devices),
        "lost_share": compute_lost_share(devices),
        "pace": choose_pace_figure(devices),
        "devices": [device.record() for device in devices],
    }
    return Document("Node", blocks, data)


def make_device_columns(devices: Sequence[Device]) -> list[Column[Device]]:
    """Return columns with each device's figures, sensor readings and rank by speed (1: the fastest)."""
    pace = choose_pace_figure(devices)
    order = sorted((each for each in devices if pace in each.figures), key=lambda each: -each.figures[pace])
    places = {device.label: place for place, device in enumerate(order, start=1)}
    return [
        Column("", "device", lambda device: device.full_label, left=True),
        *(Column(name, "", attrgetter(name)) for name in _TEXT_COLUMNS),
        *(column for name in UNITS for column in make_figure_columns(name)),
        Column("place", "place", lambda device: places.get(device.label), importance=2),
        *make_sensor_columns(lambda device: device.conditions),
        Column("temperature_celsius", "C", lambda device: device.conditions.celsius, format_whole_number, importance=6),
        Column("throttled", "throttled", format_throttling, importance=3, left=True),
        Column("failures", "", lambda device: "; ".join(device.failures)),
        Column("lacks", "", lambda device: "; ".join(device.lacks)),
    ]


def make_figure_columns(name: str) -> list[Column[Device]]:
    """Return columns with a figure in its unit, and the half-width of its interval in percent."""
    unit, factor = UNITS[name]
    return [
        Column(
            convert_to_snake_case(f"{name} {unit}"),
            f"{name} {unit}",
            lambda device: device.figures[name] * factor if name in device.figures else None,
            format_significant,
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


def collect_figure_values(figure: str, devices: Iterable[Device]) -> list[float]:
    """Return the values of a figure, in 1e12 FLOP/s or bytes/s, of the devices that have it."""
    return [device.figures[figure] for device in devices if figure in device.figures]


def compute_relative_range(values: Sequence[float]) -> float:
    """Return how far the maximum is above the minimum, as a share of the minimum."""
    return max(values) / min(values) - 1


_MAX_LABELS = 12
_MAX_FINDINGS = 4
#: Maximum number of panels in a row.
_MAX_PANELS_PER_ROW = 4


def make_node_chart(devices: Sequence[Device], verdict: NodeVerdict) -> Chart:
    """Draw a panel per figure, each with a separate scale. Raises UsageError if no device has a figure."""
    figures = [name for name in UNITS if any(name in device.figures for device in devices)]
    if not figures:
        raise UsageError("nothing to draw: no device has a figure")
    panels = [_make_figure_panel(name, devices) for name in figures]
    rows = -(-len(panels) // _MAX_PANELS_PER_ROW)
    across = -(-len(panels) // rows)
    padded = [*panels, *[None] * (rows * across - len(panels))]
    notes = [describe_slowest(devices), *(finding.text for finding in verdict.findings[:_MAX_FINDINGS])]
    ticks = tuple((float(place), str(each.index)) for place, each in enumerate(devices) if len(devices) <= _MAX_LABELS)
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


def _make_figure_panel(name: str, devices: Sequence[Device]) -> Panel:
    unit, factor = UNITS[name]
    lines: dict[str, list[Point]] = {}
    for place, (device, line) in enumerate(zip(devices, _list_legend_names(devices), strict=True)):
        if name in device.figures:
            rate = device.figures[name] * factor
            half = rate * device.half_widths.get(name, 0.0)
            lines.setdefault(line, []).append(Point(float(place), rate, rate - half, rate + half))
    title = (
        f"{name}, spread {compute_relative_range(collect_figure_values(name, devices)):.1%}"
        if len(devices) > 1
        else name
    )
    return Panel(title, tuple(Line(line, tuple(points)) for line, points in lines.items()), unit=unit)


def _list_legend_names(devices: Sequence[Device]) -> list[str]:
    """Return each device's name for the legend: its label, or its node's name if there are too many devices."""
    if len(devices) <= _MAX_LABELS:
        return [device.label for device in devices]
    nodes = {device.node for device in devices}
    return [f"node {device.node}" if 1 < len(nodes) <= _MAX_LABELS else "a device" for device in devices]
