"""Is a device slow, wrong or gone? Compares each figure with fixed limits. Pure.

A device is compared with the median of all *other* devices of its model, and with a baseline. The limits are chosen for
the spread of 26 H200 (standard deviation 1.1 % in burst, 1.0 % in sustained); ``tools/rates.py node`` shows how often
they are wrong there and at other spreads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

from mamf.errors import CRITICAL, OK, UNKNOWN, VERDICT_EXIT_CODES, WARN
from mamf.measurement import Conditions, group_pairs
from mamf.report.document import significant

#: Figures of a device that are compared.
BURST, SUSTAINED, COPY, READ = "burst", "sustained", "copy", "read"
TO_DEVICE, TO_HOST, TO_PEER = "to_device", "to_host", "to_peer"
#: The unit that each figure is shown in, and the value of 1e12/s in it.
UNITS = {
    BURST: ("TFLOPS", 1.0),
    SUSTAINED: ("TFLOPS", 1.0),
    COPY: ("TB/s", 1.0),
    READ: ("TB/s", 1.0),
    TO_DEVICE: ("GB/s", 1e3),
    TO_HOST: ("GB/s", 1e3),
    TO_PEER: ("GB/s", 1e3),
}


@dataclass(frozen=True)
class Device:
    """One device: its index on the node, and the number of the node among those that are judged together.

    ``dtype``: of its products. ``build``: its unit count and power limit. ``figures``: 1e12 FLOP or bytes a second, by
    the names of UNITS. ``half_widths``: of their intervals, as a share. ``failures``: why the device failed, a line
    each. ``lacks``: what was not measured, and why. ``conditions``: of the sustained ceiling, else of burst.
    ``throttled``: the largest share of time by reason. ``address``: on the bus, known only in the measuring process.
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
    def place(self) -> str:
        """The name of the device within a run."""
        return f"node {self.node} device {self.index}" if self.node else f"device {self.index}"

    @property
    def who(self) -> str:
        """Its place, bus address and uuid, as far as they are known."""
        uuid = self.uuid_hash and f"uuid {self.uuid_hash}"
        known = [each for each in (self.address, uuid) if each]
        return f"{self.place} ({', '.join(known)})" if known else self.place

    def record(self) -> dict[str, Any]:
        """The device as JSON values."""
        return asdict(self)


def shown(figure: str, value: float) -> str:
    """A figure with its unit."""
    unit, factor = UNITS[figure]
    return f"{significant(value * factor)} {unit}"


#: The mean of the shortfalls in burst and in sustained: a slow card is slow in both.
BOTH = "burst and sustained"
#: A device that is further below the median of the others is a finding. Copies to and from the host scatter by 5 %
#: between healthy cards, and by up to 20 % while all devices copy; a link with half of its lanes loses 50 %.
LIMITS = {BOTH: 0.04, BURST: 0.05, SUSTAINED: 0.05, COPY: 0.02, READ: 0.02, TO_PEER: 0.05, TO_DEVICE: 0.4, TO_HOST: 0.4}
#: A finding is CRITICAL beyond this multiple of its limit.
CRITICAL_FACTOR = 2.0
#: Where healthy devices differ by more (standard deviation), a finding may be normal and is never CRITICAL.
WIDE_SPREAD = 0.015
#: Limits against a baseline, as a multiple. Products of one card repeat to 0.3 %, so its own earlier run allows less;
#: memory repeats no better than cards differ. Other cards of a baseline may be one, or the fastest of many.
_SAME_CARD = dict.fromkeys((BOTH, BURST, SUSTAINED), 0.5)
_OTHER_CARD = dict.fromkeys(LIMITS, 1.5)

_SEVERITY = (OK, UNKNOWN, WARN, CRITICAL)
#: The usual reason at the power limit, and the share of time below which another reason is ignored.
_EXPECTED_REASONS = ("power cap",)
_LITTLE_TIME = 0.1
#: A figure whose interval has a larger half-width is a finding and is not compared; healthy cards stay under 3 %. Host
#: copies are exempt: those of one device slow down those of another.
_MAX_HALF_WIDTH = 0.1
_SHARED = (TO_DEVICE, TO_HOST)


@dataclass(frozen=True)
class Baseline:
    """Cards that are known to be good. ``source``: as printed."""

    source: str
    cards: Sequence[Device]

    def cards_for(self, device: Device) -> tuple[list[Device], bool]:
        """The cards to compare a device with: its own earlier run (True), else all cards of its model and dtype."""
        cards = [card for card in self.cards if card.name == device.name]
        cards = [card for card in cards if not card.dtype or not device.dtype or card.dtype == device.dtype]
        same = [card for card in cards if device.uuid_hash and card.uuid_hash == device.uuid_hash]
        return (same, True) if same else (cards, False)


@dataclass(frozen=True)
class Finding:
    """A finding about the device at a place, or about all (None), in a line."""

    level: str
    place: str | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """``reason``: a line for a pager. ``findings``: the worst first."""

    level: str
    reason: str
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        return VERDICT_EXIT_CODES[self.level]


def judge(devices: Sequence[Device], baseline: Baseline | None = None, must_fit: bool = False) -> Verdict:
    """Judge all devices of a run. ``must_fit``: report devices for which the baseline has no card."""
    findings = [finding for device in devices for finding in _own_findings(device)]
    is_compared = False
    for peers in group_pairs((device.name, device) for device in devices if not device.failures).values():
        findings += _slow_findings(peers, baseline)
        has_baseline = baseline is not None and any(baseline.cards_for(device)[0] for device in peers)
        is_compared = is_compared or len(peers) > 1 or has_baseline
        if baseline and must_fit and not has_baseline:
            model = " in ".join(filter(None, (peers[0].name, peers[0].dtype)))
            findings.append(Finding(UNKNOWN, None, f"{baseline.source} has no figures of {model}"))
    if not is_compared:
        message = "there is neither a second device of its kind nor a baseline: whether it is slow is unknown"
        findings.append(Finding(UNKNOWN, None, message if devices else "no device was measured"))
    findings.sort(key=lambda finding: -_SEVERITY.index(finding.level))
    level = findings[0].level if findings else OK
    return Verdict(level, f"{level}: {_reason(devices, findings)}", tuple(findings))


def _reason(devices: Sequence[Device], findings: Sequence[Finding]) -> str:
    if not findings:
        return f"{len(devices)} device{'s' if len(devices) > 1 else ''}, {slowest_line(devices)}"
    others = len({finding.place for finding in findings} - {findings[0].place, None})
    more = f"; and {others} more device{'s' if others > 1 else ''}" if others else ""
    return f"{findings[0].text}{more}"


def _own_findings(device: Device) -> Iterator[Finding]:
    """Findings that need no comparison."""
    for failure in device.failures:
        yield Finding(CRITICAL, device.place, f"{device.who}: {failure}")
    for lacking in device.lacks:
        yield Finding(UNKNOWN, device.place, f"{device.who}: {lacking}")
    for figure, value in device.figures.items():
        if not _is_steady(device, figure):
            noise = f"{figure} {shown(figure, value)} is too noisy to compare (+-{device.half_widths[figure]:.0%})"
            text = f"{device.who}: {noise}: something else runs on the device, or slows it down from time to time"
            yield Finding(WARN, device.place, text)
    for reason, share in device.throttled.items():
        if reason not in _EXPECTED_REASONS and share >= _LITTLE_TIME:
            yield Finding(WARN, device.place, f"{device.who}: throttled {share:.0%} of the time by {reason}")


def _is_steady(device: Device, figure: str) -> bool:
    return figure in _SHARED or device.half_widths.get(figure, 0.0) <= _MAX_HALF_WIDTH


# -- comparisons -------------------------------------------------------------------------------------------------------


class Shortfall(NamedTuple):
    """How far a figure is below what it is compared with, as a share, and its limit."""

    figure: str
    share: float
    limit: float


def shortfalls(device: Device, others: Sequence[Device]) -> dict[str, float]:
    """How far each figure of a device is below the median of the others', as a share."""
    found = {}
    for figure in UNITS:
        own = _comparable(device, figure)
        values = [value for other in others if (value := _comparable(other, figure)) is not None]
        if own is not None and values:
            found[figure] = 1 - own / median(values)
    if BURST in found and SUSTAINED in found:
        found[BOTH] = (found[BURST] + found[SUSTAINED]) / 2
    return found


def _comparable(device: Device, figure: str) -> float | None:
    return device.figures.get(figure) if _is_steady(device, figure) else None


def find_slow(
    device: Device, others: Sequence[Device], factors: Mapping[str, float] = MappingProxyType({})
) -> Shortfall | None:
    """The figure of a device that exceeds its limit most, None if none does."""
    found = [
        Shortfall(figure, share, LIMITS[figure] * factors.get(figure, 1.0))
        for figure, share in shortfalls(device, others).items()
    ]
    worst = max(found, key=lambda each: each.share / each.limit, default=None)
    return worst if worst is not None and worst.share > worst.limit else None


def _slow_findings(peers: Sequence[Device], baseline: Baseline | None) -> Iterator[Finding]:
    """Devices of one model that are slower than the others, or than their baseline."""
    slow = [find_slow(device, [*peers[:place], *peers[place + 1 :]]) for place, device in enumerate(peers)]
    healthy = [device for device, found in zip(peers, slow, strict=True) if found is None]
    others = f"the median of {len(peers) - 1} other{'s' if len(peers) > 2 else ''}"
    for device, found in zip(peers, slow, strict=True):
        if found is not None:
            yield _slow_finding(device, found, others, _spread(found.figure, healthy))
    if baseline is None:
        return
    for device in peers:
        cards, is_same = baseline.cards_for(device)
        if found := find_slow(device, cards, _SAME_CARD if is_same else _OTHER_CARD):
            against = f"the same card in {baseline.source}" if is_same else baseline.source
            spread = None if is_same else _spread(found.figure, healthy)
            yield _slow_finding(device, found, against, spread or 0.0)


def _spread(figure: str, devices: Sequence[Device]) -> float | None:
    """The relative standard deviation of a figure between devices; None for fewer than two."""
    found = [shares[figure] for device in devices if figure in (shares := shortfalls(device, devices))]
    return stdev(found) if len(found) > 1 else None


def _slow_finding(device: Device, slow: Shortfall, against: str, spread: float | None) -> Finding:
    """``spread``: between healthy devices, None if there are too few to tell."""
    is_critical = slow.share > CRITICAL_FACTOR * slow.limit and spread is not None and spread <= WIDE_SPREAD
    value = f" {shown(slow.figure, device.figures[slow.figure])}" if slow.figure in UNITS else ""
    text = f"{slow.figure}{value}, {slow.share:.1%} below {against} (limit {slow.limit:.1%})"
    if spread is None:
        text += "; too few others to tell how far healthy devices differ"
    elif spread > WIDE_SPREAD:
        text += f"; the other devices differ by {spread:.1%} (standard deviation)"
    return Finding(CRITICAL if is_critical else WARN, device.place, f"{device.who}: {text}")


# -- the pace of a synchronous job -------------------------------------------------------------------------------------


def slowest_line(devices: Sequence[Device]) -> str:
    """The device that sets the pace, and what a synchronous job loses to it."""
    figure = pace_figure(devices)
    measured = [device for device in devices if figure in device.figures]
    if not measured:
        return "neither burst nor sustained was measured"
    if len(measured) == 1:
        return f"{figure} {shown(figure, measured[0].figures[figure])}"
    slowest = min(measured, key=lambda device: device.figures[figure])
    rate = f"{shown(figure, slowest.figures[figure])} {figure}"
    return f"the slowest is {slowest.place} with {rate}: a synchronous job loses {lost(devices):.1%} to it"


def pace_figure(devices: Iterable[Device]) -> str:
    """The figure that sets a job's pace: sustained, if it was measured."""
    return SUSTAINED if any(SUSTAINED in device.figures for device in devices) else BURST


def lost(devices: Sequence[Device]) -> float:
    """Share of the devices' speed that is lost if all wait for the slowest."""
    figure = pace_figure(devices)
    values = [device.figures[figure] for device in devices if figure in device.figures]
    return 1 - min(values) / fmean(values) if values else 0.0
