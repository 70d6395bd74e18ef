"""Where FLOPS went, as data: a bar for each step down from the datasheet, and what operands cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.errors import UsageError
from mamf.measurement import Measurement
from mamf.report.charts.chart import machine
from mamf.report.explanation import WaterfallStep, rank_bursts


@dataclass(frozen=True)
class Bar:
    """``lost``: TFLOPS to the bar before, where that is higher. ``note``: beside the figure. ``interval``: the
    95 % repeat interval.
    """

    label: str
    tflops: float
    lost: float = 0.0
    note: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class WaterfallChart:
    """``steps`` from the left to the right; ``data``: the same product on other operands, by distribution."""

    title: str
    subtitle: str
    steps: tuple[Bar, ...]
    data: tuple[Bar, ...] = ()
    notes: tuple[str, ...] = ()


def waterfall_chart(
    steps: Sequence[WaterfallStep], rows: Sequence[Measurement], header: Mapping[str, Any]
) -> WaterfallChart:
    """Steps without a figure are listed in a note. Raises UsageError if no step has one."""
    known = [step for step in steps if step.tflops is not None]
    if not known:
        raise UsageError("nothing to draw: no step has a figure")
    first = rows[0]
    return WaterfallChart(
        f"Where the FLOPS went: {first.problem.dtype}, {first.shape} by {first.kernel}",
        machine(header),
        tuple(_bars(known)),
        tuple(Bar(row.problem.data, row.best_rate, interval=_interval(row)) for row in rank_bursts(rows)),
        tuple(f"{step.name}: {step.cause}" for step in steps if step.cause),
    )


def _bars(steps: Iterable[WaterfallStep]) -> Iterable[Bar]:
    for step in steps:
        assert step.tflops is not None, "those without are left out"
        lost = max(0.0, step.before - step.tflops) if step.before is not None else 0.0
        note = "" if step.change is None else f"{100 * step.change:+.1f} %"
        yield Bar(step.name, step.tflops, lost, note, _interval(step.row) if step.row is not None else None)


def _interval(row: Measurement) -> tuple[float, float]:
    return row.rate_interval.low, row.rate_interval.high
