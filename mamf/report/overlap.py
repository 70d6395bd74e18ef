"""Products beside other work: what each loses while both run, and how long a step of both takes at best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement, group_pairs
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.overlap import OTHER, PRODUCTS
from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow
from mamf.report.charts.logs import failures, machine
from mamf.report.document import (
    Answer,
    Column,
    Document,
    Lines,
    Table,
    end_line,
    machine_line,
    percent,
    rate_name,
    significant,
    work_line,
)
from mamf.report.rows import failure_lines


@dataclass(frozen=True)
class Pair:
    """``rows``: by what is timed and whether it is alone."""

    rows: Mapping[tuple[str, bool], Measurement]

    @property
    def together(self) -> Measurement:
        return self.rows[PRODUCTS, False]

    def kept(self, timed: str) -> float:
        """The share of its rate alone that a work has while both run."""
        return self.rows[timed, False].best_rate / self.rows[timed, True].best_rate

    def half_width(self, timed: str) -> float:
        """Of the interval of ``kept``, as a share of it."""
        return math.hypot(*(self.rows[timed, alone].relative_half_width for alone in (False, True)))

    def step_seconds(self, flop: float, nbytes: float) -> tuple[float, float]:
        """Seconds of a step of so many FLOP and bytes (of the other work's buffer): both at once until one is done,
        then the rest of the other alone; and one after the other.
        """
        amounts = {PRODUCTS: flop / self.together.flop, OTHER: nbytes / self.together.shape.nbytes}
        alone, both = (
            {timed: amounts[timed] * self.rows[timed, alone].seconds for timed in amounts} for alone in (True, False)
        )
        first = min(both.values())
        return first + sum(alone[each] * (1 - first / both[each]) for each in both), sum(alone.values())

    @property
    def size(self) -> str:
        """Of the other work's buffer."""
        return str(BandwidthShape(self.together.shape.nbytes))

    @property
    def kind(self) -> tuple[str, str]:
        return self.together.shape.product, self.together.problem.other


def pairs_of(rows: Iterable[Measurement]) -> list[Pair]:
    """The pairs of which all rows have a figure."""
    found = group_pairs(((replace(row.problem, timed=PRODUCTS, alone=True), row.shape), row) for row in rows if row.ok)
    by_row = ({(row.problem.timed, row.problem.alone): row for row in same} for same in found.values())
    return [Pair(each) for each in by_row if len(each) == 4]


def kept_line(pairs: Sequence[Pair]) -> str:
    """What both works keep, from the least to the most of all pairs."""
    shares = {timed: sorted(pair.kept(timed) for pair in pairs) for timed in (PRODUCTS, OTHER)}
    lowest, highest = ({timed: percent(same[end]) for timed, same in shares.items()} for end in (0, -1))
    ranges = {each: " to ".join(dict.fromkeys((lowest[each], highest[each]))) for each in shares}
    return f"while both run, matmul keeps {ranges[PRODUCTS]} % of its rate and other work {ranges[OTHER]} %"


def step_lines(pairs: Sequence[Pair], flop: float, nbytes: float) -> Iterator[str]:
    """By other work, the shortest step with its setting, and the shortest without overlap."""
    for other, same in group_pairs((pair.kind[1], pair) for pair in pairs).items():
        best = min(same, key=lambda pair: pair.step_seconds(flop, nbytes)[0])
        seconds, apart = best.step_seconds(flop, nbytes)[0], min(pair.step_seconds(flop, nbytes)[1] for pair in same)
        doubt, blocks = percent(max(map(best.half_width, (PRODUCTS, OTHER)))), best.together.problem.blocks
        yield (
            f"a step of {flop:.4g} FLOP and {nbytes:.4g} bytes of {other}: {significant(seconds * 1e3)} ms "
            f"(+-{doubt} %) with overlap at best, as {best.together.shape}"
            f"{f' with {blocks} blocks' if blocks else ''}; {significant(apart * 1e3)} ms without overlap"
        )


def _columns() -> Iterator[Column[Pair]]:
    def rate(timed: str, alone: bool, factor: float) -> Callable[[Pair], float]:
        return lambda pair: pair.rows[timed, alone].best_rate * factor

    yield Column("product", "matmul", lambda pair: pair.kind[0], left=True)
    yield Column("other", "with", lambda pair: pair.kind[1], left=True)
    yield Column("size", "size", lambda pair: pair.size, left=True)
    yield Column("blocks", "blocks", lambda pair: pair.together.problem.blocks or None)
    for timed, unit, factor in ((PRODUCTS, "TFLOPS", 1.0), (OTHER, "GB/s", 1e3)):
        yield Column(rate_name(f"{timed}_alone", unit), f"{unit} alone", rate(timed, True, factor), significant, 1)
        yield Column(rate_name(f"{timed}_together", unit), "together", rate(timed, False, factor), significant, 2)
        yield Column(f"{timed}_kept", "kept %", partial(Pair.kept, timed=timed), percent)
        yield Column(f"{timed}_kept_half_width", "+-%", partial(Pair.half_width, timed=timed), percent, 3)


def overlap_document(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    top: int | None = None,
    step: tuple[float, float] | None = None,
) -> Document:
    """``step``: FLOP and bytes of a step to be made of the pairs."""
    pairs = pairs_of(rows)
    return Document(
        f"products beside other work on {header['device']['name']}",
        [
            Lines(
                [
                    f"products beside other work on {machine_line(header)}",
                    work_line(row.work for row in rows if not row.problem.alone),
                ]
            ),
            Table(list(_columns()), pairs, "rates alone, and while both run", "pairs", top=top),
            Lines(failure_lines(rows)),
            Answer(
                [
                    *(step_lines(pairs, *step) if step else ()),
                    *([kept_line(pairs)] if pairs else []),
                    end_line(summary),
                ]
            ),
        ],
        {"header": header, "summary": summary},
    )


def overlap_chart(rows: Sequence[Measurement], header: Mapping[str, Any]) -> RangeChart:
    """What both works of each pair keep of their rates. Raises UsageError if no pair has figures."""
    pairs = pairs_of(rows)
    if not pairs:
        raise UsageError("nothing to draw: no pair has figures of both works")

    def place(pair: Pair) -> tuple[Any, ...]:
        return *pair.kind, pair.together.shape.nbytes, pair.together.problem.blocks

    return RangeChart(
        kept_line(pairs).capitalize(),
        machine(header),
        "% of the rate alone",
        tuple(row for pair in sorted(pairs, key=place) for row in _chart_rows(pair)),
        is_bars=True,
        notes=("lines: 95 % intervals", *failures(rows, {row.kernel for row in rows})),
    )


def _chart_rows(pair: Pair) -> Iterator[RangeRow]:
    blocks = f", {pair.together.problem.blocks} blocks" if pair.together.problem.blocks else ""
    group = f"{pair.kind[0]} with {pair.kind[1]} {pair.size}"
    for timed, name, style in ((PRODUCTS, "matmul", "matmul"), (OTHER, pair.kind[1], "other work")):
        kept, half_width = 100 * pair.kept(timed), 100 * pair.kept(timed) * pair.half_width(timed)
        point = RangePoint(kept, kept - half_width, kept + half_width)
        yield RangeRow(group, f"{name}{blocks}", (point,), style_name=style)
