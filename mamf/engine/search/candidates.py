"""Selects the rows that enter the next phase of a search for a ceiling. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mamf.ceilings.ceiling import Candidate, group_rounds, median_rate
from mamf.measurement import Measurement
from mamf.operations.matmul.shapes import MatmulShape


def best_by_shape(rows: Iterable[Measurement]) -> list[Candidate]:
    """The fastest kernel of each shape."""
    best: dict[MatmulShape, Measurement] = {}
    for row in rows:
        if row.ok and (row.shape not in best or row.best_rate > best[row.shape].best_rate):
            best[row.shape] = row
    return [(shape, row.kernel) for shape, row in best.items()]


def best_of_their_kind(rows: Iterable[Measurement]) -> list[Candidate]:
    """Of each pair of M and N the fastest row, fastest first: neighbours along K are alike, and so are M and N."""
    best: dict[tuple[int, ...], Measurement] = {}
    for row in rows:
        kind = tuple(sorted((row.shape.m, row.shape.n)))
        if row.ok and (kind not in best or row.best_rate > best[kind].best_rate):
            best[kind] = row
    fastest = sorted(best.values(), key=lambda row: row.best_rate, reverse=True)
    return [(row.shape, row.kernel) for row in fastest]


def of_the_default(candidates: Sequence[Candidate], rows: Iterable[Measurement], default: str) -> list[Candidate]:
    """The default kernel on its best shape and on every shape where another kernel is a candidate. The gain over the
    default is known only if both are measured in the same rounds.
    """
    if all(kernel == default for _, kernel in candidates):
        return []
    own = max((row for row in rows if row.ok and row.kernel == default), key=lambda row: row.best_rate, default=None)
    shapes = [] if own is None else [own.shape]
    return [(shape, default) for shape in dict.fromkeys((*shapes, *(shape for shape, _ in candidates)))]


def frugal_and_fast(visits: Sequence[Measurement], count: int) -> list[Candidate]:
    """Finalists by short visits: half by least energy per FLOP where power is known, the others by speed."""
    seen = [row for row in visits if row.ok]
    fastest = sorted(seen, key=lambda row: row.best_rate, reverse=True)
    metered = [row for row in seen if row.conditions.watts]
    frugal = sorted(metered, key=lambda row: (row.conditions.watts or 0.0) / row.best_rate)
    chosen = dict.fromkeys((row.shape, row.kernel) for row in (*frugal[: (count + 1) // 2], *fastest))
    return list(chosen)[:count]


def not_beaten(rows: Sequence[Measurement], left: Sequence[Candidate], hopeless: float) -> list[Candidate]:
    """The candidates whose median is within ``hopeless`` of the best one's."""
    found = {candidate: rounds for candidate, rounds in group_rounds(rows).items() if candidate in left}
    if not found:
        return []
    middle = {candidate: median_rate(rounds.values()) for candidate, rounds in found.items()}
    return [candidate for candidate in found if middle[candidate] >= (1 - hopeless) * max(middle.values())]
