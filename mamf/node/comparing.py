"""Figures of devices against their peers and against baselines, and how far a healthy card may be off. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median

from mamf.node.figures import BURST, SUSTAINED, Device
from mamf.node.spreads import (
    EXPECTED,
    POWER,
    REPEATS,
    SPEED,
    WIDEST,
    Spread,
    own_spread,
    spread_of,
)
from mamf.statistics import CONFIDENCE

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
    by_name: dict[str, list[Device]] = {}
    for device in devices:
        if not device.failures:
            by_name.setdefault(device.name, []).append(device)
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
