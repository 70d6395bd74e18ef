"""How far healthy cards lie apart: the expected spread, and the spread within a run. Pure.

Expected spreads are measured; the cards of a run are judged by them unless the cards contradict them. The run's own
spread is the slope of a normal probability plot (Blom's scores; Chambers et al., Graphical Methods for Data Analysis,
1983, section 6.3), without the slowest cards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, linear_regression

from mamf.node.figures import BURST, COPY, READ, SUSTAINED, TO_DEVICE, TO_HOST, TO_PEER
from mamf.statistics import student_t

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
