"""Two logs of counters: which kernels take fewer or more cycles, and which differences are uncertain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.errors import IncomparableError
from mamf.logs.comparability import Difference, blocking_differences, noted_differences
from mamf.logs.compare import Pair
from mamf.logs.entries import Entry
from mamf.logs.run_log import RunLog
from mamf.operations.unknown import operation_called
from mamf.profiling.counters.counts import Counts
from mamf.profiling.counters.log import counted_in
from mamf.report.columns import interval_columns
from mamf.report.comparison import difference_lines, ratio_interval_cell
from mamf.report.document import Answer, Block, Column, Document, Lines, Table, columns_from
from mamf.report.text import counted
from mamf.statistics import Interval


@dataclass(frozen=True)
class CounterPair:
    """A kernel on a shape that both counted. Pair treats higher values as faster, so it gets launches per cycle."""

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
    """Launches per cycle."""
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
    """Raises IncomparableError for other devices, unless ``anyway``, or if no kernel and shape is in both logs."""
    forced = blocking_differences(a.header, b.header)
    if forced and not anyway:
        differences = ", ".join(map(str, forced))
        raise IncomparableError(f"{a.path} and {b.path} are not comparable: {differences}; --anyway compares them")
    of_a, of_b = ({_key(each): each for each in counted_in(log).counts if each.cycles} for log in (a, b))
    keys = [key for key in of_a if key in of_b]
    if not keys:
        raise IncomparableError(f"no kernel was counted on the same shape in {a.path} and {b.path}")
    pairs = sorted((CounterPair(of_a[key], of_b[key]) for key in keys), key=lambda pair: -pair.ratio)
    alone = len(of_a) + len(of_b) - 2 * len(keys)
    return CounterComparison(a, b, tuple(pairs), alone, forced, noted_differences(a.header, b.header))


def _key(counts: Counts) -> tuple[str, Any, str]:
    return counts.kernel, counts.problem, str(counts.shape)


def counters_comparison_document(comparison: CounterComparison, tolerance: float) -> Document:
    """``tolerance``: the share by which a kernel may take more cycles."""
    slower = len(comparison.regressions(tolerance))
    alone = f"; {comparison.alone} counted in one log alone" if comparison.alone else ""
    pairs = counted(len(comparison.pairs), "row")
    blocks: list[Block] = [
        Lines(_title(comparison, tolerance)),
        Table(pair_columns(comparison.pairs, tolerance), comparison.pairs),
        Answer([f"{pairs}{alone}; {slower or 'none'} with more cycles by more than {100 * tolerance:g} %"]),
    ]
    data = {"a": str(comparison.a.path), "b": str(comparison.b.path), "tolerance": tolerance}
    return Document("Two logs of counters", blocks, {**data, "alone": comparison.alone})


def _title(comparison: CounterComparison, tolerance: float) -> list[str]:
    logs = zip("AB", (comparison.a, comparison.b), strict=True)
    return [
        *(f"{name}: {log.path}, {log.header['device']['name']}" for name, log in logs),
        *difference_lines("not comparable, compared anyway: ", comparison.forced),
        *difference_lines("the runs differ in ", comparison.noted),
        f"B/A below 1: B takes fewer cycles; SAME: the interval is within 1 +- {100 * tolerance:g} %",
    ]


def pair_columns(pairs: Sequence[CounterPair], tolerance: float) -> list[Column[CounterPair]]:
    return [
        Column("operation", "", lambda pair: pair.a.problem.operation),
        Column("kernel", "kernel", lambda pair: pair.a.kernel, left=True),
        Column("shape", "shape", lambda pair: str(pair.a.shape), left=True),
        Column("", "problem", lambda pair: " ".join(_words(pair)), importance=3, left=True),
        *columns_from(pairs, _problem_record, titled=False),
        Column("cycles_a", "A cycles", lambda pair: pair.a.median_cycles, "{:,.0f}".format, 1),
        Column("cycles_b", "B cycles", lambda pair: pair.b.median_cycles, "{:,.0f}".format, 1),
        Column("ratio", "B/A", lambda pair: pair.ratio, "{:.4f}".format),
        *interval_columns(lambda pair: pair.interval, "ratio_interval_{}", ratio_interval_cell),
        Column("coverage_at_least", "", lambda pair: pair.interval.coverage),
        Column("verdict", "verdict", lambda pair: pair.verdict(tolerance), left=True),
        Column("is_regression", "", lambda pair: pair.is_regression(tolerance)),
    ]


def _words(pair: CounterPair) -> list[str]:
    problem = pair.a.problem
    return [problem.dtype, *operation_called(problem.operation).words(problem)]


def _problem_record(pair: CounterPair) -> Mapping[str, object]:
    return operation_called(pair.a.problem.operation).problem_record(pair.a.problem)
