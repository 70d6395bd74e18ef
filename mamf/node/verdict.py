"""Decide by fixed limits whether a device of a machine is slow, faulty or missing.

The module measures nothing and reads no files. It compares each device with the median of all *other* devices of its
model. If there is a baseline (the results of cards that are known to be good), it also compares each device with the
baseline. The limits were chosen for the spread of 26 H200 cards (standard deviation 1.1 % in the burst regime, 1.0 % in
the sustained regime). ``tools/rates.py node`` computes how often the limits give a false verdict with this spread and
with other spreads.

A figure is one measured rate of a device, such as ``burst``. A machine is called a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from types import MappingProxyType
from typing import NamedTuple

from mamf.errors import CRITICAL, OK, UNKNOWN, VERDICT_EXIT_CODES, WARN
from mamf.measurement import Conditions, group_pairs
from mamf.report.document import MAX_KNOWN_HALF_WIDTH, format_four_digits

#: The names of the figures by which devices are compared: the ceilings of matmul in short bursts and under continuous
#: load, the memory bandwidth of the patterns copy and read, and the bandwidth of copies to a device, to the host and to
#: another device.
BURST, SUSTAINED, COPY, READ = "burst", "sustained", "copy", "read"
TO_DEVICE, TO_HOST, TO_PEER = "to_device", "to_host", "to_peer"
#: The unit in which each figure is printed, and the factor that converts 1e12 FLOP or bytes per second to this unit.
FIGURE_UNITS = {
    BURST: ("TFLOPS", 1.0),
    SUSTAINED: ("TFLOPS", 1.0),
    COPY: ("GB/s", 1e3),
    READ: ("GB/s", 1e3),
    TO_DEVICE: ("GB/s", 1e3),
    TO_HOST: ("GB/s", 1e3),
    TO_PEER: ("GB/s", 1e3),
}


@dataclass(frozen=True)
class NodeDevice:
    """One device of a machine, with its measured figures and failures. JSON reports contain these fields.

    - ``index``: the index of the device on its node (machine).
    - ``node``: the number of this node among the nodes that are judged together.
    - ``name``: the model of the device. ``uuid_hash``: a hash of its uuid, which identifies the card.
    - ``address``: the bus address of the device. It is known only during a run, because logs do not contain it.
    - ``dtype``: the data type of the device's matmul figures.
    - ``build``: the device's number of compute units and its power limit in watts.
    - ``figures``: its rates in 1e12 FLOP/s or bytes/s, by the names in FIGURE_UNITS.
    - ``half_widths``: the half-widths of the confidence intervals of these rates, as shares of the rates.
    - ``conditions``: the sensor readings from the sustained ceiling, or from the burst ceiling if there is no sustained
      ceiling.
    - ``throttled``: for each throttle reason, the share of time in which it applied. If several parts of the run have
      such a share, this is the largest of them.
    - ``verified_problem_count``: how many random problems had a right result; None if results were not verified.
    - ``failures``: why the device failed, one line each.
    - ``lacks``: the results that are missing and why, one line each.
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
    verified_problem_count: int | None = None
    failures: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The short name of the device in a run, such as ``node 1 device 3``, or ``device 3`` on node 0."""
        return f"node {self.node} device {self.index}" if self.node else f"device {self.index}"

    @property
    def full_label(self) -> str:
        """The short name of the device, followed by its bus address and uuid hash, if they are known."""
        known = [each for each in (self.address, self.uuid_hash and f"uuid {self.uuid_hash}") if each]
        return f"{self.label} ({', '.join(known)})" if known else self.label


def format_figure(figure: str, value: float) -> str:
    """Format the value of a figure with its unit. ``value``: the rate in 1e12 FLOP/s or bytes/s."""
    unit, factor = FIGURE_UNITS[figure]
    return f"{format_four_digits(value * factor)} {unit}"


#: The name of the mean of a device's shortfalls in the burst and sustained regimes. A shortfall is how far a figure is
#: below its reference. A slow card is slow in both regimes, so the limit for the mean is lower than the limit for a
#: single shortfall.
BURST_AND_SUSTAINED = "burst and sustained"
#: A device counts as slow if one of its figures is below the median of the other devices by more than this share. The
#: limits for copies to and from the host are wide: these copies differ by 5 % between healthy cards, and by up to 20 %
#: while all devices copy at the same time. A link with half of its lanes loses 50 %.
SHORTFALL_LIMITS = {
    BURST_AND_SUSTAINED: 0.04,
    BURST: 0.05,
    SUSTAINED: 0.05,
    COPY: 0.02,
    READ: 0.02,
    TO_PEER: 0.05,
    TO_DEVICE: 0.4,
    TO_HOST: 0.4,
}
#: A shortfall (how far a figure is below its reference) is CRITICAL if it is more than this multiple of its limit.
CRITICAL_LIMIT_MULTIPLE = 2.0
#: A shortfall is not CRITICAL if the relative standard deviation of the figure among the healthy devices is higher than
#: this, because the shortfall may then be normal.
MAX_SPREAD_FOR_CRITICAL = 0.015
# Factors by which the limits are multiplied when a device is compared with a baseline. A card repeats its matmul rates
# within 0.3 %, so the limits are halved for a comparison with an earlier run of the same card. The memory rates of one
# card vary as much as those of different cards, so their limits do not change. A baseline of other cards may contain
# only one card, or only unusually fast cards, so the limits are wider.
_SAME_CARD_LIMIT_FACTORS = dict.fromkeys((BURST_AND_SUSTAINED, BURST, SUSTAINED), 0.5)
_OTHER_CARD_LIMIT_FACTORS = dict.fromkeys(SHORTFALL_LIMITS, 1.5)

# Throttle reasons that are normal under load. Any other reason is a finding if it applies for at least this share of
# the time.
_EXPECTED_THROTTLE_REASONS = ("power cap",)
_MIN_THROTTLED_SHARE = 0.1
# A figure is compared only if the half-width of its confidence interval is at most this share of the figure. Otherwise
# it is reported as too noisy. On healthy cards, the half-width is below 3 %. The limit does not apply to copies to and
# from the host, because the copies of several devices slow one another down.
_MAX_COMPARABLE_HALF_WIDTH = 0.1
_HOST_COPY_FIGURES = (TO_DEVICE, TO_HOST)


@dataclass(frozen=True)
class Baseline:
    """A set of cards that are known to be good, with which devices are compared.

    - ``name``: the name of this baseline in messages.
    - ``cards``: the cards with their figures.
    """

    name: str
    cards: Sequence[NodeDevice]

    def select_cards(self, device: NodeDevice) -> tuple[list[NodeDevice], bool]:
        """Return the cards of the baseline with which to compare ``device``, and whether they are earlier results of
        the same card.

        If the baseline contains no results of this card, return all cards with the same model and data type.
        """
        cards = [
            card
            for card in self.cards
            if card.name == device.name and (card.dtype == device.dtype or not card.dtype or not device.dtype)
        ]
        same_card = [card for card in cards if device.uuid_hash and card.uuid_hash == device.uuid_hash]
        return (same_card, True) if same_card else (cards, False)


@dataclass(frozen=True)
class NodeFinding:
    """A problem of one device, or a problem that concerns all devices.

    - ``level``: the severity of the problem, such as WARN or CRITICAL.
    - ``label``: the label of the device with the problem, or None if the problem concerns all devices.
    - ``text``: the line that describes the problem.
    """

    level: str
    label: str | None
    text: str


@dataclass(frozen=True)
class NodeVerdict:
    """The verdict on the devices of one or more machines.

    - ``level``: the level of the worst finding, or OK if there is none.
    - ``reason``: the verdict with its reason in one line.
    - ``findings``: all problems that were found, the worst first.
    """

    level: str
    reason: str
    findings: tuple[NodeFinding, ...] = ()

    @property
    def exit_code(self) -> int:
        return VERDICT_EXIT_CODES[self.level]


def judge_devices(
    devices: Sequence[NodeDevice], baseline: Baseline | None = None, must_match_baseline: bool = False
) -> NodeVerdict:
    """Decide whether devices are slow or faulty: find the problems of each device, and compare devices of one model
    with one another and with the baseline.

    ``must_match_baseline``: whether it is a finding if the baseline has no card with the model and data type of a
    device.
    """
    findings = [finding for device in devices for finding in _yield_standalone_findings(device)]
    is_compared = False
    for peers in group_pairs((device.name, device) for device in devices if not device.failures).values():
        findings += _yield_slow_device_findings(peers, baseline)
        has_baseline = baseline is not None and any(baseline.select_cards(device)[0] for device in peers)
        is_compared = is_compared or len(peers) > 1 or has_baseline
        if baseline and must_match_baseline and not has_baseline:
            model = " in ".join(filter(None, (peers[0].name, peers[0].dtype)))
            findings.append(NodeFinding(UNKNOWN, None, f"{baseline.name} has no figures for {model}"))
    if not is_compared:
        message = "cannot tell whether a device is slow: there is no second device of its model and no baseline"
        findings.append(NodeFinding(UNKNOWN, None, message if devices else "no device was measured"))
    findings.sort(key=lambda finding: (CRITICAL, WARN, UNKNOWN).index(finding.level))
    level = findings[0].level if findings else OK
    return NodeVerdict(level, f"{level}: {_summarize_reason(devices, findings)}", tuple(findings))


def _summarize_reason(devices: Sequence[NodeDevice], findings: Sequence[NodeFinding]) -> str:
    if not findings:
        return f"{len(devices)} device{'s' if len(devices) > 1 else ''}, {describe_slowest_device(devices)}"
    others = len({finding.label for finding in findings} - {findings[0].label, None})
    return findings[0].text + (f"; and {others} more device{'s' if others > 1 else ''}" if others else "")


def _yield_standalone_findings(device: NodeDevice) -> Iterator[NodeFinding]:
    """Yield the findings about a device that need no comparison with other devices: failures, missing results, noise
    and throttling.
    """
    for failure in device.failures:
        yield NodeFinding(CRITICAL, device.label, f"{device.full_label}: {failure}")
    for missing_result in device.lacks:
        yield NodeFinding(UNKNOWN, device.label, f"{device.full_label}: {missing_result}")
    noisy = [
        f"{figure} {format_figure(figure, value)} "
        + (
            f"+-{100 * device.half_widths[figure]:.0f} %"
            if device.half_widths[figure] <= MAX_KNOWN_HALF_WIDTH
            else "with an unknown interval"
        )
        for figure, value in device.figures.items()
        if not _is_comparable_figure(device, figure)
    ]
    if noisy:
        text = (
            f"{device.full_label}: too noisy to compare (this kind of device varies as much between runs, or another "
            f"process uses it): {', '.join(noisy)}"
        )
        yield NodeFinding(WARN, device.label, text)
    for reason, share in device.throttled.items():
        if reason not in _EXPECTED_THROTTLE_REASONS and share >= _MIN_THROTTLED_SHARE:
            yield NodeFinding(
                WARN, device.label, f"{device.full_label}: throttled {100 * share:.0f} % of the time by {reason}"
            )


def _is_comparable_figure(device: NodeDevice, figure: str) -> bool:
    return figure in _HOST_COPY_FIGURES or device.half_widths.get(figure, 0.0) <= _MAX_COMPARABLE_HALF_WIDTH


# -- comparisons -------------------------------------------------------------------------------------------------------


class Shortfall(NamedTuple):
    """How far a figure of a device is below its reference value.

    - ``figure``: the name of the figure.
    - ``share``: the difference as a share of the reference value.
    - ``limit``: a share above this limit is a finding.
    """

    figure: str
    share: float
    limit: float


def compute_shortfall_shares(device: NodeDevice, others: Sequence[NodeDevice]) -> dict[str, float]:
    """Return the shortfall of each figure: how far it is below the median of the other devices, as a share of the
    median. A negative share means that the device is faster. Noisy figures are left out.
    """
    shares = {}
    for figure in FIGURE_UNITS:
        device_value = _get_comparable_value(device, figure)
        values = [value for other in others if (value := _get_comparable_value(other, figure)) is not None]
        if device_value is not None and values:
            shares[figure] = 1 - device_value / median(values)
    if BURST in shares and SUSTAINED in shares:
        shares[BURST_AND_SUSTAINED] = (shares[BURST] + shares[SUSTAINED]) / 2
    return shares


def _get_comparable_value(device: NodeDevice, figure: str) -> float | None:
    return device.figures.get(figure) if _is_comparable_figure(device, figure) else None


def find_worst_shortfall(
    device: NodeDevice, others: Sequence[NodeDevice], factors: Mapping[str, float] = MappingProxyType({})
) -> Shortfall | None:
    """Return the shortfall of ``device`` with the highest ratio of the shortfall to its limit, or None if no shortfall
    exceeds its limit. ``factors``: the factors by which to multiply the limits, by figure.
    """
    candidates = [
        Shortfall(figure, share, SHORTFALL_LIMITS[figure] * factors.get(figure, 1.0))
        for figure, share in compute_shortfall_shares(device, others).items()
    ]
    worst = max(candidates, key=lambda each: each.share / each.limit, default=None)
    return worst if worst is not None and worst.share > worst.limit else None


def _yield_slow_device_findings(peers: Sequence[NodeDevice], baseline: Baseline | None) -> Iterator[NodeFinding]:
    """Yield a finding for each device that is slower than the limits allow, compared with the other devices of its
    model or with the baseline.

    ``peers``: all devices of one model.
    """
    shortfalls = [
        find_worst_shortfall(device, [*peers[:index], *peers[index + 1 :]]) for index, device in enumerate(peers)
    ]
    healthy = [device for device, shortfall in zip(peers, shortfalls, strict=True) if shortfall is None]
    others = f"the median of {len(peers) - 1} other{'s' if len(peers) > 2 else ''}"
    for device, shortfall in zip(peers, shortfalls, strict=True):
        if shortfall is not None:
            yield _make_shortfall_finding(
                device, shortfall, others, _compute_relative_spread(shortfall.figure, healthy)
            )
    if baseline is None:
        return
    for device in peers:
        cards, is_same = baseline.select_cards(device)
        if shortfall := find_worst_shortfall(
            device, cards, _SAME_CARD_LIMIT_FACTORS if is_same else _OTHER_CARD_LIMIT_FACTORS
        ):
            reference_name = f"the same card in {baseline.name}" if is_same else baseline.name
            spread = 0.0 if is_same else _compute_relative_spread(shortfall.figure, healthy)
            yield _make_shortfall_finding(device, shortfall, reference_name, spread or 0.0)


def _compute_relative_spread(figure: str, devices: Sequence[NodeDevice]) -> float | None:
    """Return the relative standard deviation of a figure between devices, or None if fewer than two devices have the
    figure.
    """
    values = [shares[figure] for device in devices if figure in (shares := compute_shortfall_shares(device, devices))]
    return stdev(values) if len(values) > 1 else None


def _make_shortfall_finding(
    device: NodeDevice, shortfall: Shortfall, reference_name: str, spread: float | None
) -> NodeFinding:
    """Make the finding for a device that is too slow.

    - ``reference_name``: what the device is compared with, as a phrase for the finding, such as the baseline's name.
    - ``spread``: the relative standard deviation of the figure among the healthy devices, or None if there are fewer
      than two.
    """
    is_critical = (
        shortfall.share > CRITICAL_LIMIT_MULTIPLE * shortfall.limit
        and spread is not None
        and spread <= MAX_SPREAD_FOR_CRITICAL
    )
    value = (
        f" {format_figure(shortfall.figure, device.figures[shortfall.figure])}"
        if shortfall.figure in FIGURE_UNITS
        else ""
    )
    text = (
        f"{shortfall.figure}{value}, {100 * shortfall.share:.1f} % below {reference_name} (limit "
        f"{100 * shortfall.limit:.1f} %)"
    )
    if spread is None:
        text += "; there are too few other devices to tell how much healthy ones differ"
    elif spread > MAX_SPREAD_FOR_CRITICAL:
        text += f"; the other devices differ by {100 * spread:.1f} % (standard deviation)"
    return NodeFinding(CRITICAL if is_critical else WARN, device.label, f"{device.full_label}: {text}")


# -- the pace of a synchronous job -------------------------------------------------------------------------------------


def describe_slowest_device(devices: Sequence[NodeDevice]) -> str:
    """Return a line that names the slowest device and its rate. The line also says which share of the devices' total
    speed a synchronous job loses because it waits for this device.
    """
    figure = choose_speed_figure(devices)
    measured = [device for device in devices if figure in device.figures]
    if not measured:
        return "no burst or sustained ceiling was confirmed"
    if len(measured) == 1:
        return f"{figure} {format_figure(figure, measured[0].figures[figure])}"
    slowest = min(measured, key=lambda device: device.figures[figure])
    return (
        f"the slowest device is {slowest.label} with {format_figure(figure, slowest.figures[figure])} {figure}: "
        f"a synchronous job waits for it and loses {100 * compute_lost_speed_share(devices):.1f} % of the total speed"
    )


def choose_speed_figure(devices: Iterable[NodeDevice]) -> str:
    """Return the name of the figure that decides how fast a job runs: sustained, or burst if no device has a sustained
    figure.
    """
    return SUSTAINED if any(SUSTAINED in device.figures for device in devices) else BURST


def compute_lost_speed_share(devices: Sequence[NodeDevice]) -> float:
    """Return how much speed the devices lose if all of them wait for the slowest one, as a share of their mean speed.
    Return 0 if no device has a rate.
    """
    figure = choose_speed_figure(devices)
    values = [device.figures[figure] for device in devices if figure in device.figures]
    return 1 - min(values) / fmean(values) if values else 0.0
