"""Whether claims hold here: the verdict on each, and the setting that explains it. Pure.

A claim and its visits here are two runs. Both scatter as calibrated; a printed figure is taken as such a run too,
because its own scatter is unknown. Visits of a claim have the phase ``confirm`` and are numbered. Those in another
setting have its name as the phase and the number of the claim as the round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any, Literal, NamedTuple

from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.kernel import DATA
from mamf.logs.claims import recorded_circumstances
from mamf.logs.comparability import Difference, value_differences
from mamf.logs.compare import Pair
from mamf.logs.compare import Verdict as Compared
from mamf.logs.entries import Entry, visited_entry
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import KERNEL_REGIMES, MATMUL, Claim, Plan, ReproduceOptions
from mamf.regime_names import BURST, CLASSIC
from mamf.statistics import FigureError

#: The verdicts on a claim, by what ``mamf compare`` says of such a pair.
Verdict = Literal["reproduced", "faster", "slower", "undecided", "not measured"]
_VERDICTS: Mapping[Compared, Verdict] = {
    "SAME": "reproduced",
    "FASTER": "faster",
    "SLOWER": "slower",
    "AMBIGUOUS": "undecided",
}
#: Visits to a claim until it is decided.
MOST_VISITS = 5
# Half the width of a 95 % interval in standard deviations; clocks that differ by less are equal.
_NORMAL, _SAME_CLOCK = 1.96, 0.005


class Setting(NamedTuple):
    """Another way in which a claim may have been measured. ``is_warm``: whether classic warms up first."""

    name: str
    regime: str
    problem: Any
    kernel: str
    flush: bool
    is_warm: bool = True


def settings_of(claim: Claim, plan: Plan) -> Iterator[Setting]:
    """The settings that may explain why a claim is not reproduced: each differs in one thing."""
    regime, problem, _, kernel = claim.step
    usual = Setting("", regime, problem, kernel, plan.flush)
    if regime == BURST:
        yield usual._replace(name=f"caches {'warm' if plan.flush else 'flushed'}", flush=not plan.flush)
    data = getattr(problem, "data", None)
    for other in ("zeros", "normal") if data in DATA else ():
        if other != data:
            yield usual._replace(name=f"data {other}", problem=replace(problem, data=other))
    for other in plan.kernels:
        if other not in {each.kernel for each in plan.options.claims}:
            yield usual._replace(name=f"kernel {other}", kernel=other)
    for other in KERNEL_REGIMES:
        if other != regime:
            yield usual._replace(name=other, regime=other)
    if plan.operation == MATMUL:
        yield usual._replace(name="classic without warm-up", regime=CLASSIC, is_warm=False)
        if regime != CLASSIC:
            yield usual._replace(name=CLASSIC, regime=CLASSIC)


@dataclass(frozen=True)
class Explained:
    """A claim in another setting. ``pair``: None without a figure, for the reason in ``here``."""

    number: int
    claim: Claim
    name: str
    here: Entry
    pair: Pair | None

    @property
    def matches(self) -> bool:
        """Whether the claim may have been measured like this: its ratio may be 1."""
        return self.pair is not None and self.pair.interval.low <= 1 <= self.pair.interval.high


@dataclass(frozen=True)
class Judged:
    """A claim, its figure here and the verdict. ``here``: None if it was never tried."""

    claim: Claim
    here: Entry | None
    pair: Pair | None
    explained: tuple[Explained, ...]
    tolerance: float
    clock_hz: float | None = None

    @property
    def verdict(self) -> Verdict:
        return "not measured" if self.pair is None else _VERDICTS[self.pair.verdict(self.tolerance)]

    @property
    def is_slower(self) -> bool:
        """Whether it is surely slower, and by more than the tolerance."""
        return self.pair is not None and self.pair.is_regression(self.tolerance)

    @property
    def matching(self) -> list[Explained]:
        """The settings that match, the closest first."""
        found = [each for each in self.explained if each.matches and each.pair]
        return sorted(found, key=lambda each: abs(math.log(each.pair.ratio)) if each.pair else 0.0)


@dataclass(frozen=True)
class Reproduction:
    """All claims of a run. ``differences``: between what was recorded and this run; None: nothing was recorded."""

    options: ReproduceOptions
    judged: Sequence[Judged]
    differences: Sequence[Difference] | None

    @cached_property
    def counts(self) -> dict[Verdict, int]:
        """Claims by verdict, those that occur."""
        found = [each.verdict for each in self.judged]
        return {verdict: found.count(verdict) for verdict in dict.fromkeys(found)}

    @property
    def other_device(self) -> Difference | None:
        """The device, if the claims are from another model."""
        return next((each for each in self.differences or () if each.what == "device"), None)

    @property
    def is_slower(self) -> bool:
        return any(each.is_slower for each in self.judged)


def judge_reproduction(log: RunLog) -> Reproduction:
    """The verdicts, from the log of a reproduction alone."""
    options: ReproduceOptions = log.plan.options
    judged = [judge_claim(options, number, log.measurements) for number in range(1, len(options.claims) + 1)]
    recorded, here = dict(options.recorded), recorded_circumstances(log.header)
    if "mamf" not in recorded:  # printed by another tool, which names some of it
        here = {name: value for name, value in here.items() if name in recorded}
    found = [*value_differences(recorded, here), *_clocks(judged)]
    return Reproduction(options, judged, found if recorded else None)


def judge_claim(options: ReproduceOptions, number: int, rows: Iterable[Measurement]) -> Judged:
    """The verdict on the claim of this number, from 1. ``rows``: of all claims."""
    claim, rows = options.claims[number - 1], list(rows)
    visits = [row for row in rows if row.phase == CONFIRM and row.step == claim.step]
    others = [row for row in rows if row.phase not in ("", CONFIRM) and row.round == number]
    explained = [Explained(number, claim, row.phase, *_paired(options, claim, [row])) for row in others]
    if not visits:
        return Judged(claim, None, None, tuple(explained), options.tolerance)
    clock = summarize_conditions(visits).clock_hz
    return Judged(claim, *_paired(options, claim, visits), tuple(explained), options.tolerance, clock)


def _paired(options: ReproduceOptions, claim: Claim, visits: Sequence[Measurement]) -> tuple[Entry, Pair | None]:
    """The figure of these visits, and the claim beside it."""
    here = visited_entry([replace(row, phase=CONFIRM) for row in visits])
    if here.tflops is None or here.interval is None or here.error is None:
        return here, None
    if claim.statistic:
        measured = [row for row in visits if row.ok]
        factor = median(row.rate(claim.statistic) / row.rate(row.figure) for row in measured)
        interval = replace(here.interval, low=here.interval.low * factor, high=here.interval.high * factor)
        here = replace(here, tflops=here.tflops * factor, interval=interval)
    error = claim.error or _as_a_run(here.error or FigureError(0.0, 0.0, 1), claim)
    shape, unit = str(claim.shape), here.unit
    there = Entry(here.fields, shape, claim.kernel, claim.rate, claim.interval, unit=unit, error=error)
    there = replace(there, seconds=here.seconds)
    return here, Pair(here.fields, there, here, rows=max(options.chosen_from, len(options.claims)))


def _as_a_run(error: FigureError, claim: Claim) -> FigureError:
    """The error of a printed figure: that of a run like the one here, and its rounding."""
    rounding = claim.interval.half_width / claim.rate / _NORMAL
    return replace(error, own=math.hypot(error.own, rounding))


def _clocks(judged: Iterable[Judged]) -> Iterator[Difference]:
    """Clocks that were read during the measurement and differ."""
    for each in judged:
        then, now = each.claim.clock_hz, each.clock_hz
        if then and now and abs(now / then - 1) > _SAME_CLOCK:
            name = f"clock in {each.claim.regime} at {each.claim.shape}"
            yield Difference(name, f"{then / 1e6:.0f} MHz", f"{now / 1e6:.0f} MHz")
