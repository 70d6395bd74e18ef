"""Where the datasheet's FLOPS went: as table, csv, json and markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mamf.ceilings.explanation import NORMAL, FallStep, by_data, row_of
from mamf.measurement import Measurement
from mamf.regimes.names import BURST
from mamf.report.text import DASH, by_column, csv_text, drawing, interval_cell, prose, significant, whole

_LEFT = ("step", "interval", "cause", "data")


def flat_step(step: FallStep, first: float | None) -> dict[str, Any]:
    """A step as named columns; ``first``: TFLOPS of the datasheet."""
    interval = step.interval
    seen = step.row.conditions if step.row is not None else None
    return {
        "step": step.name,
        "tflops": step.tflops,
        "interval_low": interval and interval.low,
        "interval_high": interval and interval.high,
        "change": step.change,
        "share_of_datasheet": step.tflops / first if step.tflops is not None and first else None,
        "clock_mhz": seen and seen.clock_hz and seen.clock_hz / 1e6,
        "watts": seen and seen.watts,
        "cause": step.cause,
    }


def step_cells(step: FallStep, first: float | None) -> dict[str, str]:
    flat, interval = flat_step(step, first), step.interval
    share, clock = flat["share_of_datasheet"], flat["clock_mhz"]
    return {
        "step": step.name,
        "TFLOPS": DASH if step.tflops is None else significant(step.tflops),
        "change": _percent(step.change),
        "of datasheet": DASH if share is None else f"{100 * share:.1f} %",
        "interval": DASH if interval is None else interval_cell(interval),
        "MHz": whole(clock),
        "W": whole(flat["watts"]),
        "cause": step.cause,
    }


def data_cells(row: Measurement, normal: Measurement | None) -> dict[str, str]:
    """What a burst gives on one kind of data, beside normal data."""
    clock = row.conditions.clock_hz
    change = row.best_rate / normal.best_rate - 1 if normal is not None and normal.ok else None
    return {
        "data": row.problem.data,
        "TFLOPS": significant(row.best_rate),
        "to normal": _percent(change),
        "MHz": whole(clock and clock / 1e6),
        "W": whole(row.conditions.watts),
    }


def _percent(change: float | None) -> str:
    return DASH if change is None else f"{100 * change:+.1f} %"


def render_explanation(
    format: str,
    steps: Sequence[FallStep],
    rows: Sequence[Measurement],
    head: Sequence[str],
    foot: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """In one of mamf.report.FORMATS; csv holds the steps. ``head`` and ``foot``: lines around it."""
    first = steps[0].tflops
    flat = [flat_step(step, first) for step in steps]
    if format == "csv":
        return csv_text(flat)
    data, normal = by_data(rows), row_of(rows, NORMAL, BURST)
    if format == "json":
        rates = {row.problem.data: row.best_rate for row in data}
        return json.dumps({"steps": flat, "burst_tflops_by_data": rates}, indent=2) + "\n"
    draw = drawing(format, width)
    parts = [prose(head, format), draw(*by_column(step_cells(step, first) for step in steps), _LEFT)]
    if data:
        parts.append(draw(*by_column(data_cells(row, normal) for row in data), _LEFT))
    return "\n".join([*parts, prose(foot, format)])


def title(row: Measurement) -> str:
    """What is explained."""
    return f"{row.problem.dtype}, {row.shape} by {row.kernel}"
