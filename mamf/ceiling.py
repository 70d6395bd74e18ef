"""Ceilings: the confirmed best of a device, dtype and regime, and what share of it something else reaches. Pure.

A ceiling comes from rounds of fresh samples, interleaved over the candidates; never from the samples that chose the
candidates, whose maximum is biased upwards (the winner's curse).
"""

from __future__ import annotations

import statistics as stdlib_statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mamf.errors import IncomparableError
from mamf.kernel import MatmulProblem
from mamf.measure import TERA, Conditions, Measurement
from mamf.shapes import MatmulShape
from mamf.statistics import Interval, median_interval

#: What is measured: a shape by a kernel.
Candidate = tuple[MatmulShape, str]
# Rounds in which a candidate must have been measured to count as confirmed.
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Ceiling:
    """The highest figure of a device for a problem in a regime.

    ``tflops``: median over ``rounds`` of fresh measurements. ``interval``: its confidence interval, in TFLOPS.
    ``tied``: candidates that these rounds cannot tell from the winner. ``gain_over_default``: how much faster the
    winning kernel is than the library's default on this very shape, as a share; None where that was not measured, or
    is the winner itself.
    """

    device: str
    uuid_hash: str | None
    problem: MatmulProblem
    regime: str
    kernel: str
    shape: MatmulShape
    tflops: float
    interval: Interval
    rounds: int
    tied: tuple[Candidate, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    gain_over_default: float | None = None

    @property
    def joules_per_tflop(self) -> float | None:
        """Energy per 1e12 FLOP; None in burst, whose power is averaged over rests."""
        if self.regime != "sustained" or not self.conditions.watts:
            return None
        return self.conditions.watts / self.tflops

    def utilization(self, *, flop: float, seconds: float, regime: str) -> float:
        """``flop`` done in ``seconds`` as a share of this ceiling: MAMFU.

        Raises IncomparableError when ``regime`` is not the ceiling's: a share across regimes compares two clocks.
        """
        if regime != self.regime:
            raise IncomparableError(
                f"a {regime} figure is no share of a {self.regime} ceiling: measure both in one regime"
            )
        return flop / seconds / (self.tflops * TERA)


def confirmed(
    rows: Iterable[Measurement], device: str, uuid_hash: str | None = None, default_kernel: str | None = None
) -> Ceiling | None:
    """The ceiling that rounds of fresh measurements give, or None before there were FEWEST_ROUNDS.

    ``rows``: of one problem and regime. Every round measures each remaining candidate once, so candidates are compared
    within rounds: what drifts between rounds cancels.
    """
    by_candidate = figures(rows)
    most = max(map(len, by_candidate.values()), default=0)
    if most < FEWEST_ROUNDS:
        return None
    # What was dropped on the way was measured less often and cannot win; the last round may not be whole.
    finalists = {candidate: found for candidate, found in by_candidate.items() if len(found) >= most - 1}
    winner = max(finalists, key=lambda candidate: median_tflops(finalists[candidate].values()))
    own = finalists[winner]
    shape, kernel = winner
    tflops = sorted(row.best_tflops for row in own.values())
    gain = None
    if default_kernel is not None and kernel != default_kernel and (shape, default_kernel) in by_candidate:
        gain = stdlib_statistics.median(ratios(own, by_candidate[shape, default_kernel])) - 1
    row = next(iter(own.values()))
    return Ceiling(
        device=device,
        uuid_hash=uuid_hash,
        problem=row.problem,
        regime=row.regime,
        kernel=kernel,
        shape=shape,
        tflops=stdlib_statistics.median(tflops),
        interval=median_interval(tflops),
        rounds=len(own),
        tied=tuple(other for other, found in finalists.items() if other != winner and ties(own, found)),
        conditions=typical(own.values()),
        gain_over_default=gain,
    )


def figures(rows: Iterable[Measurement]) -> dict[Candidate, dict[int, Measurement]]:
    """Measured rows by candidate and round."""
    found: dict[Candidate, dict[int, Measurement]] = {}
    for row in rows:
        if row.ok:
            found.setdefault((row.shape, row.kernel), {})[row.round] = row
    return found


def median_tflops(rows: Iterable[Measurement]) -> float:
    return stdlib_statistics.median(row.best_tflops for row in rows)


def ratios(own: Mapping[int, Measurement], other: Mapping[int, Measurement]) -> list[float]:
    """Own figure to the other's, round by round."""
    return [own[number].best_tflops / other[number].best_tflops for number in own if number in other]


def ties(own: Mapping[int, Measurement], other: Mapping[int, Measurement]) -> bool:
    """Whether the rounds cannot tell the two apart: the interval of their ratio holds 1."""
    compared = ratios(own, other)
    return bool(compared) and median_interval(compared).low <= 1.0


def typical(rows: Iterable[Measurement]) -> Conditions:
    """Medians of what the sensors said over rounds; the reasons for throttling seen in at least half of them."""
    seen = [row.conditions for row in rows]

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return stdlib_statistics.median(known) if known else None

    reasons = sorted({reason for each in seen for reason in each.throttle_reasons})
    return Conditions(
        clock_hz=median(each.clock_hz for each in seen),
        watts=median(each.watts for each in seen),
        celsius=median(each.celsius for each in seen),
        throttle_reasons=tuple(
            reason for reason in reasons if 2 * sum(reason in each.throttle_reasons for each in seen) >= len(seen)
        ),
    )
