"""Where the datasheet's FLOPS of a product went: a waterfall from the datasheet to the sustained rate, as a document
and as a chart. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mamf.backend import DeviceInfo
from mamf.errors import UsageError
from mamf.measurement import TERA, Measurement
from mamf.peaks import find_peak
from mamf.plans import BURST, SUSTAINED
from mamf.plausibility import flop_per_cycle, rate_of_units
from mamf.report.charts.bars import Stack, StackedChart, StackedPanel
from mamf.report.charts.logs import machine
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    interval_columns,
    percent,
    sensor_columns,
    significant,
)
from mamf.statistics import Interval

NORMAL, ZEROS = "normal", "zeros"
NO_COST = "no significant cost of real data"
TOO_NOISY = "too noisy to tell what real data cost"
#: From this share of the power limit on, a device counts as being at its limit.
_AT_LIMIT = 0.95


@dataclass(frozen=True)
class WaterfallStep:
    """One step of the waterfall. ``tflops``: None if unknown, with the reason in ``cause``. ``row``: the measured row,
    if any. ``before``: TFLOPS of the last step that is known.
    """

    name: str
    tflops: float | None
    cause: str
    row: Measurement | None = None
    before: float | None = None

    @property
    def change(self) -> float | None:
        """The change from the step before, as a share of it."""
        return self.tflops / self.before - 1 if self.tflops is not None and self.before else None

    @property
    def interval(self) -> Interval | None:
        """The 95 % repeat interval in TFLOPS."""
        return None if self.row is None or not self.row.ok else self.row.rate_interval


def waterfall_steps(rows: Sequence[Measurement], info: DeviceInfo) -> list[WaterfallStep]:
    """The waterfall down from the datasheet's peak. ``rows``: at least one of one product, on several kinds of data."""
    normal, zeros = find_row(rows, NORMAL, BURST), find_row(rows, ZEROS, BURST)
    last = find_row(rows, NORMAL, SUSTAINED)
    dtype = rows[0].problem.dtype
    steps = [*_from_datasheet(info, dtype, normal or zeros)]
    if _true_clock(normal):
        steps += [
            _at_true_clock("units at the true clock, zeros", zeros, info, "the clock when data cost no energy"),
            _at_true_clock("units at the true clock, normal data", normal, info, _cost_of_data(zeros, normal)),
            _measured("burst, normal data", normal, _unused_cycles(normal) + _timer(normal)),
            _at_true_clock("units at the true clock, sustained", last, info, _cost_of_power(last, info)),
            _measured("sustained, normal data", last, _unused_cycles(last)),
        ]
    else:
        steps += [
            _measured("burst, zeros", zeros, "the kernel's rate when data cost no energy" + _timer(zeros)),
            _measured("burst, normal data", normal, _cost_of_data(zeros, normal)),
            _measured("sustained, normal data", last, _cost_of_power(last, info)),
        ]
    known: list[float | None] = [None]
    for step in steps:
        known.append(known[-1] if step.tflops is None else step.tflops)
    return [replace(step, before=before) for step, before in zip(steps, known, strict=False)]


def rank_bursts(rows: Iterable[Measurement]) -> list[Measurement]:
    """The valid burst rows on all kinds of data, fastest first."""
    return sorted((row for row in rows if row.regime == BURST and row.ok), key=lambda row: -row.best_rate)


def find_row(rows: Iterable[Measurement], data: str, regime: str) -> Measurement | None:
    return next((row for row in rows if (row.problem.data, row.regime) == (data, regime)), None)


def _from_datasheet(info: DeviceInfo, dtype: str, row: Measurement | None) -> Iterator[WaterfallStep]:
    """The datasheet's peak, and the rate of all compute units at the clock that the driver requests."""
    peak = find_peak(info.name, dtype, info.compute_units)
    if peak is None:
        yield WaterfallStep("datasheet", None, f"no datasheet figure of {info.name} is listed for {dtype}")
    else:
        clock = f", at {peak.clock_hz / 1e6:.0f} MHz" if peak.clock_hz else ""
        yield WaterfallStep("datasheet", peak.rate, f"dense {peak.dtype} of {peak.origin}{clock}")
    name, clock_hz = "units at the requested clock", row.conditions.clock_hz if row is not None else None
    rate = rate_of_units(info, dtype, clock_hz)
    if rate is None or not clock_hz:
        is_known = flop_per_cycle(info, dtype) and info.compute_units
        missing = "no sensor reads the clock" if is_known else "their FLOP per cycle are unknown"
        yield WaterfallStep(name, None, missing)
        return
    per_cycle = flop_per_cycle(info, dtype)
    product = f"{info.compute_units} units x {per_cycle:.0f} FLOP x {clock_hz / 1e6:.0f} MHz that the driver requests"
    is_above = peak is not None and peak.clock_hz and clock_hz > peak.clock_hz
    yield WaterfallStep(name, rate / TERA, product + (", more than the datasheet's clock" if is_above else ""))


def _at_true_clock(name: str, row: Measurement | None, info: DeviceInfo, cause: str) -> WaterfallStep:
    """The rate of all compute units at the clock that they had during a row."""
    clock_hz = _true_clock(row)
    if row is None or not clock_hz:
        return WaterfallStep(name, None, "the true clock was not measured")
    rate = rate_of_units(info, row.problem.dtype, clock_hz)
    parts = [f"{clock_hz / 1e6:.0f} MHz", cause]
    return WaterfallStep(name, rate and rate / TERA, ": ".join(part for part in parts if part))


def _true_clock(row: Measurement | None) -> float | None:
    return row.conditions.true_clock_hz if row is not None and row.ok else None


def _unused_cycles(row: Measurement | None) -> str:
    used = row.conditions.cycles_used if row is not None else None
    return f"the kernel uses {percent(used)} % of the units' cycles" if used else "the true clock was not measured"


def _measured(name: str, row: Measurement | None, cause: str) -> WaterfallStep:
    if row is None:
        return WaterfallStep(name, None, "not measured")
    if not row.ok:
        return WaterfallStep(name, None, f"{row.status}: {row.reason}", row)
    return WaterfallStep(name, row.best_rate, cause, row)


def _timer(row: Measurement | None) -> str:
    """The accuracy of a measured step, which is compared with figures from the datasheet."""
    return f"; accurate to {100 * row.accuracy:.1f} % (timer)" if row is not None and row.ok and row.accuracy else ""


def _cost_of_data(zeros: Measurement | None, normal: Measurement | None) -> str:
    """What real data cost, which is said only if the intervals of both rates lie apart."""
    if zeros is None or normal is None or not zeros.ok or not normal.ok:
        return ""
    if zeros.rate_interval.overlaps(normal.rate_interval):
        return TOO_NOISY if not (zeros.interval.is_known and normal.interval.is_known) else NO_COST
    if normal.best_rate > zeros.best_rate:
        return "faster than on zeros: the device was not at rest (measure again)"
    return "real data cost energy, and the clock is lower for it"


def _cost_of_power(row: Measurement | None, info: DeviceInfo) -> str:
    """The sensor readings of a settled device, in words."""
    if row is None or not row.ok:
        return ""
    seen, limit = row.conditions, info.power_limit_watts
    parts = [*seen.throttle_reasons]
    if seen.watts is not None:
        is_at_limit = limit is not None and seen.watts >= _AT_LIMIT * limit
        of = f" of {limit:.0f}" if limit else ""
        parts.insert(0, f"{'power limit: ' if is_at_limit else ''}{seen.watts:.0f}{of} W")
        parts.append(f"{seen.watts / row.best_rate:.3f} J/TFLOP")
    if seen.clock_hz:
        parts.append(f"{seen.clock_hz / 1e6:.0f} MHz")
    return ", ".join(parts) or "no sensor reads power or clock"


def explanation_document(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], head: Sequence[str], foot: Sequence[str] = ()
) -> Document:
    """``head`` and ``foot``: lines around the tables. Csv holds the steps."""
    normal, datasheet = find_row(rows, NORMAL, BURST), steps[0].tflops

    def share(step: WaterfallStep) -> float | None:
        return step.tflops / datasheet if step.tflops is not None and datasheet else None

    def change_to_normal(row: Measurement) -> float | None:
        return row.best_rate / normal.best_rate - 1 if normal is not None and normal.ok else None

    step_columns: list[Column[WaterfallStep]] = [
        Column("step", "step", lambda step: step.name, left=True),
        Column("rate_tflops", "TFLOPS", lambda step: step.tflops, significant),
        Column("change", "change", lambda step: step.change, change_cell),
        Column("share_of_datasheet", "% of datasheet", share, percent, importance=1),
        *interval_columns(lambda step: step.interval, "rate_{}_tflops"),
        *sensor_columns(lambda step: step.row and step.row.conditions),
        Column("cause", "", lambda step: step.cause),
    ]
    data_columns: list[Column[Measurement]] = [
        Column("data", "data", lambda row: row.problem.data, left=True),
        Column("rate_tflops", "TFLOPS", lambda row: row.best_rate, significant),
        Column("change_to_normal", "to normal", change_to_normal, change_cell),
        *sensor_columns(lambda row: row.conditions),
    ]
    blocks: list[Block] = [
        Lines(head),
        Table(step_columns, steps, key="steps", remarks=lambda step: [step.cause], label=lambda step: step.name),
        Table(data_columns, rank_bursts(rows), key="burst_by_data"),
        Lines(foot),
        Answer(conclusion(steps)),
    ]
    return Document("Where the FLOPS went", blocks)


def change_cell(change: float) -> str:
    return f"{100 * change:+.1f} %"


def conclusion(steps: Sequence[WaterfallStep]) -> list[str]:
    """What is left of the datasheet's peak, and the step that costs most."""
    known = [(step.name, step.tflops) for step in steps if step.tflops is not None]
    if not known:
        return []
    (last, rate), datasheet = known[-1], steps[0].tflops
    share = f", {percent(rate / datasheet)} % of the datasheet" if datasheet else ""
    losses = {step.name: step.change for step in steps if step.change and not step.cause.endswith((NO_COST, TOO_NOISY))}
    largest = min(losses, key=losses.__getitem__, default="")
    loss = f"; the largest loss: {largest}, {change_cell(losses[largest])}" if largest and losses[largest] < 0 else ""
    return [f"{last}: {significant(rate)} TFLOPS{share}{loss}"]


# -- as a chart --------------------------------------------------------------------------------------------------------

_LOST = "lost since the step before"


def waterfall_chart(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], header: Mapping[str, Any]
) -> StackedChart:
    """A bar for each step that has a figure, and for the same product on other operands; other steps are listed in
    notes. Raises UsageError if no step has a figure.
    """
    bars = [_step_bar(step) for step in steps if step.tflops is not None]
    if not bars:
        raise UsageError("nothing to draw: no step has a figure")
    others = [_measured_bar(row.problem.data, "on other operands", row) for row in rank_bursts(rows)]
    panels = [StackedPanel("", tuple(bars)), StackedPanel("burst, by what the operands hold", tuple(others))]
    return StackedChart(
        f"Where the FLOPS went: {rows[0].problem.dtype}, {rows[0].shape} by {rows[0].kernel}",
        machine(header),
        "TFLOPS",
        "",
        tuple(panel for panel in panels if panel.bars),
        (_LOST,),
        notes=tuple(f"{step.name}: {step.cause}" for step in steps if step.cause),
    )


def _step_bar(step: WaterfallStep) -> Stack:
    tflops = step.tflops or 0.0
    name = "from the datasheet" if step.row is None else "measured"
    bar = Stack(step.name, ((name, tflops),)) if step.row is None else _measured_bar(step.name, name, step.row)
    lost = max(0.0, (step.before or 0.0) - tflops)
    note = "" if step.change is None else change_cell(step.change)
    return replace(bar, parts=(*bar.parts, (_LOST, lost)) if lost else bar.parts, note=note)


def _measured_bar(label: str, name: str, row: Measurement) -> Stack:
    interval = row.rate_interval.low, row.rate_interval.high
    return Stack(label, ((name, row.best_rate),), interval=interval)
