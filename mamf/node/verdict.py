"""Is a device slow, wrong or gone? Two tests of every figure: against its peers and against a baseline. Pure.

Thresholds follow from a stated rate of false alarms, given how far healthy cards lie apart. For a figure with relative
standard deviation s between healthy cards, a card's deviation from the median of n others has the standard deviation
s * sqrt(1 + c/n), where c is pi/2 for a median of many (van der Vaart, Asymptotic Statistics, 1998, section 5.3) and 1
for one or two; the chance of a false alarm is shared out over all comparisons (Bonferroni). What a figure's own
interval says is added. Only slowness counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from mamf.node.figures import BURST, SUSTAINED, TO_DEVICE, TO_HOST, Device, shown
from mamf.statistics import CONFIDENCE

OK, WARN, CRITICAL, UNKNOWN = "OK", "WARN", "CRITICAL", "UNKNOWN"
EXIT_CODES = {OK: 0, WARN: 1, CRITICAL: 2, UNKNOWN: 3}
_SEVERITY = (OK, UNKNOWN, WARN, CRITICAL)
#: The chance that anything is said of a run whose devices are all healthy, and that one of them is called bad.
FALSE_WARNINGS, FALSE_CRITICALS = 0.005, 1e-6
#: Relative standard deviation between healthy cards (8 % is the published range, arXiv 2208.11035) with what lies
#: between visits: 0.1 % in burst, 0.5 % in sustained. Copies to and from the host depend on where on the board a card
#: sits.
_CARDS, _VISITS = 0.017, 0.005
_SPREADS = {BURST: math.hypot(_CARDS, 0.001), TO_DEVICE: 0.05, TO_HOST: 0.05}
_USUAL_SPREAD = math.hypot(_CARDS, _VISITS)
#: Sustained as a share of burst: what is good or bad silicon in both falls out. Four H200 lie 0.4 % apart.
_POWER, _POWER_SPREAD = "sustained / burst", 0.01
_OF_MEDIAN = math.pi / 2
_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
#: What every device at its power limit says, and for how much of the time another reason is none to speak of.
_EXPECTED_REASONS = ("power cap",)
_LITTLE_TIME = 0.1
#: Half of an interval: a healthy card's are under 1 % in burst and 3 % in sustained. Not of what all devices use at the
#: same time: of four H200 that copy at once each one's link to the host was known to +-20 % on one machine and +-9 % on
#: another, and alone to +-4 %.
_UNSTEADY = 0.1
_SHARED = (TO_DEVICE, TO_HOST)


@dataclass(frozen=True)
class Finding:
    """Something to say of a device, or of all (rank None), in a line."""

    level: str
    rank: int | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """``reason``: a line for a pager. ``findings``: the worst first."""

    level: str
    reason: str
    findings: tuple[Finding, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.level]


@dataclass(frozen=True)
class Baseline:
    """Figures that a device of a kind should have, in the units of a Device; ``told``: where they are from. ``dtype``:
    of the products, where there are some.
    """

    figures: Mapping[str, float]
    told: str
    dtype: str = ""


def judged(
    devices: Sequence[Device], baselines: Mapping[str, Baseline] | None = None, unfit: Iterable[str] = ()
) -> Verdict:
    """The verdict over all devices of a run. ``baselines``: by the name of the device. ``unfit``: why others that were
    asked for tell nothing.
    """
    compared = [*_against_peers(devices), *_against_baselines(devices, baselines or {})]
    findings = [finding for device in devices for finding in _of_its_own(device)]
    findings += [found for each in compared if (found := each.finding(len(compared))) is not None]
    findings += [Finding(UNKNOWN, None, told) for told in unfit]
    if not compared:
        told = "there is neither a second device of its kind nor a baseline: nothing tells whether it is slow"
        findings.append(Finding(UNKNOWN, None, told if devices else "no device was measured"))
    findings.sort(key=lambda finding: -_SEVERITY.index(finding.level))
    level = findings[0].level if findings else OK
    return Verdict(level, f"{level}: {_reason(devices, findings)}", tuple(findings))


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
    told = f"{shown(figure, slowest.figures[figure])} {figure}"
    return f"the slowest is {slowest.place} with {told}: a synchronous job loses {lost(devices):.1%} to it"


def pace_figure(devices: Iterable[Device]) -> str:
    """What a job's pace is told by: sustained, where there is one."""
    return SUSTAINED if any(SUSTAINED in device.figures for device in devices) else BURST


def lost(devices: Sequence[Device]) -> float:
    """Share of the devices' speed that is lost where all wait for the slowest."""
    figure = pace_figure(devices)
    values = [device.figures[figure] for device in devices if figure in device.figures]
    return 1 - min(values) / fmean(values) if values else 0.0


def _of_its_own(device: Device) -> Iterable[Finding]:
    """What needs no comparison."""
    for failure in device.failures:
        yield Finding(CRITICAL, device.rank, f"{device.who}: {failure}")
    for lacking in device.lacks:
        yield Finding(UNKNOWN, device.rank, f"{device.who}: {lacking}")
    for figure, half_width in device.half_widths.items():
        if figure in device.figures and figure not in _SHARED and half_width > _UNSTEADY:
            told = f"{figure} {shown(figure, device.figures[figure])} is known to +-{half_width:.0%} only"
            yield Finding(
                WARN, device.rank, f"{device.who}: {told}: something else runs on it, or holds it back in turns"
            )
    for reason, share in device.throttled.items():
        if reason not in _EXPECTED_REASONS and share >= _LITTLE_TIME:
            yield Finding(WARN, device.rank, f"{device.who}: throttled {share:.0%} of the time by {reason}")


@dataclass(frozen=True)
class _Compared:
    """A figure against what it should be. ``spread``: standard deviation of a healthy card's ``shortfall``."""

    device: Device
    figure: str
    shortfall: float
    spread: float
    against: str

    def finding(self, comparisons: int) -> Finding | None:
        limits = {level: limit(rate, comparisons, self.spread) for level, rate in _RATES.items()}
        if self.shortfall <= limits[WARN]:
            return None
        level = CRITICAL if self.shortfall > limits[CRITICAL] else WARN
        value = self.device.figures.get(self.figure)
        what = f"{self.figure} {shown(self.figure, value)}" if value is not None else self.figure
        told = f"{what}, {self.shortfall:.1%} below {self.against} (healthy cards: at most {limits[WARN]:.1%})"
        return Finding(level, self.device.rank, f"{self.device.who}: {told}")


_RATES = {CRITICAL: FALSE_CRITICALS, WARN: FALSE_WARNINGS}


def limit(rate: float, comparisons: int, spread: float) -> float:
    """The shortfall that one of so many comparisons of healthy cards exceeds by chance, at this rate."""
    return _standard_deviations(rate, comparisons) * spread


@functools.cache  # one for all comparisons of a run
def _standard_deviations(rate: float, comparisons: int) -> float:
    return NormalDist().inv_cdf(1 - rate / comparisons)


def _against_peers(devices: Sequence[Device]) -> list[_Compared]:
    found = []
    for name in dict.fromkeys(device.name for device in devices):
        peers = [device for device in devices if device.name == name and not device.failures]
        for figure, spread in _compared_figures(peers):
            having = [(device, value) for device in peers if (value := _value(device, figure)) is not None]
            others = len(having) - 1
            of_others = (_OF_MEDIAN if others > 2 else 1.0) / others
            typical = fmean(_variance(device, figure) for device, _ in having)
            for (device, value), middle in zip(having, others_medians([each for _, each in having]), strict=True):
                error = math.sqrt(spread**2 * (1 + of_others) + _variance(device, figure) + typical * of_others)
                told = f"the median of {others} other{'s' if others > 1 else ''}"
                found.append(_Compared(device, figure, 1 - value / middle, error, told))
    return found


def _compared_figures(peers: Sequence[Device]) -> Iterable[tuple[str, float]]:
    """Figures that at least two have, each with the spread of healthy cards."""
    for figure in dict.fromkeys(figure for device in peers for figure in [*device.figures, _POWER]):
        if sum(_value(device, figure) is not None for device in peers) > 1:
            yield figure, _POWER_SPREAD if figure == _POWER else _SPREADS.get(figure, _USUAL_SPREAD)


def _value(device: Device, figure: str) -> float | None:
    if figure != _POWER:
        return device.figures.get(figure)
    burst, sustained = device.figures.get(BURST), device.figures.get(SUSTAINED)
    return sustained / burst if burst and sustained else None


def others_medians(values: Sequence[float]) -> list[float]:
    """Of each value, the median of all others; at least two values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranked, places = [values[each] for each in order], {each: place for place, each in enumerate(order)}
    middle = (len(values) - 1) // 2
    is_even = (len(values) - 1) % 2 == 0

    def without(place: int, rank: int) -> float:
        return ranked[rank if rank < place else rank + 1]

    return [
        (without(place, middle - 1) + without(place, middle)) / 2 if is_even else without(place, middle)
        for place in (places[each] for each in range(len(values)))
    ]


def _variance(device: Device, figure: str) -> float:
    """Of a repeat of a figure, relative to it, as its interval of 95 % tells."""
    names = (BURST, SUSTAINED) if figure == _POWER else (figure,)
    return sum((device.half_widths.get(name, 0.0) / _WIDTH) ** 2 for name in names)


def _against_baselines(devices: Sequence[Device], baselines: Mapping[str, Baseline]) -> list[_Compared]:
    """A baseline is of another card, which is as far off as any."""
    found = []
    for device in devices:
        baseline = baselines.get(device.name)
        for figure, expected in baseline.figures.items() if baseline and not device.failures else ():
            value = device.figures.get(figure)
            if value is not None and baseline is not None:
                error = math.sqrt(2 * _SPREADS.get(figure, _USUAL_SPREAD) ** 2 + _variance(device, figure))
                found.append(_Compared(device, figure, 1 - value / expected, error, baseline.told))
    return found


def distribution(values: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, median and highest of at least one."""
    return min(values), median(values), max(values)
