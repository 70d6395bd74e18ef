"""Two logs of counters: which kernels take fewer cycles, which more, and what their launches cannot tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mamf.counters.counts import Counts
from mamf.counters.log import counted_in
from mamf.errors import IncomparableError
from mamf.logs.comparability import Difference, differences_of, noted_differences
from mamf.logs.compare import Entry, Pair
from mamf.logs.known import operation_called
from mamf.logs.run_log import RunLog
from mamf.report.text import csv_text, drawing, prose
from mamf.statistics import Interval

_COLUMNS = ("kernel", "shape", "A cycles", "B cycles", "B/A", "interval", "verdict")
_LEFT = ("kernel", "shape", "interval", "verdict")


@dataclass(frozen=True)
class CounterPair:
    """A kernel on a shape that both counted. Pair takes the higher for the faster: here it is launches a cycle."""

    a: Counts
    b: Counts

    @property
    def ratio(self) -> float:
        """Cycles of B to those of A."""
        return (self.b.median_cycles or 0.0) / (self.a.median_cycles or 1.0)

    @property
    def interval(self) -> Interval:
        speeds = self._speeds().interval
        return Interval(1 / speeds.high, 1 / speeds.low, speeds.coverage)

    def verdict(self, tolerance: float) -> str:
        return self._speeds().verdict(tolerance)

    def is_regression(self, tolerance: float) -> bool:
        return self._speeds().is_regression(tolerance)

    def _speeds(self) -> Pair:
        return Pair({}, _speed(self.a), _speed(self.b))


def _speed(counts: Counts) -> Entry:
    """Launches a cycle."""
    interval, cycles = counts.interval, counts.median_cycles
    assert interval is not None and cycles is not None, "only what has cycles is paired"
    speed = Interval(1 / interval.high, 1 / interval.low, interval.coverage)
    return Entry({}, str(counts.shape), counts.kernel, 1 / cycles, speed)


@dataclass(frozen=True)
class CounterComparison:
    """``pairs``: slowest first. ``alone``: counted in one of the logs. ``noted``: what else differs."""

    a: RunLog
    b: RunLog
    pairs: tuple[CounterPair, ...]
    alone: int
    forced: Sequence[Difference]
    noted: Sequence[Difference]

    def regressions(self, tolerance: float) -> list[CounterPair]:
        """Surely more cycles, and by more than the tolerance."""
        return [pair for pair in self.pairs if pair.is_regression(tolerance)]


def compare_counters(a: RunLog, b: RunLog, anyway: bool = False) -> CounterComparison:
    """Raises IncomparableError for other devices, unless ``anyway``, and where no kernel and shape is in both."""
    forced = differences_of(a.header, b.header)
    if forced and not anyway:
        told = ", ".join(map(str, forced))
        raise IncomparableError(f"{a.path} and {b.path} are not comparable: {told}; --anyway compares them still")
    of_a, of_b = ({_key(each): each for each in counted_in(log).counts if each.cycles} for log in (a, b))
    keys = [key for key in of_a if key in of_b]
    if not keys:
        raise IncomparableError(f"no kernel was counted on the same shape in {a.path} and {b.path}")
    pairs = sorted((CounterPair(of_a[key], of_b[key]) for key in keys), key=lambda pair: -pair.ratio)
    alone = len(of_a) + len(of_b) - 2 * len(keys)
    return CounterComparison(a, b, tuple(pairs), alone, forced, noted_differences(a.header, b.header))


def _key(counts: Counts) -> tuple[str, Any, str]:
    return counts.kernel, counts.problem, str(counts.shape)


def render_counter_pairs(format: str, comparison: CounterComparison, tolerance: float, width: int | None = None) -> str:
    """In one of mamf.report.FORMATS."""
    rows = [_flat(pair, tolerance) for pair in comparison.pairs]
    if format == "csv":
        return csv_text(rows)
    if format == "json":
        logs = {"a": str(comparison.a.path), "b": str(comparison.b.path)}
        return json.dumps({**logs, "tolerance": tolerance, "rows": rows, "alone": comparison.alone}, indent=2) + "\n"
    drawn = drawing(format, width)(_COLUMNS, [_cells(pair, tolerance) for pair in comparison.pairs], _LEFT)
    return f"{prose(_title(comparison, tolerance), format)}\n{drawn}\n{prose(_end(comparison), format)}"


def _title(comparison: CounterComparison, tolerance: float) -> list[str]:
    logs = zip("AB", (comparison.a, comparison.b), strict=True)
    lines = [f"{name}: {log.path}, {log.header['device']['name']}" for name, log in logs]
    for what, differences in (
        ("not comparable, compared anyway: ", comparison.forced),
        ("the runs differ in ", comparison.noted),
    ):
        if differences:
            lines.append(what + ", ".join(map(str, differences)))
    return [*lines, f"B/A below 1: B takes fewer cycles; SAME: the interval is within 1 +- {100 * tolerance:g} %"]


def _end(comparison: CounterComparison) -> list[str]:
    alone = f"; {comparison.alone} counted in one log alone" if comparison.alone else ""
    pairs = "row" if len(comparison.pairs) == 1 else "rows"
    return [f"{len(comparison.pairs)} {pairs}{alone}"]


def _flat(pair: CounterPair, tolerance: float) -> dict[str, Any]:
    of, interval = operation_called(pair.a.problem.operation), pair.interval
    return {
        "operation": of.name,
        **of.problem_record(pair.a.problem),
        "kernel": pair.a.kernel,
        "shape": str(pair.a.shape),
        "cycles_a": pair.a.median_cycles,
        "cycles_b": pair.b.median_cycles,
        "ratio": pair.ratio,
        "ratio_interval_low": interval.low,
        "ratio_interval_high": interval.high,
        "coverage_at_least": interval.coverage,
        "verdict": pair.verdict(tolerance),
        "is_regression": pair.is_regression(tolerance),
    }


def _cells(pair: CounterPair, tolerance: float) -> list[str]:
    of, interval = operation_called(pair.a.problem.operation), pair.interval
    return [
        pair.a.kernel,
        " ".join([str(pair.a.shape), pair.a.problem.dtype, *of.words(pair.a.problem)]),
        f"{pair.a.median_cycles:,.0f}",
        f"{pair.b.median_cycles:,.0f}",
        f"{pair.ratio:.4f}",
        f"{interval.low:.4f} to {interval.high:.4f}",
        pair.verdict(tolerance),
    ]
