"""Two run logs, row by row: what got faster, what slower, and what their samples cannot tell. Pure.

What is compared. Of a sweep and of attention every measured row; visits of a reference, and the search for the ceiling
beside it, are left out. Of two finds the ceilings, one row a regime: a find answers what the device can do, and which
of several tied shapes it names is chance. Beside anything but another find, the candidates that a find confirmed. What
a find scouted is never compared: the best of many scouts is biased upwards (the winner's curse), while confirming
rounds are fresh samples. So it is with a guard: where its first visit raised a doubt, the fresh visits count alone.

How sure a row is. B/A of two runs scatters by the error of each run: a shift that all rows of a run share, and a part
of the row's own (mamf.logs.decision). The interval of a row holds with 95 %. SLOWER, FASTER and a regression take more:
by Bonferroni, the chance that any row of a comparison without a change is called slower is at most 0.5 %, and so is the
chance for all rows together. Both make 1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mamf.choices import DEFAULT_TOLERANCE
from mamf.errors import IncomparableError
from mamf.logs.comparability import (
    Difference,
    alone,
    by_fields,
    differences_of,
    droppable,
    field_differences,
    is_paired,
    noted_differences,
)
from mamf.logs.decision import FALSE_ALARMS, SEPARATE, WIDEST, Change, Design, Together, all_together, design_of
from mamf.logs.entries import Entry, Fields, entries, is_find, mean_entries
from mamf.logs.run_log import RunLog
from mamf.statistics import CONFIDENCE, Interval, geometric_mean, student_t, widened
from mamf.tabular import Tabular

Verdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
# Three samples on each side. An interval of fewer is no interval: that of a single sample has no width at all.
LEAST_COVERAGE = 0.5
# What two intervals of 95 % cover together, but for rounding; and the deviations that one of them is wide.
_USUAL, _NORMAL = 0.9 - 1e-9, 1.96


@dataclass(frozen=True)
class Pair:
    """A row that both sides measured. Everything is a speed: above 1, B is the faster.

    ``design``: how the runs of both sides were measured; ``rows``: that are judged together with this one.
    """

    fields: Fields
    a: Entry
    b: Entry
    design: Design = SEPARATE
    rows: int = 1

    @property
    def is_of_one_device(self) -> bool:
        return self.a.device == self.b.device

    @property
    def correction(self) -> float:
        """What the ratio of two rows of different devices is multiplied by, so that it is of one."""
        return 1.0 if self.is_of_one_device else (self.a.device_speed or 1.0) / (self.b.device_speed or 1.0)

    @property
    def correction_half_width(self) -> float:
        """Half the width of its interval, as a share of it."""
        if self.is_of_one_device:
            return 0.0
        return math.hypot(self.a.device_speed_half_width, self.b.device_speed_half_width)

    @property
    def is_comparable(self) -> bool:
        """Whether they are of one device, or of two that were compared."""
        return self.is_of_one_device or None not in (self.a.device_speed, self.b.device_speed)

    @property
    def ratio(self) -> float:
        assert self.a.tflops is not None and self.b.tflops is not None, "only measured rows are paired"
        return self.b.tflops / self.a.tflops * self.correction

    @property
    def change(self) -> Change:
        """The row as one of those that are judged together."""
        errors = [entry.error for entry in (self.a, self.b) if entry.error]
        own = math.hypot(*(error.own for error in errors), self.correction_half_width / _NORMAL)
        common, degrees = max(error.common for error in errors), min(error.degrees for error in errors)
        ratio = min(max(self.ratio, 1e-300), 1e300)  # of crafted logs, too
        return Change(math.log(ratio), common, own, degrees, self.a.seconds, (self.a.rates, self.b.rates))

    @property
    def interval(self) -> Interval:
        """Where the ratio lies with 95 %."""
        return self._around(CONFIDENCE)

    @property
    def sure_interval(self) -> Interval:
        """Where it lies with so much that the intervals of all rows hold together."""
        return self._around(1 - FALSE_ALARMS / self.rows)

    def _around(self, confidence: float) -> Interval:
        """By the errors of both runs; of what has none (counters) the extremes of both intervals."""
        a, b = self.a.interval, self.b.interval
        assert a is not None and b is not None, "only measured rows are paired"
        coverage = max(0.0, a.coverage + b.coverage - 1)
        if self.a.error is None or self.b.error is None:
            interval = Interval(b.low / a.high * self.correction, b.high / a.low * self.correction, coverage)
            return widened(interval, self.ratio, self.correction_half_width)
        change = self.change
        deviation = math.hypot(self.design.factor * change.common, change.own)
        factor = math.exp(min(student_t(change.degrees, confidence) * deviation, WIDEST))
        return Interval(self.ratio / factor, self.ratio * factor, confidence if coverage >= _USUAL else coverage)

    def verdict(self, tolerance: float = DEFAULT_TOLERANCE) -> Verdict:
        """SAME: within the tolerance with 95 %. FASTER, SLOWER: surely so, by however much. Else AMBIGUOUS."""
        interval, sure = self.interval, self.sure_interval
        if interval.coverage < LEAST_COVERAGE or not self.is_comparable:
            return "AMBIGUOUS"
        if 1 - tolerance <= interval.low and interval.high <= 1 + tolerance:
            return "SAME"
        if sure.low > 1:
            return "FASTER"
        return "SLOWER" if sure.high < 1 else "AMBIGUOUS"

    def is_regression(self, tolerance: float = DEFAULT_TOLERANCE) -> bool:
        """Surely slower, and the median by more than the tolerance."""
        return self.verdict(tolerance) == "SLOWER" and self.ratio < 1 - tolerance

    def flat(self, tolerance: float = DEFAULT_TOLERANCE) -> dict[str, Any]:
        """The pair as named columns; rates in TFLOPS, or in the unit that a column names."""
        a, b, interval, sure = self.a, self.b, self.interval, self.sure_interval
        assert a.interval is not None and b.interval is not None, "only measured rows are paired"
        rate = "tflops" if a.unit == "TFLOPS" else "rate"
        return {
            **self.fields,
            "shape_a": a.shape,
            "shape_b": b.shape,
            "kernel_a": a.kernel,
            "kernel_b": b.kernel,
            **({} if rate == "tflops" else {"unit": a.unit}),
            f"{rate}_a": a.tflops,
            "interval_low_a": a.interval.low,
            "interval_high_a": a.interval.high,
            f"{rate}_b": b.tflops,
            "interval_low_b": b.interval.low,
            "interval_high_b": b.interval.high,
            "ratio": self.ratio,
            "ratio_interval_low": interval.low,
            "ratio_interval_high": interval.high,
            "coverage_at_least": interval.coverage,
            "sure_interval_low": sure.low,
            "sure_interval_high": sure.high,
            "verdict": self.verdict(tolerance),
            "is_regression": self.is_regression(tolerance),
        }


@dataclass(frozen=True)
class Side:
    """One of the two runs; ``name``: its path as given, since two logs of one name in two folders are usual."""

    name: str
    header: Mapping[str, Any]
    tier: str


@dataclass(frozen=True)
class Comparison(Tabular):
    """Two sides, row by row. ``pairs``: slowest first. ``together``: all rows of a regime as one figure.

    ``only_a`` (``only_b``): rows with a figure in A (B) alone, each with what the other has in its place, if anything.
    ``dropped``: fields in which the logs differ and that rows were not paired by. ``noted``: what else differs between
    the runs. ``forced``: what made them incomparable.
    """

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    only_a: tuple[tuple[Entry, Entry | None], ...]
    only_b: tuple[tuple[Entry, Entry | None], ...]
    dropped: tuple[Difference, ...] = ()
    noted: tuple[Difference, ...] = ()
    forced: tuple[Difference, ...] = ()
    design: Design = SEPARATE
    together: tuple[Together, ...] = ()

    def __repr__(self) -> str:
        told = ", ".join(f"{count} {verdict}" for verdict, count in self.counts().items() if count)
        return f"Comparison({self.a.name} against {self.b.name}: {told})"

    def rows(self, tolerance: float = DEFAULT_TOLERANCE) -> list[dict[str, Any]]:
        """Each pair as one flat mapping: ``pandas.DataFrame(comparison.rows())``."""
        is_crossed = any(not pair.is_of_one_device for pair in self.pairs)
        corrections = [{"device_correction": pair.correction} if is_crossed else {} for pair in self.pairs]
        return [pair.flat(tolerance) | more for pair, more in zip(self.pairs, corrections, strict=True)]

    def counts(self, tolerance: float = DEFAULT_TOLERANCE) -> dict[str, int]:
        """Rows by verdict, every verdict named."""
        found = Counter(pair.verdict(tolerance) for pair in self.pairs)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def geometric_mean_ratio(self) -> float:
        """Of B to A over all pairs."""
        return geometric_mean([pair.ratio for pair in self.pairs])

    def regressions(self, tolerance: float = DEFAULT_TOLERANCE) -> list[Pair]:
        """Pairs that are surely slower in B, and by more than the tolerance; slowest first."""
        return [pair for pair in self.pairs if pair.is_regression(tolerance)]

    def is_slower(self, tolerance: float = DEFAULT_TOLERANCE) -> bool:
        """Whether a row is a regression, or all rows of a regime together are."""
        return bool(self.regressions(tolerance)) or any(each.is_regression(tolerance) for each in self.together)


def compare(a: RunLog | Sequence[RunLog], b: RunLog | Sequence[RunLog], anyway: bool = False) -> Comparison:
    """Pair the rows of two logs, or of several equal runs per side.

    Raises IncomparableError when they are of other devices, dtypes, regimes or anything else that a ratio would hide,
    or the runs of a side of other software, unless ``anyway``; and always when no row is in both.
    """
    side_a, side_b = ([each] if isinstance(each, RunLog) else list(each) for each in (a, b))
    first, other = side_a[0], side_b[0]
    both_finds = all(map(is_find, (*side_a, *side_b)))
    rows_a, rows_b = (mean_entries([entries(log, both_finds) for log in side]) for side in (side_a, side_b))
    forced = [each for log in (*side_a[1:], *side_b) for each in differences_of(first.header, log.header)]
    forced += field_differences(rows_a, rows_b)
    forced += [
        each for side in (side_a, side_b) for log in side[1:] for each in noted_differences(side[0].header, log.header)
    ]
    if forced and not anyway:
        told = ", ".join(map(str, dict.fromkeys(forced)))
        raise IncomparableError(
            f"{first.path} and {other.path} are not comparable: {told}; --anyway compares them still"
        )
    comparison = paired(first, other, rows_a, rows_b, dict.fromkeys(forced))
    if not comparison.pairs:
        raise IncomparableError(f"no measured row is in both: {_told(first, rows_a)}; {_told(other, rows_b)}")
    names = [", ".join(str(log.path) for log in side) for side in (side_a, side_b)]
    return judged(comparison, names, design_of(side_a, side_b))


def judged(comparison: Comparison, names: Sequence[str], design: Design) -> Comparison:
    """The comparison by the design of its runs, and its rows together."""
    pairs = tuple(replace(pair, design=design, rows=len(comparison.pairs)) for pair in comparison.pairs)
    regimes: dict[object, list[Pair]] = {}
    for pair in pairs:
        regimes.setdefault(pair.fields.get("regime", "all regimes"), []).append(pair)
    # Of fewer than two rows of one device it would say no more than they do.
    of_one = {regime: [pair for pair in rows if pair.is_of_one_device] for regime, rows in regimes.items()}
    found = {regime: [pair.change for pair in rows] for regime, rows in of_one.items() if len(rows) > 1}
    chance = FALSE_ALARMS / 2 / max(1, len(found))
    together = tuple(all_together(str(regime), rows, design, chance) for regime, rows in found.items())
    a, b = (replace(side, name=name) for side, name in zip((comparison.a, comparison.b), names, strict=True))
    return replace(comparison, a=a, b=b, pairs=pairs, design=design, together=together)


def paired(
    a: RunLog, b: RunLog, rows_a: Sequence[Entry], rows_b: Sequence[Entry], forced: Iterable[Difference] = ()
) -> Comparison:
    """The rows of two logs that may be compared; there may be no pair among them."""
    dropped = droppable(rows_a, rows_b)
    names = {difference.what for difference in dropped}
    by_a, by_b = by_fields(rows_a, names), by_fields(rows_b, names)
    pairs = [Pair(each.fields, each, by_b[key]) for key, each in by_a.items() if is_paired(each, by_b.get(key))]
    return Comparison(
        Side(str(a.path), a.header, a.tier),
        Side(str(b.path), b.header, b.tier),
        tuple(sorted(pairs, key=lambda pair: pair.ratio)),
        tuple(alone(by_a, by_b)),
        tuple(alone(by_b, by_a)),
        tuple(dropped),
        tuple(noted_differences(a.header, b.header)),
        tuple(forced),
    )


def _told(log: RunLog, rows: Sequence[Entry]) -> str:
    measured = [row for row in rows if row.tflops is not None]
    if not measured:
        return f"{log.path} has none"
    example = measured[0]
    return f"{log.path} has {len(measured)}, the first {example.shape} by {example.kernel}"
