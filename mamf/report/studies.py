"""Report and draw two studies of a matmul.

``mamf explain`` shows why a matmul does not reach the rate of the datasheet. A waterfall chart leads from this rate
down to the sustained rate, with a cause for each loss. ``mamf overlap`` shows how much a matmul and other work slow
each other down if they run at the same time, and how short a training step with both can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.measurement import TERA, Measurement, group_pairs
from mamf.operations.bandwidth.operation import BandwidthShape
from mamf.operations.overlap import MATMUL_WORK, OTHER_WORK
from mamf.peaks import find_datasheet_rate
from mamf.plans import BURST, SUSTAINED
from mamf.plausibility import compute_theoretical_flops, find_flop_per_cycle
from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow, StackedBar, StackedChart, StackedPanel
from mamf.report.charts.logs import describe_machine_briefly, describe_row_failures
from mamf.report.document import (
    MAX_KNOWN_HALF_WIDTH,
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    describe_counted_work,
    describe_end,
    describe_machine,
    format_four_digits,
    format_half_width,
    format_percent,
    make_interval_columns,
    make_rate_key,
    make_sensor_columns,
)
from mamf.report.rows import describe_failures
from mamf.statistics import Interval

NORMAL_DATA, ZERO_DATA = "normal", "zeros"
#: Causes that the waterfall states if random operands ("real data") were not measurably slower than zeros.
NO_LOSS_CAUSE = "real data made the kernel no slower, within the noise"
NOISE_CAUSE = "measurements are too noisy to tell how much slower real data make the kernel"
#: Reports say that a device is at its power limit if its power is at least this share of the limit.
_MIN_POWER_LIMIT_SHARE = 0.95


@dataclass(frozen=True)
class WaterfallStep:
    """A step of the waterfall from the datasheet down to the sustained rate.

    - ``tflops``: the rate at this step, None if it is unknown.
    - ``cause``: what lowered the rate, or why it is unknown.
    - ``row``: the measured row, None for a computed rate.
    - ``previous_tflops``: TFLOPS of the last known step above this one.
    """

    name: str
    tflops: float | None
    cause: str
    row: Measurement | None = None
    previous_tflops: float | None = None

    @property
    def change_share(self) -> float | None:
        """The change of the rate since the last known step above, as a share of the rate of that step."""
        return self.tflops / self.previous_tflops - 1 if self.tflops is not None and self.previous_tflops else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % repeat interval of a measured step in TFLOPS; None for a computed or failed step."""
        return None if self.row is None or not self.row.ok else self.row.rate_interval


def make_waterfall_steps(rows: Sequence[Measurement], info: DeviceInfo) -> list[WaterfallStep]:
    """Return the steps from the peak of the datasheet down to the sustained rate. ``rows``: at least one row, all of
    the same matmul, on random numbers ("normal"), zeros and other data.
    """
    normal, zeros = find_row_on_data(rows, NORMAL_DATA, BURST), find_row_on_data(rows, ZERO_DATA, BURST)
    sustained = find_row_on_data(rows, NORMAL_DATA, SUSTAINED)
    dtype = rows[0].problem.dtype
    steps = [*_make_datasheet_steps(info, dtype, normal or zeros)]
    if _get_true_clock(normal):
        steps += [
            _make_true_clock_step("units at the true clock, zeros", zeros, info, "the clock when data cost no energy"),
            _make_true_clock_step(
                "units at the true clock, normal data", normal, info, _describe_data_cost(zeros, normal)
            ),
            _make_measured_step(
                "burst, normal data", normal, _describe_cycles_used(normal) + _describe_timer_accuracy(normal)
            ),
            _make_true_clock_step(
                "units at the true clock, sustained", sustained, info, _describe_power_cost(sustained, info)
            ),
            _make_measured_step("sustained, normal data", sustained, _describe_cycles_used(sustained)),
        ]
    else:
        steps += [
            _make_measured_step(
                "burst, zeros", zeros, "the kernel's rate when data cost no energy" + _describe_timer_accuracy(zeros)
            ),
            _make_measured_step("burst, normal data", normal, _describe_data_cost(zeros, normal)),
            _make_measured_step("sustained, normal data", sustained, _describe_power_cost(sustained, info)),
        ]
    known_rates: list[float | None] = [None]
    for step in steps:
        known_rates.append(known_rates[-1] if step.tflops is None else step.tflops)
    return [replace(step, previous_tflops=before) for step, before in zip(steps, known_rates, strict=False)]


def rank_burst_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the burst rows that have a figure, on all kinds of data, fastest first."""
    return sorted((row for row in rows if row.regime == BURST and row.ok), key=lambda row: -row.best_rate)


def find_row_on_data(rows: Iterable[Measurement], data: str, regime: str) -> Measurement | None:
    return next((row for row in rows if (row.problem.data, row.regime) == (data, regime)), None)


def _make_datasheet_steps(info: DeviceInfo, dtype: str, row: Measurement | None) -> Iterator[WaterfallStep]:
    """Yield the peak of the datasheet, and the rate of all compute units at the requested clock of ``row``."""
    peak = find_datasheet_rate(info.name, dtype, info.compute_units)
    if peak is None:
        yield WaterfallStep("datasheet", None, f"no datasheet figure of {info.name} is listed for {dtype}")
    else:
        clock = f", at {peak.clock_hz / 1e6:.0f} MHz" if peak.clock_hz else ""
        yield WaterfallStep("datasheet", peak.rate, f"dense {peak.dtype} of {peak.device_label}{clock}")
    name, clock_hz = "units at the requested clock", row.conditions.clock_hz if row is not None else None
    rate = compute_theoretical_flops(info, dtype, clock_hz)
    if rate is None or not clock_hz:
        is_known = find_flop_per_cycle(info, dtype) and info.compute_units
        missing = "no sensor reads the clock" if is_known else "the FLOP per cycle of the compute units are unknown"
        yield WaterfallStep(name, None, missing)
        return
    per_cycle = find_flop_per_cycle(info, dtype)
    calculation = (
        f"{info.compute_units} units x {per_cycle:.0f} FLOP x {clock_hz / 1e6:.0f} MHz that the driver requests"
    )
    is_above = peak is not None and peak.clock_hz and clock_hz > peak.clock_hz
    yield WaterfallStep(name, rate / TERA, calculation + (", more than the datasheet's clock" if is_above else ""))


def _make_true_clock_step(name: str, row: Measurement | None, info: DeviceInfo, cause: str) -> WaterfallStep:
    """Make the step with the rate that all compute units reach at the true clock of ``row`` if they use every cycle."""
    clock_hz = _get_true_clock(row)
    if row is None or not clock_hz:
        return WaterfallStep(name, None, "the true clock was not measured")
    rate = compute_theoretical_flops(info, row.problem.dtype, clock_hz)
    return WaterfallStep(name, rate and rate / TERA, f"{clock_hz / 1e6:.0f} MHz" + (f": {cause}" if cause else ""))


def _get_true_clock(row: Measurement | None) -> float | None:
    return row.conditions.true_clock_hz if row is not None and row.ok else None


def _describe_cycles_used(row: Measurement | None) -> str:
    used = row.conditions.used_cycle_share if row is not None else None
    return (
        f"the kernel uses {format_percent(used)} % of the units' cycles" if used else "the true clock was not measured"
    )


def _make_measured_step(name: str, row: Measurement | None, cause: str) -> WaterfallStep:
    if row is None:
        return WaterfallStep(name, None, "not measured")
    if not row.ok:
        return WaterfallStep(name, None, f"{row.status}: {row.reason}", row)
    return WaterfallStep(name, row.best_rate, cause, row)


def _describe_timer_accuracy(row: Measurement | None) -> str:
    """Return a clause that states the error of the timer, for the cause of a step; empty if the error is unknown."""
    return (
        f"; timer error up to {100 * row.relative_timing_error:.1f} %"
        if row is not None and row.ok and row.relative_timing_error
        else ""
    )


def _describe_data_cost(zeros: Measurement | None, normal: Measurement | None) -> str:
    """Explain why random operands make the kernel slower than zeros. If the intervals of the two rates overlap, say
    that the difference is not significant. Return an empty string if a rate is missing.
    """
    if zeros is None or normal is None or not zeros.ok or not normal.ok:
        return ""
    if zeros.rate_interval.overlaps(normal.rate_interval):
        return NOISE_CAUSE if not (zeros.interval.is_known and normal.interval.is_known) else NO_LOSS_CAUSE
    if normal.best_rate > zeros.best_rate:
        return "the kernel was faster on real data than on zeros, so the device was not at rest: measure again"
    return "real data cost energy, which lowers the clock"


def _describe_power_cost(row: Measurement | None, info: DeviceInfo) -> str:
    """Describe power, energy, clock and throttling of a sustained row, to explain why it is slower than a burst row."""
    if row is None or not row.ok:
        return ""
    conditions, limit = row.conditions, info.power_limit_watts
    parts = [*conditions.throttle_reasons]
    if conditions.watts is not None:
        is_at_limit = limit is not None and conditions.watts >= _MIN_POWER_LIMIT_SHARE * limit
        of_limit = f" of {limit:.0f}" if limit else ""
        parts.insert(0, f"{'power limit: ' if is_at_limit else ''}{conditions.watts:.0f}{of_limit} W")
        parts.append(f"{conditions.watts / row.best_rate:.3f} J/TFLOP")
    if conditions.clock_hz:
        parts.append(f"{conditions.clock_hz / 1e6:.0f} MHz")
    return ", ".join(parts) or "no sensor of this device reads power or clock"


def make_explanation_document(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], top_lines: Sequence[str], end_lines: Sequence[str] = ()
) -> Document:
    """Return the report of a waterfall, with lines above and below its tables. CSV contains the steps."""
    normal, datasheet = find_row_on_data(rows, NORMAL_DATA, BURST), steps[0].tflops
    step_columns: list[Column[WaterfallStep]] = [
        Column("step", "step", lambda step: step.name, is_left_aligned=True),
        Column("rate_tflops", "TFLOPS", lambda step: step.tflops, format_four_digits),
        Column("change", "change", lambda step: step.change_share, format_change),
        Column(
            "share_of_datasheet",
            "% of datasheet",
            lambda step: step.tflops / datasheet if step.tflops is not None and datasheet else None,
            format_percent,
            drop_priority=1,
        ),
        *make_interval_columns(lambda step: step.interval, "rate_{}_tflops"),
        *make_sensor_columns(lambda step: step.row and step.row.conditions),
        Column("cause", "", lambda step: step.cause),
    ]
    data_columns: list[Column[Measurement]] = [
        Column("data", "data", lambda row: row.problem.data, is_left_aligned=True),
        Column("rate_tflops", "TFLOPS", lambda row: row.best_rate, format_four_digits),
        Column(
            "change_to_normal",
            "to normal",
            lambda row: row.best_rate / normal.best_rate - 1 if normal is not None and normal.ok else None,
            format_change,
        ),
        *make_sensor_columns(lambda row: row.conditions),
    ]
    blocks: list[Block] = [
        Lines(top_lines),
        Table(
            step_columns, steps, key="steps", get_remarks=lambda step: [step.cause], get_label=lambda step: step.name
        ),
        Table(data_columns, rank_burst_rows(rows), key="burst_by_data"),
        Lines(end_lines),
        Answer(describe_waterfall_result(steps)),
    ]
    return Document("Where the FLOPS went", blocks)


def format_change(change: float) -> str:
    return f"{100 * change:+.1f} %"


def describe_waterfall_result(steps: Sequence[WaterfallStep]) -> list[str]:
    """Say which share of the datasheet is left at the last known step, and which step loses most. Return an empty list
    if no step was measured successfully.
    """
    known = [(step.name, step.tflops) for step in steps if step.tflops is not None]
    if not known:
        return []
    (last, rate), datasheet = known[-1], steps[0].tflops
    share = f", {format_percent(rate / datasheet)} % of the datasheet" if datasheet else ""
    losses = {
        step.name: step.change_share or 0.0 for step in steps if not step.cause.endswith((NO_LOSS_CAUSE, NOISE_CAUSE))
    }
    largest = min(losses, key=losses.__getitem__, default="")
    loss = f"; the largest loss: {largest}, {format_change(losses[largest])}" if largest and losses[largest] < 0 else ""
    return [f"{last}: {format_four_digits(rate)} TFLOPS{share}{loss}"]


# -- chart of the waterfall, and the study of overlap ------------------------------------------------------------------

_LOST_PART_NAME = "lost since the step before"


def make_waterfall_chart(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], header: Mapping[str, Any]
) -> StackedChart:
    """Draw a bar for each step that has a rate, and for the burst rate on each kind of data. Notes list the causes of
    all steps. Raises UsageError if no step has a rate.
    """
    bars = [_make_step_bar(step) for step in steps if step.tflops is not None]
    if not bars:
        raise UsageError("there is nothing to draw, because no step was measured successfully: measure again")
    others = [
        StackedBar(
            row.problem.data,
            (("on other operands", row.best_rate),),
            interval=(row.rate_interval.low, row.rate_interval.high),
        )
        for row in rank_burst_rows(rows)
    ]
    panels = [StackedPanel("", tuple(bars)), StackedPanel("burst, by values of the operands", tuple(others))]
    return StackedChart(
        f"Where the FLOPS went: {rows[0].problem.dtype}, {rows[0].shape} by {rows[0].kernel}",
        describe_machine_briefly(header),
        "TFLOPS",
        "",
        tuple(panel for panel in panels if panel.bars),
        (_LOST_PART_NAME,),
        notes=tuple(f"{step.name}: {step.cause}" for step in steps if step.cause),
    )


def _make_step_bar(step: WaterfallStep) -> StackedBar:
    tflops, interval = step.tflops or 0.0, step.interval
    lost = max(0.0, (step.previous_tflops or 0.0) - tflops)
    parts = [("from the datasheet" if step.row is None else "measured", tflops), (_LOST_PART_NAME, lost)]
    note = "" if step.change_share is None else format_change(step.change_share)
    ends = (interval.low, interval.high) if interval else None
    return StackedBar(step.name, tuple(parts if lost else parts[:1]), note, ends)


@dataclass(frozen=True)
class OverlapPair:
    """A matmul and other work (reads or copies of a buffer), each measured alone and while both run.

    ``rows``: the four measured rows. A key is the work that a row times, and whether this work ran alone.
    """

    rows: Mapping[tuple[str, bool], Measurement]

    @property
    def matmul_row(self) -> Measurement:
        return self.rows[MATMUL_WORK, False]

    def compute_kept_rate_share(self, timed_work: str) -> float:
        """Return the rate of the work ``timed_work`` while both run, divided by its rate alone."""
        return self.rows[timed_work, False].best_rate / self.rows[timed_work, True].best_rate

    def compute_relative_half_width(self, timed_work: str) -> float:
        """Return the relative half-width of the interval of ``compute_kept_rate_share``: 0.01 means +-1 %."""
        return math.hypot(*(self.rows[timed_work, alone].relative_half_width for alone in (False, True)))

    def predict_step_seconds(self, flop: float, nbytes: float) -> tuple[float, float]:
        """Predict how many seconds a step takes with and without overlap. With overlap, the matmul and the other work
        start together. When one of them ends, the rest of the other runs alone. Without overlap, they run one after the
        other.

        - ``flop``: FLOP of the matmul in the step.
        - ``nbytes``: bytes of the buffer of the other work in the step.
        """
        amounts = {
            MATMUL_WORK: flop / self.matmul_row.flop,
            OTHER_WORK: nbytes / self.matmul_row.shape.nbytes,
        }
        alone, both = (
            {timed: amounts[timed] * self.rows[timed, alone].seconds for timed in amounts} for alone in (True, False)
        )
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


def compute_kept_rate_ranges(rows: Iterable[Measurement]) -> dict[str, str]:
    """Divide each rate while both run by the rate of the same work alone. Return the lowest and the highest percentage
    of all pairs as text, for the matmul and for the other work.
    """
    pairs, ranges = find_complete_pairs(rows), {}
    for timed, name in ((MATMUL_WORK, "matmul"), (OTHER_WORK, "other work")) if pairs else ():
        shares = [pair.compute_kept_rate_share(timed) for pair in pairs]
        ranges[name] = " to ".join(dict.fromkeys((format_percent(min(shares)), format_percent(max(shares)))))
    return ranges


def describe_kept_rate_ranges(rows: Iterable[Measurement]) -> list[str]:
    """Return a line with the percentages from ``compute_kept_rate_ranges``; no line if no pair is complete."""
    texts = [f"{name} keeps {shares} % of its rate" for name, shares in compute_kept_rate_ranges(rows).items()]
    return [f"while both run, {' and '.join(texts)}"] if texts else []


def describe_predicted_steps(pairs: Sequence[OverlapPair], flop: float, nbytes: float) -> Iterator[str]:
    """Predict the shortest step with ``flop`` and ``nbytes``. For each kind of other work, yield a line that gives the
    duration with overlap, the measured matmul from which it was predicted, and the duration without overlap.
    """
    for other, same_work in group_pairs((pair.work_names[1], pair) for pair in pairs).items():
        best = min(same_work, key=lambda pair: pair.predict_step_seconds(flop, nbytes)[0])
        with_overlap = best.predict_step_seconds(flop, nbytes)[0]
        without_overlap = min(pair.predict_step_seconds(flop, nbytes)[1] for pair in same_work)
        half_width = max(map(best.compute_relative_half_width, (MATMUL_WORK, OTHER_WORK)))
        error = f"+-{format_percent(half_width)} %" if half_width <= MAX_KNOWN_HALF_WIDTH else "interval unknown"
        advice = "" if with_overlap <= without_overlap else ": overlap does not pay here, so run one after the other"
        yield (
            f"a step of {flop:.4g} FLOP and {nbytes:.4g} bytes of {other} takes "
            f"{format_four_digits(with_overlap * 1e3)} ms ({error}) with overlap, at the rates of "
            f"{best.matmul_row.shape}{f' with {blocks} blocks' if (blocks := best.matmul_row.problem.blocks) else ''}, "
            f"and {format_four_digits(without_overlap * 1e3)} ms without overlap{advice}"
        )


def _yield_overlap_columns() -> Iterator[Column[OverlapPair]]:
    def make_rate_reader(timed_work: str, is_alone: bool, factor: float) -> Callable[[OverlapPair], float]:
        return lambda pair: pair.rows[timed_work, is_alone].best_rate * factor

    yield Column("product", "matmul", lambda pair: pair.work_names[0], is_left_aligned=True)
    yield Column("other", "with", lambda pair: pair.work_names[1], is_left_aligned=True)
    yield Column("size", "size", lambda pair: pair.buffer_size_text, is_left_aligned=True)
    yield Column("blocks", "blocks", lambda pair: pair.matmul_row.problem.blocks or None)
    # A narrow terminal hides the rates of the other work first, then those of the matmul, and the intervals last.
    for timed, unit, factor, drop_priority in ((MATMUL_WORK, "TFLOPS", 1.0, 2), (OTHER_WORK, "GB/s", 1e3, 4)):
        for alone, name, title in ((True, "alone", f"{unit} alone"), (False, "together", "together")):
            yield Column(
                *(make_rate_key(f"{timed}_{name}", unit), title, make_rate_reader(timed, alone, factor)),
                *(format_four_digits, drop_priority if alone else drop_priority + 1),
            )
        read_kept_share = partial(OverlapPair.compute_kept_rate_share, timed_work=timed)
        kept_title = "kept %" if timed == MATMUL_WORK else "other kept %"
        yield Column(f"{timed}_kept", kept_title, read_kept_share, format_percent)
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
            Table([*_yield_overlap_columns()], pairs, title, "pairs", max_shown_rows=top),
            Lines(describe_failures(rows)),
            Answer(
                [
                    *(describe_predicted_steps(pairs, *step) if step else ()),
                    *describe_kept_rate_ranges(rows),
                    describe_end(summary),
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
        notes=("lines: 95 % intervals", *describe_row_failures(rows, {row.kernel for row in rows})),
    )


def _yield_chart_rows(pair: OverlapPair) -> Iterator[RangeRow]:
    blocks = f", {pair.matmul_row.problem.blocks} blocks" if pair.matmul_row.problem.blocks else ""
    group = f"{pair.work_names[0]} with {pair.work_names[1]} {pair.buffer_size_text}"
    for timed, name, style in ((MATMUL_WORK, "matmul", "matmul"), (OTHER_WORK, pair.work_names[1], "other work")):
        kept_percent, half_width = 100 * pair.compute_kept_rate_share(timed), pair.compute_relative_half_width(timed)
        half_width *= half_width <= MAX_KNOWN_HALF_WIDTH  # draw no unknown interval
        point = RangePoint(kept_percent, kept_percent * (1 - half_width), kept_percent * (1 + half_width))
        yield RangeRow(group, f"{name}{blocks}", (point,), style_name=style)
