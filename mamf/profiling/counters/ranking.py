"""Whether kernels rank by cycles as they rank in burst: at one clock they would. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from mamf.measurement import Measurement
from mamf.profiling.counters.counts import Counts

_MOST_PAIRS = 3


def disagreements(rows: Sequence[Measurement], counts: Mapping[str, Counts]) -> Iterator[str]:
    """The fewest cycles and the fastest burst of several kernels, and pairs that the two surely order otherwise."""
    ranked = [row for row in rows if row.ok and row.kernel in counts and counts[row.kernel].cycles]
    if len(ranked) < 2:
        return
    by_cycles = min(ranked, key=lambda row: counts[row.kernel].median_cycles or 0.0).kernel
    in_burst = min(ranked, key=lambda row: row.seconds).kernel
    pairs = [pair for pair in itertools.permutations(ranked, 2) if _is_reversed(*pair, counts)]
    yield f"fewest cycles: {by_cycles}; fastest in burst: {in_burst}; {_count_reversed(len(pairs))}"
    for a, b in pairs[:_MOST_PAIRS]:
        fewer = 1 - (counts[a.kernel].median_cycles or 0.0) / (counts[b.kernel].median_cycles or 1.0)
        slower = a.seconds / b.seconds - 1
        yield f"{a.kernel} takes {fewer:.1%} fewer cycles than {b.kernel}, and in burst {slower:.1%} more time"


def _count_reversed(pairs: int) -> str:
    return f"pairs that are surely ordered otherwise: {pairs}" if pairs else "no pair is surely ordered otherwise"


def _is_reversed(a: Measurement, b: Measurement, counts: Mapping[str, Counts]) -> bool:
    """Whether A takes surely fewer cycles than B, and surely more time."""
    cycles_a, cycles_b = counts[a.kernel].interval, counts[b.kernel].interval
    if cycles_a is None or cycles_b is None:
        return False
    return cycles_a.high < cycles_b.low and a.interval.low > b.interval.high
