"""Two run logs, row by row: what got faster, what slower, and what their samples cannot tell. Pure.

What is compared. Of a sweep and of attention every measured row; visits of a reference, and the search for the ceiling
beside it, are left out. Of two finds the ceilings, one row a regime: a find answers what the device can do, and which
of several tied shapes it names is chance. Beside anything but another find, the candidates that a find confirmed. What
a find scouted is never compared: the best of many scouts is biased upwards (the winner's curse), while confirming
rounds are fresh samples. So it is with a guard: where its first visit raised a doubt, the fresh visits count alone.

How sure a row is. A candidate's figure is the median over its rounds, with the rounds, not the launches in them, as
samples: launches of one round share the state of the card, so pooling them would claim more than was seen. The
interval of a ratio spans the extremes of both medians' intervals; by Bonferroni it covers at least ``a + b - 1`` where
those cover ``a`` and ``b`` (0.90 for two of 0.95), and in truth more. What differs between two processes (placement in
memory, temperature) is in neither log's samples: the tolerance is for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mamf.errors import IncomparableError
from mamf.logs.comparability import Difference, described, differences_of, noted_differences
from mamf.logs.entries import Entry, Fields, entries, is_find
from mamf.logs.run_log import RunLog
from mamf.statistics import Interval, geometric_mean, widened
from mamf.tabular import Tabular

Verdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
DEFAULT_TOLERANCE = 0.01
# Three samples on each side. An interval of fewer is no interval: that of a single sample has no width at all.
_LEAST_COVERAGE = 0.5
# What may differ without a word: kernels are paired by name where they can be.
_ALWAYS_DROPPED = "kernel"


@dataclass(frozen=True)
class Pair:
    """A row that both logs measured. Everything is a speed: above 1, B is the faster."""

    fields: Fields
    a: Entry
    b: Entry

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
    def interval(self) -> Interval:
        """The ratio's interval, from the extremes of both medians' intervals, wider by that of the correction."""
        a, b = self.a.interval, self.b.interval
        assert a is not None and b is not None, "only measured rows are paired"
        low, high = b.low / a.high * self.correction, b.high / a.low * self.correction
        interval = Interval(low, high, max(0.0, a.coverage + b.coverage - 1))
        return widened(interval, self.ratio, self.correction_half_width)

    def verdict(self, tolerance: float = DEFAULT_TOLERANCE) -> Verdict:
        """SAME: surely within the tolerance. FASTER, SLOWER: surely so, by however much. Else AMBIGUOUS."""
        interval = self.interval
        if interval.coverage < _LEAST_COVERAGE or not self.is_comparable:
            return "AMBIGUOUS"
        if 1 - tolerance <= interval.low and interval.high <= 1 + tolerance:
            return "SAME"
        if interval.low > 1:
            return "FASTER"
        return "SLOWER" if interval.high < 1 else "AMBIGUOUS"

    def is_regression(self, tolerance: float = DEFAULT_TOLERANCE) -> bool:
        """Surely slower, and the median by more than the tolerance."""
        return self.verdict(tolerance) == "SLOWER" and self.ratio < 1 - tolerance

    def flat(self, tolerance: float = DEFAULT_TOLERANCE) -> dict[str, Any]:
        """The pair as named columns; rates in TFLOPS, or in the unit that a column names."""
        a, b, interval = self.a, self.b, self.interval
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
    """Two runs, row by row. ``pairs``: slowest first. ``only_a`` (``only_b``): rows with a figure in A (B) alone, each
    with what the other has in its place, if anything. ``dropped``: fields in which the logs differ and that rows were
    not paired by. ``noted``: what else differs between the runs. ``forced``: what made them incomparable.
    """

    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    only_a: tuple[tuple[Entry, Entry | None], ...]
    only_b: tuple[tuple[Entry, Entry | None], ...]
    dropped: tuple[Difference, ...] = ()
    noted: tuple[Difference, ...] = ()
    forced: tuple[Difference, ...] = ()

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


def compare(a: RunLog, b: RunLog, anyway: bool = False) -> Comparison:
    """Pair the rows of two logs.

    Raises IncomparableError when they are of other devices, dtypes, regimes or anything else that a ratio would hide,
    unless ``anyway``; and always when no row is in both.
    """
    both_finds = is_find(a) and is_find(b)
    rows_a, rows_b = entries(a, both_finds), entries(b, both_finds)
    forced = [*differences_of(a.header, b.header), *field_differences(rows_a, rows_b)]
    if forced and not anyway:
        told = ", ".join(map(str, forced))
        raise IncomparableError(f"{a.path} and {b.path} are not comparable: {told}; --anyway compares them still")
    comparison = paired(a, b, rows_a, rows_b, forced)
    if not comparison.pairs:
        raise IncomparableError(f"no measured row is in both: {_told(a, rows_a)}; {_told(b, rows_b)}")
    return comparison


def paired(
    a: RunLog, b: RunLog, rows_a: Sequence[Entry], rows_b: Sequence[Entry], forced: Iterable[Difference] = ()
) -> Comparison:
    """The rows of two logs that may be compared; there may be no pair among them."""
    dropped = droppable(rows_a, rows_b)
    names = {difference.what for difference in dropped}
    by_a, by_b = by_fields(rows_a, names), by_fields(rows_b, names)
    pairs = [Pair(each.fields, each, by_b[key]) for key, each in by_a.items() if _is_paired(each, by_b.get(key))]
    return Comparison(
        Side(str(a.path), a.header, a.tier),
        Side(str(b.path), b.header, b.tier),
        tuple(sorted(pairs, key=lambda pair: pair.ratio)),
        tuple(_alone(by_a, by_b)),
        tuple(_alone(by_b, by_a)),
        tuple(dropped),
        tuple(noted_differences(a.header, b.header)),
        tuple(forced),
    )


def values(rows: Iterable[Entry], name: str) -> list[object]:
    """The values of a field, once each, in the order of the log."""
    return list({row.fields[name]: None for row in rows if name in row.fields})


def field_differences(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields of the regime and the problem in which no row of A is like any row of B."""
    if not a or not b:
        return []
    names = [name for name in a[0].fields if name in b[0].fields and name not in ("shape", "kernel")]
    found = ((name, values(a, name), values(b, name)) for name in names)
    return [described(name, of_a, of_b) for name, of_a, of_b in found if not set(of_a) & set(of_b)]


def droppable(a: Sequence[Entry], b: Sequence[Entry]) -> list[Difference]:
    """Fields that rows can be paired without: one value throughout A, another throughout B."""
    apart = [each for each in field_differences(a, b) if len(values(a, each.what)) == len(values(b, each.what)) == 1]
    kernels = values(a, _ALWAYS_DROPPED), values(b, _ALWAYS_DROPPED)
    if len(kernels[0]) == len(kernels[1]) == 1 and kernels[0] != kernels[1]:
        apart.append(described(_ALWAYS_DROPPED, *kernels))
    return apart


def by_fields(rows: Iterable[Entry], left_out: Iterable[str]) -> dict[object, Entry]:
    """Rows by what they are paired by; their fields are what is left of them."""
    found: dict[object, Entry] = {}
    for row in rows:
        fields = {name: value for name, value in row.fields.items() if name not in set(left_out)}
        found[frozenset(fields.items())] = replace(row, fields=fields)
    return found


def _is_paired(a: Entry, b: Entry | None) -> bool:
    return a.tflops is not None and b is not None and b.tflops is not None


def _alone(own: Mapping[object, Entry], other: Mapping[object, Entry]) -> Iterable[tuple[Entry, Entry | None]]:
    """Rows with a figure here and none there, and what is there instead."""
    for key, entry in own.items():
        if entry.tflops is not None and not _is_paired(entry, other.get(key)):
            yield entry, other.get(key)


def _told(log: RunLog, rows: Sequence[Entry]) -> str:
    measured = [row for row in rows if row.tflops is not None]
    if not measured:
        return f"{log.path} has none"
    example = measured[0]
    return f"{log.path} has {len(measured)}, the first {example.shape} by {example.kernel}"
