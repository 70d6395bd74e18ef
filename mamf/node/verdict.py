"""Is a device slow, wrong or gone? Two tests of every figure: against its peers and against a baseline. Pure.

Thresholds follow from a stated rate of false alarms, given how far healthy cards lie apart (``node.comparing``). For a
figure with relative standard deviation s between healthy cards, a card's deviation from the median of n others has the
standard deviation s * sqrt(1 + c/n), where c is pi/2 for a median of many (van der Vaart, Asymptotic Statistics, 1998,
section 5.3) and 1 for one or two; the chance of a false alarm is divided among all comparisons by weight (Bonferroni).
Each figure's own interval is added. Only slowness counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from mamf.choices import CRITICAL, OK, UNKNOWN, VERDICT_EXIT_CODES, WARN
from mamf.node.comparing import (
    CRITICAL_AT_LEAST,
    SHARED,
    SPEED,
    WIDEST,
    Baseline,
    Compared,
    Peers,
    against_baseline,
    against_peers,
    peers_of,
)
from mamf.node.figures import BURST, SUSTAINED, Device, shown

_SEVERITY = (OK, UNKNOWN, WARN, CRITICAL)
#: The probability of any finding, and of a CRITICAL one, in a run whose devices are all healthy.
FALSE_WARNINGS, FALSE_CRITICALS = 0.005, 1e-6
#: A slowdown that "could go unnoticed" is found at least this often.
_FOUND = 0.95
#: The usual reason at the power limit, and the share of time below which another reason is ignored.
_EXPECTED_REASONS = ("power cap",)
_LITTLE_TIME = 0.1
#: Half of an interval: a healthy card's are under 1 % in burst and 3 % in sustained. Not of what all devices use at the
#: same time: of four H200 that copy at once each one's link to the host was known to +-20 % on one machine and +-9 % on
#: another, and alone to +-4 %.
_UNSTEADY = 0.1


@dataclass(frozen=True)
class Finding:
    """A finding about a device, or about all (rank None), in a line."""

    level: str
    rank: int | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """``reason``: a line for a pager. ``findings``: the worst first. ``notes``: what could not be detected, and why."""

    level: str
    reason: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return VERDICT_EXIT_CODES[self.level]


def judged(
    devices: Sequence[Device], baselines: Mapping[str, Baseline] | None = None, unfit: Iterable[str] = ()
) -> Verdict:
    """The verdict over all devices of a run. ``baselines``: by the name of the device. ``unfit``: why other requested
    baselines do not apply.
    """
    peers = peers_of(devices)
    compared = [each for group in peers.values() for each in against_peers(group)]
    compared += [
        each for name, its in (baselines or {}).items() if name in peers for each in against_baseline(peers[name], its)
    ]
    total = sum(each.weight for each in compared)
    findings = [finding for device in devices for finding in _of_its_own(device)]
    findings += [found for each in compared if (found := _finding(each, each.weight / total)) is not None]
    findings += [Finding(UNKNOWN, None, reason) for reason in unfit]
    if not compared:
        message = "there is neither a second device of its kind nor a baseline: whether it is slow is unknown"
        findings.append(Finding(UNKNOWN, None, message if devices else "no device was measured"))
    findings.sort(key=lambda finding: -_SEVERITY.index(finding.level))
    level = findings[0].level if findings else OK
    notes = tuple(_wide(group, total) for group in peers.values() if group.contradicted)
    return Verdict(level, f"{level}: {_reason(devices, findings)}", tuple(findings), notes)


def _reason(devices: Sequence[Device], findings: Sequence[Finding]) -> str:
    if not findings:
        return f"{_counted(devices)}, {slowest_line(devices)}"
    others = len({finding.rank for finding in findings} - {findings[0].rank, None})
    more = f"; and {others} more device{'s' if others > 1 else ''}" if others else ""
    return f"{findings[0].text}{more}"


def _counted(devices: Sequence[Device]) -> str:
    nodes = len({device.node for device in devices})
    count = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    return f"{count} on {nodes} nodes" if nodes > 1 else count


def slowest_line(devices: Sequence[Device]) -> str:
    """The device that sets the pace, and what a synchronous job loses to it."""
    figure = pace_figure(devices)
    measured = [device for device in devices if figure in device.figures]
    if len(measured) < 2:
        return f"{figure} {shown(figure, measured[0].figures[figure])}" if measured else "nothing was measured"
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


def _of_its_own(device: Device) -> Iterable[Finding]:
    """Findings that need no comparison."""
    for failure in device.failures:
        yield Finding(CRITICAL, device.rank, f"{device.who}: {failure}")
    for lacking in device.lacks:
        yield Finding(UNKNOWN, device.rank, f"{device.who}: {lacking}")
    for figure, half_width in device.half_widths.items():
        if figure in device.figures and figure not in SHARED and half_width > _UNSTEADY:
            message = f"{figure} {shown(figure, device.figures[figure])} is known to +-{half_width:.0%} only"
            yield Finding(
                WARN, device.rank, f"{device.who}: {message}: something else runs on it, or holds it back in turns"
            )
    for reason, share in device.throttled.items():
        if reason not in _EXPECTED_REASONS and share >= _LITTLE_TIME:
            yield Finding(WARN, device.rank, f"{device.who}: throttled {share:.0%} of the time by {reason}")


def _finding(compared: Compared, share: float) -> Finding | None:
    """``share``: of the chance of a false alarm."""
    limit = compared.limit(FALSE_WARNINGS * share)
    if compared.shortfall <= limit:
        return None
    at_least = WIDEST if compared.spread.is_doubtful else CRITICAL_AT_LEAST
    level = CRITICAL if compared.shortfall > compared.limit(FALSE_CRITICALS * share, at_least) else WARN
    value = compared.device.figures.get(compared.figure)
    what = f"{compared.figure} {shown(compared.figure, value)}" if value is not None else compared.figure
    text = f"{what}, {compared.shortfall:.1%} below {compared.against} (healthy cards: at most {limit:.1%})"
    return Finding(level, compared.device.rank, f"{compared.device.who}: {text}")


def _wide(peers: Peers, total: float) -> str:
    """That cards lie farther apart than expected, and the slowdown that they could hide. ``total``: of all weights."""
    apart = ", ".join(
        f"{figure} {own:.1%} (expected {expected:.1%})" for figure, (own, expected) in peers.contradicted.items()
    )
    compared = list(against_peers(peers))
    figure = next(name for name in (SPEED, *peers.contradicted) if any(each.figure == name for each in compared))
    hidden = max(
        each.limit(FALSE_WARNINGS * each.weight / total) + NormalDist().inv_cdf(_FOUND) * each.error()
        for each in compared
        if each.figure == figure
    )
    return (
        f"{peers.devices[0].name}: the cards lie farther apart than expected (standard deviation): {apart}; "
        f"a card up to {hidden:.0%} slow in {figure} could go unnoticed"
    )


def distribution(values: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, median and highest of at least one."""
    return min(values), median(values), max(values)
