"""Where the datasheet's FLOPS went: the steps down from the datasheet, and the effect of the data."""

from __future__ import annotations

from collections.abc import Sequence

from mamf.ceilings.explanation import NO_COST, NORMAL, TOO_NOISY, WaterfallStep, find_row, rank_bursts
from mamf.measurement import Measurement
from mamf.regime_names import BURST
from mamf.report.columns import interval_columns, sensor_columns
from mamf.report.document import Answer, Column, Document, Lines, Table
from mamf.report.text import percent, significant


def explanation_document(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], head: Sequence[str], foot: Sequence[str] = ()
) -> Document:
    """``head`` and ``foot``: lines around the tables. Csv holds the steps."""
    normal = find_row(rows, NORMAL, BURST)
    by_step: Table[WaterfallStep] = Table(
        step_columns(steps[0].tflops),
        steps,
        key="steps",
        remarks=lambda step: [step.cause],
        label=lambda step: step.name,
    )
    data = Table(data_columns(normal), rank_bursts(rows), key="burst_by_data")
    return Document("Where the FLOPS went", [Lines(head), by_step, data, Lines(foot), Answer(conclusion(steps))])


def step_columns(datasheet: float | None) -> list[Column[WaterfallStep]]:
    """``datasheet``: its peak in TFLOPS."""

    def share(step: WaterfallStep) -> float | None:
        return step.tflops / datasheet if step.tflops is not None and datasheet else None

    return [
        Column("step", "step", lambda step: step.name, left=True),
        Column("rate_tflops", "TFLOPS", lambda step: step.tflops, significant),
        Column("change", "change", lambda step: step.change, change_cell),
        Column("share_of_datasheet", "% of datasheet", share, percent, importance=1),
        *interval_columns(lambda step: step.interval, "rate_{}_tflops"),
        *sensor_columns(lambda step: step.row and step.row.conditions),
        Column("cause", "", lambda step: step.cause),
    ]


def data_columns(normal: Measurement | None) -> list[Column[Measurement]]:
    """A burst on each kind of data, compared with normal data."""

    def change(row: Measurement) -> float | None:
        return row.best_rate / normal.best_rate - 1 if normal is not None and normal.ok else None

    return [
        Column("data", "data", lambda row: row.problem.data, left=True),
        Column("rate_tflops", "TFLOPS", lambda row: row.best_rate, significant),
        Column("change_to_normal", "to normal", change, change_cell),
        *sensor_columns(lambda row: row.conditions),
    ]


def change_cell(change: float) -> str:
    return f"{100 * change:+.1f} %"


def conclusion(steps: Sequence[WaterfallStep]) -> list[str]:
    """What is left of the datasheet's peak, and the step that costs most."""
    known = [(step.name, step.tflops) for step in steps if step.tflops is not None]
    if not known:
        return []
    (last, rate), datasheet = known[-1], steps[0].tflops
    share = f", {percent(rate / datasheet)} % of the datasheet" if datasheet else ""
    losses = {step.name: step.change for step in steps if step.change and step.cause not in (NO_COST, TOO_NOISY)}
    largest = min(losses, key=losses.__getitem__, default="")
    loss = f"; the largest loss: {largest}, {change_cell(losses[largest])}" if largest and losses[largest] < 0 else ""
    return [f"{last}: {significant(rate)} TFLOPS{share}{loss}"]


def title(row: Measurement) -> str:
    """What is explained."""
    return f"{row.problem.dtype}, {row.shape} by {row.kernel}"
