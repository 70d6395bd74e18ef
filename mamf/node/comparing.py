"""Figures of devices against their peers and against baselines, and how far a healthy card may be off. Pure.

Expected spreads between healthy cards are measured; the cards of a run are judged by them unless the cards contradict
them. The run's own spread is the slope of a normal probability plot (Blom's scores; Chambers et al., Graphical Methods
for Data Analysis, 1983, section 6.3), without the slowest cards.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, linear_regression, median

from mamf.measurement import group_pairs
from mamf.node.figures import BURST, COPY, READ, SUSTAINED, TO_DEVICE, TO_HOST, TO_PEER, Device
from mamf.statistics import CONFIDENCE, student_t

#: Two figures made of others: the geometric mean, as a slow card is slow in both, and the ratio, for a card that is
#: slow under load alone.
SPEED, POWER = "burst and sustained", "sustained / burst"
#: Relative standard deviation between healthy cards. Products: the finds of 18 H200 in results/, where burst and
#: sustained correlate by 0.83; the ratio is taken as if they did not, since four H100 hardly do. Memory and copies to
#: the next card: four H200 of one host, 0.1 to 0.5 %. The host's links depend on a card's place on the board.
EXPECTED = {
    SPEED: 0.0106,
    BURST: 0.012,
    SUSTAINED: 0.010,
    POWER: 0.0156,
    COPY: 0.005,
    READ: 0.005,
    TO_PEER: 0.005,
    TO_DEVICE: 0.05,
    TO_HOST: 0.05,
}
#: The same from run to run of one card, where it is known.
REPEATS = {SPEED: 0.003, BURST: 0.003, SUSTAINED: 0.0035, COPY: 0.003, READ: 0.003, TO_PEER: 0.003}
#: A run's own spread counts as no more. (A range of 8 % between cards is published: arXiv 2208.11035.)
WIDEST = 0.04
#: Nothing is called CRITICAL that would not be with healthy cards this far apart, or WIDEST of too few cards to tell.
CRITICAL_AT_LEAST = 0.014
#: What all devices use at the same time scatters with the others' traffic.
SHARED = (TO_DEVICE, TO_HOST)
#: Shares of the cards, the slowest, that a run's own spread leaves out: one of so many.
_FEW, _MANY = 8, 4
#: Times the expected spread, if only a quarter of the cards contradicts it.
_FOR_SOME_SLOW = 2.0
#: An own spread contradicts the expected one beyond 1 + this / sqrt(cards used) times that: 0.4 % of healthy nodes of
#: eight do in burst or sustained, 3 % in another figure, whose slow cards are farther from the healthy ones.
_CONTRADICTION = {SPEED: 2.7, BURST: 2.7, SUSTAINED: 2.7, COPY: 1.6, READ: 1.6, TO_PEER: 1.6}
_FEWEST_FOR_ALL_DEGREES = 5
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Spread:
    """Standard deviation between healthy cards, relative. ``degrees``: of freedom that it is estimated with, 0 if it
    is known. ``is_doubtful``: too few cards to contradict it.
    """

    value: float
    degrees: int = 0
    is_doubtful: bool = False

    def quantile(self, rate: float) -> float:
        """The number of standard deviations that a healthy card exceeds at this rate."""
        return student_t(self.degrees, 1 - 2 * rate) if self.degrees else _NORMAL.inv_cdf(1 - rate)


def spread_of(figure: str, values: Sequence[float], noise: float = 0.0) -> tuple[Spread, float | None]:
    """The spread that holds for a figure of these cards, and their own if it contradicts the expected one.

    Without the slowest eighth of the cards. If the rest contradicts it, but not without the slowest quarter, some cards
    are slow or all lie a little farther apart, and limits are wider: two slow cards of eight do not hide one another.
    ``noise``: what a figure's interval adds.
    """
    expected, most = EXPECTED[figure], math.hypot(EXPECTED[figure], noise)
    without_few, without_many = own_spread(values), own_spread(values, _MANY)
    if not without_few or not without_many:
        return Spread(expected, is_doubtful=True), None
    if not _contradicts(without_few, figure, most, len(values), _FEW):
        return Spread(expected), None
    if not _contradicts(without_many, figure, most, len(values), _MANY):
        return Spread(_FOR_SOME_SLOW * expected), None
    return without_few, without_few.value


def own_spread(values: Sequence[float], share: int = _FEW) -> Spread | None:
    """The slope of the normal plot through all values but the slowest, one of ``share``; None for fewer than three.

    The degrees of freedom are those of the t distribution that drawn nodes of 3 to 32 cards follow.
    """
    count = len(values)
    slowest = max(1, count // share)
    if count - slowest < 2:
        return None
    line = linear_regression(_scores(count)[slowest:], [math.log(value) for value in sorted(values)[slowest:]])
    return Spread(line.slope, count - slowest - (count - slowest < _FEWEST_FOR_ALL_DEGREES))


@functools.cache  # the same for every figure
def _scores(count: int) -> tuple[float, ...]:
    return tuple(_NORMAL.inv_cdf((rank - 3 / 8) / (count + 1 / 4)) for rank in range(1, count + 1))


def _contradicts(own: Spread, figure: str, expected: float, count: int, share: int) -> bool:
    used = count - max(1, count // share)
    return own.value > expected * (1 + _CONTRADICTION.get(figure, math.inf) / math.sqrt(used))


# -- comparisons -------------------------------------------------------------------------------------------------------


_OF_MEDIAN = math.pi / 2
_WIDTH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
#: Shares of the false alarms. The likeliest fault is slow in burst and sustained, and a card's own earlier
#: run shows it best.
_WEIGHTS, _OF_SAME_CARD = {SPEED: 8.0, BURST: 2.0, SUSTAINED: 2.0}, 4.0
#: The fastest of 20 cards is so many standard deviations above their mean, and scatters by so much less than one card
#: (David & Nagaraja, Order Statistics, 2003, table of the normal).
_FASTEST, _OF_FASTEST = 1.87, 0.28


@dataclass(frozen=True)
class Baseline:
    """Figures that a device should have, in the units of a Device. ``source``: as printed. ``dtype``: of the products.

    ``figures``: from cards that are not named. ``is_fastest``: the highest of several cards. ``cards``: by
    hashed uuid where that is known; a device among them is compared with itself, any other with their median.
    """

    figures: Mapping[str, float]
    source: str
    dtype: str = ""
    is_fastest: bool = False
    cards: Sequence[Device] = ()


@dataclass(frozen=True)
class Compared:
    """A figure against what it should be.

    ``spread``: between healthy cards. ``times``: how often the variance between cards counts in it.
    ``noise``: the standard deviation that intervals add. ``margin``: the shortfall of a typical card. ``priority``: how
    much more of the false alarms it may raise than others.
    """

    device: Device
    figure: str
    shortfall: float
    spread: Spread
    times: float
    noise: float
    against: str
    margin: float = 0.0
    priority: float = 1.0

    @property
    def weight(self) -> float:
        return _WEIGHTS.get(self.figure, 1.0) * self.priority

    def error(self, at_least: float = 0.0) -> float:
        """Standard deviation of ``shortfall`` between healthy cards, as far apart as they are or ``at_least``."""
        return math.hypot(max(self.spread.value, at_least) * math.sqrt(self.times), self.noise)

    def limit(self, rate: float, at_least: float = 0.0) -> float:
        """The shortfall that a healthy card exceeds at this rate."""
        limit = self.spread.quantile(rate) * self.error(at_least)
        if self.spread.degrees:
            widest = replace(self, spread=Spread(max(WIDEST, EXPECTED[self.figure])), margin=0.0)
            limit = min(limit, widest.limit(rate))
        return self.margin + limit


@dataclass(frozen=True)
class Peers:
    """Devices of one name. ``spreads``: by figure. ``contradicted``: own and expected spread, where they differ."""

    devices: Sequence[Device]
    spreads: Mapping[str, Spread]
    contradicted: Mapping[str, tuple[float, float]]


def peers_of(devices: Sequence[Device]) -> dict[str, Peers]:
    """Devices that did not fail, by name, with the spreads that hold for them."""
    by_name = group_pairs((device.name, device) for device in devices if not device.failures)
    return {name: _with_spreads(peers) for name, peers in by_name.items()}


def _with_spreads(peers: Sequence[Device]) -> Peers:
    """One figure that contradicts its expected spread leaves none to trust: they were measured on another model."""
    spreads, contradicted = dict[str, Spread](), dict[str, tuple[float, float]]()
    values = {figure: [value for each in peers if (value := value_of(each, figure)) is not None] for figure in EXPECTED}
    for figure, expected in EXPECTED.items():
        noise = math.sqrt(median(_variance(each, figure) for each in peers))
        spreads[figure], contradicting = spread_of(figure, values[figure], noise)
        if contradicting is not None:
            contradicted[figure] = (contradicting, expected)
    if contradicted:
        for figure, expected in EXPECTED.items():
            own = own_spread(values[figure]) or Spread(WIDEST)
            spreads[figure] = own if figure == POWER else Spread(max(expected, own.value), own.degrees)
    return Peers(peers, spreads, contradicted)


def value_of(device: Device, figure: str) -> float | None:
    """A figure of a device, or None if it lacks it."""
    if figure not in (SPEED, POWER):
        return device.figures.get(figure)
    burst, sustained = device.figures.get(BURST), device.figures.get(SUSTAINED)
    if not burst or not sustained:
        return None
    return sustained / burst if figure == POWER else math.sqrt(burst * sustained)


def _variance(device: Device, figure: str) -> float:
    """Of a repeat of a figure, relative to it, by its interval."""
    if figure in (SPEED, POWER):
        return (_variance(device, BURST) + _variance(device, SUSTAINED)) / (4 if figure == SPEED else 1)
    return (device.half_widths.get(figure, 0.0) / _WIDTH) ** 2


def against_peers(peers: Peers) -> Iterable[Compared]:
    """Each figure of each device against the median of all others."""
    for figure, spread in peers.spreads.items():
        having = [(device, value) for device in peers.devices if (value := value_of(device, figure)) is not None]
        if len(having) < 2:
            continue
        others = len(having) - 1
        of_others = (_OF_MEDIAN if others > 2 else 1.0) / others
        typical = median(_variance(device, figure) for device, _ in having) * of_others
        against = f"the median of {others} other{'s' if others > 1 else ''}"
        for (device, value), middle in zip(having, others_medians([each for _, each in having]), strict=True):
            noise = math.sqrt(_variance(device, figure) + typical)
            yield Compared(device, figure, 1 - value / middle, spread, 1 + of_others, noise, against)


def against_baseline(peers: Peers, baseline: Baseline) -> Iterable[Compared]:
    """Each figure of each device against its own in the baseline if that holds the same card, else against the other
    cards there.
    """
    named = {card.uuid_hash: card for card in baseline.cards}
    cards = baseline.cards or [Device(0, 0, 0, figures=baseline.figures)]
    for device in peers.devices:
        itself = named.get(device.uuid_hash) if device.uuid_hash else None
        for figure, spread in peers.spreads.items():
            value = value_of(device, figure)
            if value is None or figure == POWER:
                continue
            known = value_of(itself, figure) if itself else None
            values = [expected for card in cards if (expected := value_of(card, figure)) is not None]
            if itself and known and figure in REPEATS:
                noise = math.sqrt(_variance(device, figure) + _variance(itself, figure))
                scatter = Spread(REPEATS[figure]), 2.0, noise, f"the same card in {baseline.source}"
                yield Compared(device, figure, 1 - value / known, *scatter, priority=_OF_SAME_CARD)
            elif values:
                of_cards = (_OF_MEDIAN if len(values) > 2 else 1.0) / len(values)
                of_others, lead = (_OF_FASTEST, _FASTEST) if baseline.is_fastest else (of_cards, 0.0)
                scatter = spread, 1 + of_others, math.sqrt(_variance(device, figure)), baseline.source
                yield Compared(device, figure, 1 - value / median(values), *scatter, margin=lead * spread.value)


def others_medians(values: Sequence[float]) -> list[float]:
    """Of each value, the median of all others; at least two values."""
    ranked = sorted(values)
    # Among the others, those in the middle have these ranks; from the place of the one left out on, they are one more.
    low, high = (len(ranked) - 2) // 2, (len(ranked) - 1) // 2
    places = [bisect_left(ranked, value) for value in values]
    return [(ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2 for place in places]
