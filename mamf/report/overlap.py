"""Report and draw a run of ``mamf overlap``, which shows how much a matmul and other work slow each other down if they
run at the same time, and how short a training step with both can be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement, group_pairs
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.overlap import MATMUL_WORK, OTHER_WORK
from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow
from mamf.report.charts.logs import describe_machine_briefly, describe_row_failures
from mamf.report.document import (
    MAX_KNOWN_HALF_WIDTH,
    Answer,
    Column,
    Document,
    Lines,
    Table,
    describe_counted_work,
    describe_machine,
    describe_run_end,
    format_four_digits,
    format_half_width,
    format_percent,
    make_rate_key,
)
from mamf.report.rows import describe_failures


@dataclass(frozen=True)
class OverlapPair:
    """A matmul and other work (reads or copies of a buffer), each measured alone and while both run.

    ``rows``: the four measured rows. A key is the work that a row times, and whether this work ran alone.
    """

    rows: Mapping[tuple[str, bool], Measurement]

    @property
    def matmul_row(self) -> Measurement:
        return self.rows[MATMUL_WORK, False]

    def compute_share_of_rate_kept(self, timed_work: str) -> float:
        """Return the rate of the work ``timed_work`` while both run, divided by its rate alone."""
        return self.rows[timed_work, False].best_rate / self.rows[timed_work, True].best_rate

    def compute_relative_half_width(self, timed_work: str) -> float:
        """Return the relative half-width of the interval of ``compute_share_of_rate_kept``: 0.01 means +-1 %."""
        return math.hypot(*(self.rows[timed_work, alone].relative_half_width for alone in (False, True)))

    def predict_step_seconds(self, flop: float, nbytes: float, matmul_seconds: float) -> tuple[float, float]:
        """Predict how many seconds a step takes with and without overlap. With overlap, the matmul and the other work
        start together. When one of them ends, the rest of the other runs alone. Without overlap, they run one after the
        other.

        - ``flop``: FLOP of the matmul in the step.
        - ``nbytes``: bytes of the buffer of the other work in the step.
        - ``matmul_seconds``: the duration of this pair's matmul alone.
        """
        amounts = {
            MATMUL_WORK: flop / self.matmul_row.flop,
            OTHER_WORK: nbytes / self.matmul_row.shape.nbytes,
        }
        seconds_alone = {MATMUL_WORK: matmul_seconds, OTHER_WORK: self.rows[OTHER_WORK, True].seconds}
        alone = {timed: amounts[timed] * seconds_alone[timed] for timed in amounts}
        both = {timed: amounts[timed] * self.rows[timed, False].seconds for timed in amounts}
        first_end = min(both.values())
        return first_end + sum(alone[each] * (1 - first_end / both[each]) for each in both), sum(alone.values())

    @property
    def buffer_size_text(self) -> str:
        """The size of the buffer that the other work reads or copies."""
        return str(BandwidthShape(self.matmul_row.shape.nbytes))

    @property
    def work_names(self) -> tuple[str, str]:
        return self.matmul_row.shape.matmul_text, self.matmul_row.problem.other


def find_complete_pairs(rows: Iterable[Measurement]) -> list[OverlapPair]:
    """Return the pairs of a matmul and other work for which all four rows have a figure: the matmul and the other
    work, each alone and each while both run.
    """
    rows_by_pair = group_pairs(
        ((replace(row.problem, timed=MATMUL_WORK, alone=True), row.shape), row) for row in rows if row.ok
    )
    pairs = ({(row.problem.timed, row.problem.alone): row for row in group} for group in rows_by_pair.values())
    return [OverlapPair(pair) for pair in pairs if len(pair) == 4]


def format_kept_rate_ranges(rows: Iterable[Measurement]) -> dict[str, str]:
    """Divide each rate while both run by the rate of the same work alone. Return the lowest and the highest percentage
    of all pairs as text, for the matmul and for the other work.
    """
    pairs, ranges = find_complete_pairs(rows), {}
    for timed, name in ((MATMUL_WORK, "matmul"), (OTHER_WORK, "other work")) if pairs else ():
        shares = [pair.compute_share_of_rate_kept(timed) for pair in pairs]
        ranges[name] = " to ".join(dict.fromkeys((format_percent(min(shares)), format_percent(max(shares)))))
    return ranges


def describe_kept_rate_ranges(rows: Iterable[Measurement]) -> list[str]:
    """Return a line with the percentages from ``format_kept_rate_ranges``; no line if no pair is complete."""
    texts = [f"{name} keeps {shares} % of its rate" for name, shares in format_kept_rate_ranges(rows).items()]
    return [f"while both run, {' and '.join(texts)}"] if texts else []


def describe_predicted_steps(pairs: Sequence[OverlapPair], flop: float, nbytes: float) -> Iterator[str]:
    """Predict the shortest step with ``flop`` and ``nbytes``. For each kind of other work, yield a line that gives the
    duration with overlap, the measured matmul from which it was predicted, and the duration without overlap.
    """
    # All pairs with the same matmul measure the same duration of the matmul alone: take the median.
    matmul_seconds = {
        name: statistics.median(group)
        for name, group in group_pairs(
            (pair.work_names[0], pair.rows[MATMUL_WORK, True].seconds) for pair in pairs
        ).items()
    }
    for other, same_work in group_pairs((pair.work_names[1], pair) for pair in pairs).items():
        predictions = [
            (*pair.predict_step_seconds(flop, nbytes, matmul_seconds[pair.work_names[0]]), pair) for pair in same_work
        ]
        with_overlap, _, best = min(predictions, key=lambda prediction: prediction[0])
        without_overlap = min(prediction[1] for prediction in predictions)
        half_width = max(map(best.compute_relative_half_width, (MATMUL_WORK, OTHER_WORK)))
        error = f"+-{format_percent(half_width)} %" if half_width <= MAX_KNOWN_HALF_WIDTH else "interval unknown"
        verdict = (
            ": too noisy to say whether overlap pays"
            if abs(with_overlap - without_overlap) <= half_width * with_overlap
            else ": overlap does not pay here, so run one after the other"
            if with_overlap > without_overlap
            else ""
        )
        yield (
            f"a step of {flop:.4g} FLOP and {nbytes:.4g} bytes of {other} takes "
            f"{format_four_digits(with_overlap * 1e3)} ms ({error}) with overlap, at the rates of "
            f"{best.matmul_row.shape}{f' with {blocks} blocks' if (blocks := best.matmul_row.problem.blocks) else ''}, "
            f"and {format_four_digits(without_overlap * 1e3)} ms without overlap{verdict}"
        )


def _yield_overlap_columns() -> Iterator[Column[OverlapPair]]:
    def make_rate_reader(timed_work: str, is_alone: bool, factor: float) -> Callable[[OverlapPair], float]:
        return lambda pair: pair.rows[timed_work, is_alone].best_rate * factor

    yield Column("product", "matmul", lambda pair: pair.work_names[0], is_left_aligned=True)
    yield Column("other", "with", lambda pair: pair.work_names[1], is_left_aligned=True)
    yield Column("size", "size", lambda pair: pair.buffer_size_text, is_left_aligned=True)
    yield Column(  # None for work other than a collective
        "blocks",
        "blocks",
        lambda pair: pair.matmul_row.problem.blocks if pair.matmul_row.problem.ranks > 1 else None,
    )
    # A narrow terminal hides the rates of the other work first, then those of the matmul, and the intervals last.
    for timed, unit, factor, drop_priority in ((MATMUL_WORK, "TFLOPS", 1.0, 2), (OTHER_WORK, "GB/s", 1e3, 4)):
        for alone, name, title in ((True, "alone", f"{unit} alone"), (False, "together", "together")):
            yield Column(
                *(make_rate_key(f"{timed}_{name}", unit), title, make_rate_reader(timed, alone, factor)),
                *(format_four_digits, drop_priority if alone else drop_priority + 1),
            )
        yield Column(
            f"{timed}_kept",
            "kept %" if timed == MATMUL_WORK else "other kept %",
            partial(OverlapPair.compute_share_of_rate_kept, timed_work=timed),
            format_percent,
        )
        read_half_width = partial(OverlapPair.compute_relative_half_width, timed_work=timed)
        yield Column(f"{timed}_kept_half_width", "+-%", read_half_width, format_half_width, 1)


def make_overlap_document(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    top: int | None = None,
    step: tuple[float, float] | None = None,
) -> Document:
    """Return the report of an overlap study. ``step``: FLOP and bytes of a training step whose duration the report
    predicts; None for no prediction.
    """
    pairs, title = find_complete_pairs(rows), f"{header['plan']['regimes'][0]}: rates alone, and while both run"
    return Document(
        f"matmul together with other work on {header['device']['name']}",
        [
            Lines(
                [
                    f"matmul together with other work on {describe_machine(header)}",
                    describe_counted_work(row.work for row in rows if not row.problem.alone),
                ]
            ),
            Table(
                [*_yield_overlap_columns()],
                pairs,
                title,
                "pairs",
                max_shown_rows=top,
                get_remarks=lambda pair: [
                    f"the interval of the share that the {name} keeps is unknown, because this share may differ by "
                    "more than 50 % in another run"
                    for name, timed in (("matmul", MATMUL_WORK), ("other work", OTHER_WORK))
                    if pair.compute_relative_half_width(timed) > MAX_KNOWN_HALF_WIDTH
                ],
                get_label=lambda pair: f"{' with '.join(pair.work_names)} {pair.buffer_size_text}",
            ),
            Lines(describe_failures(rows)),
            Answer(
                [
                    *(describe_predicted_steps(pairs, *step) if step else ()),
                    *describe_kept_rate_ranges(rows),
                    describe_run_end(summary),
                ]
            ),
        ],
        {"header": header, "summary": summary},
    )


def make_overlap_chart(rows: Sequence[Measurement], header: Mapping[str, Any]) -> RangeChart:
    """Draw each rate while both run as a share of the rate alone. Raises UsageError if no pair has all four rates."""
    pairs = find_complete_pairs(rows)
    if not pairs:
        raise UsageError(
            "there is nothing to draw, because no pair has rates of both matmul and other work: measure again"
        )
    pairs.sort(key=lambda pair: (*pair.work_names, pair.matmul_row.shape.nbytes, pair.matmul_row.problem.blocks))
    return RangeChart(
        " ".join(describe_kept_rate_ranges(rows)).capitalize(),
        describe_machine_briefly(header),
        "% of the rate alone",
        tuple(row for pair in pairs for row in _yield_chart_rows(pair)),
        has_bars=True,
        notes=(
            "lines: 95 % intervals (a bar without a line has an unknown one)",
            *describe_row_failures(rows, {row.kernel for row in rows}),
        ),
    )


def _yield_chart_rows(pair: OverlapPair) -> Iterator[RangeRow]:
    blocks = f", {pair.matmul_row.problem.blocks} blocks" if pair.matmul_row.problem.blocks else ""
    group = f"{pair.work_names[0]} with {pair.work_names[1]} {pair.buffer_size_text}"
    for timed, name, style in ((MATMUL_WORK, "matmul", "matmul"), (OTHER_WORK, pair.work_names[1], "other work")):
        kept_percent, half_width = 100 * pair.compute_share_of_rate_kept(timed), pair.compute_relative_half_width(timed)
        half_width *= half_width <= MAX_KNOWN_HALF_WIDTH  # draw only the point if the interval is unknown
        point = RangePoint(kept_percent, kept_percent * (1 - half_width), kept_percent * (1 + half_width))
        yield RangeRow(group, f"{name}{blocks}", (point,), style_name=style)
