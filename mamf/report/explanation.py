"""Report and draw a run of ``mamf explain``, which shows why a matmul does not reach the rate of the datasheet.

A waterfall chart leads from this rate down to the sustained rate, with a cause for each loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import DEFAULT_COMPARISON_TOLERANCE, UsageError
from mamf.measurement import TERA, Measurement
from mamf.peaks import find_datasheet_rate
from mamf.plans import BURST, SUSTAINED
from mamf.plausibility import compute_theoretical_flops, find_flop_per_cycle
from mamf.report.charts.bars import StackedBar, StackedChart, StackedPanel
from mamf.report.charts.logs import describe_machine_briefly
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    format_four_digits,
    format_percent,
    make_interval_columns,
    make_sensor_columns,
)
from mamf.statistics import Interval

NORMAL_DATA, ZERO_DATA = "normal", "zeros"
#: Causes that the waterfall states if random operands ("real data") were not measurably slower than zeros.
NO_LOSS_CAUSE = "real data made the kernel no slower, within the noise"
NOISE_CAUSE = "measurements are too noisy to tell how real data change the rate: measure again"
LOAD_NOISE_CAUSE = "measurements are too noisy to tell how load changes the rate: measure again"
#: The values of the operands never change the rate of a kernel by more than this factor, so a larger ratio is noise.
_MAX_DATA_EFFECT_FACTOR = 2.0
#: Reports say that a device is at its power limit if its power is at least this share of the limit.
_MIN_POWER_LIMIT_SHARE = 0.95


@dataclass(frozen=True)
class WaterfallStep:
    """A step of the waterfall from the datasheet down to the sustained rate.

    - ``tflops``: the rate at this step, None if it is unknown.
    - ``cause``: what lowered the rate, or why it is unknown.
    - ``row``: the measured row, None for a computed rate.
    - ``previous_tflops``: TFLOPS of the last known step above this one; None if there is no such step, or if one of the
      two was measured with an unknown interval.
    """

    name: str
    tflops: float | None
    cause: str
    row: Measurement | None = None
    previous_tflops: float | None = None

    @property
    def relative_change(self) -> float | None:
        """The change of the rate since the last known step above, as a share of the rate of that step; None if it is
        unknown.
        """
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
    steps = [*_make_datasheet_steps(info, rows[0].problem.dtype, normal or zeros)]
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
                "units at the true clock, sustained", sustained, info, _explain_sustained_loss(sustained, normal, info)
            ),
            _make_measured_step("sustained, normal data", sustained, _describe_cycles_used(sustained)),
        ]
    else:
        steps += [
            _make_measured_step(
                "burst, zeros", zeros, "the kernel's rate when data cost no energy" + _describe_timer_accuracy(zeros)
            ),
            _make_measured_step("burst, normal data", normal, _describe_data_cost(zeros, normal)),
            _make_measured_step("sustained, normal data", sustained, _explain_sustained_loss(sustained, normal, info)),
        ]
    last_known, linked_steps = WaterfallStep("", None, ""), list[WaterfallStep]()
    for step in steps:
        is_uncertain = _has_unknown_interval(step.row) or _has_unknown_interval(last_known.row)
        linked_steps.append(replace(step, previous_tflops=None if is_uncertain else last_known.tflops))
        last_known = last_known if step.tflops is None else step
    return linked_steps


def _has_unknown_interval(row: Measurement | None) -> bool:
    return row is not None and row.ok and not row.interval.is_known


def rank_burst_rows(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the burst rows that have a figure, on all kinds of data, fastest first."""
    return sorted((row for row in rows if row.regime == BURST and row.ok), key=lambda row: -row.best_rate)


def has_noisy_rows(rows: Sequence[Measurement]) -> bool:
    """Return whether the rows are too noisy to compare: an interval is unknown, or the burst rates on different data
    differ too much.
    """
    rates = [row.best_rate for row in rank_burst_rows(rows)]
    return any(map(_has_unknown_interval, rows)) or bool(rates and rates[0] > _MAX_DATA_EFFECT_FACTOR * rates[-1])


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
    that the difference is not significant, or that it is too noisy to tell. Return an empty string if a rate is
    missing.
    """
    if zeros is None or normal is None or not zeros.ok or not normal.ok:
        return ""
    overlaps = zeros.rate_interval.overlaps(normal.rate_interval)
    differs = abs(normal.best_rate / zeros.best_rate - 1) > DEFAULT_COMPARISON_TOLERANCE
    if has_noisy_rows([zeros, normal]) or (overlaps and differs):
        return NOISE_CAUSE
    if overlaps:
        return NO_LOSS_CAUSE
    if normal.best_rate > zeros.best_rate:
        return "the kernel was faster on real data than on zeros, so the device was not at rest: measure again"
    return "real data cost energy, which lowers the clock"


def _explain_sustained_loss(row: Measurement | None, burst_row: Measurement | None, info: DeviceInfo) -> str:
    """Describe power, energy, clock and throttling of a sustained row, to explain why it is slower than a burst row. If
    the intervals of the two rates overlap, say that the difference is too noisy to tell.
    """
    if row is None or not row.ok:
        return ""
    if burst_row is not None and burst_row.ok and row.rate_interval.overlaps(burst_row.rate_interval):
        return LOAD_NOISE_CAUSE
    conditions, limit = row.conditions, info.power_limit_watts
    parts = [*conditions.throttle_reasons]
    if conditions.watts is not None:
        is_at_limit = limit is not None and conditions.watts >= _MIN_POWER_LIMIT_SHARE * limit
        parts.insert(
            0,
            f"{'power limit: ' if is_at_limit else ''}{conditions.watts:.0f}{f' of {limit:.0f}' if limit else ''} W",
        )
        parts.append(f"{conditions.watts / row.best_rate:.3f} J/TFLOP")
    if conditions.clock_hz:
        parts.append(f"{conditions.clock_hz / 1e6:.0f} MHz requested")
    return ", ".join(parts) or "no sensor of this device reads power or clock"


def make_explanation_document(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], top_lines: Sequence[str], end_lines: Sequence[str] = ()
) -> Document:
    """Return the report of a waterfall, with lines above and below its tables. CSV contains the steps."""
    normal, datasheet = find_row_on_data(rows, NORMAL_DATA, BURST), steps[0].tflops
    step_columns: list[Column[WaterfallStep]] = [
        Column("step", "step", lambda step: step.name, is_left_aligned=True),
        Column("rate_tflops", "TFLOPS", lambda step: step.tflops, format_four_digits),
        Column("change", "change", lambda step: step.relative_change, format_change),
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
            lambda row: (
                row.best_rate / normal.best_rate - 1
                if normal is not None and normal.ok and not any(map(_has_unknown_interval, (row, normal)))
                else None
            ),
            format_change,
        ),
        *make_sensor_columns(lambda row: row.conditions),
    ]
    noise = "the machine was too noisy to compare these rates: measure again while no other program uses it"
    noise_lines = [noise] if has_noisy_rows(rows) else []
    blocks: list[Block] = [
        Lines(top_lines),
        Table(
            step_columns, steps, key="steps", get_remarks=lambda step: [step.cause], get_label=lambda step: step.name
        ),
        Table(data_columns, rank_burst_rows(rows), key="burst_by_data"),
        Lines(end_lines),
        Answer([*describe_waterfall_result(steps), *noise_lines]),
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
        step.name: step.relative_change or 0.0
        for step in steps
        if not step.cause.endswith((NO_LOSS_CAUSE, NOISE_CAUSE, LOAD_NOISE_CAUSE))
    }
    largest = min(losses, key=losses.__getitem__, default="")
    loss = f"; the largest loss: {largest}, {format_change(losses[largest])}" if largest and losses[largest] < 0 else ""
    return [f"{last}: {format_four_digits(rate)} TFLOPS{share}{loss}"]


# -- chart of the waterfall --------------------------------------------------------------------------------------------

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
            (("measured", row.best_rate),),
            interval=(row.rate_interval.low, row.rate_interval.high) if row.rate_interval.is_known else None,
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
    parts = [("computed" if step.row is None else "measured", tflops), (_LOST_PART_NAME, lost)]
    note = "" if step.relative_change is None else format_change(step.relative_change)
    ends = (interval.low, interval.high) if interval and interval.is_known else None
    return StackedBar(step.name, tuple(parts if lost else parts[:1]), note, ends)
