"""Rows of given shapes: products, or kernels of any operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamf.ceilings.ceiling import Ceilings, mamfu
from mamf.kinds.kind import AnyCeilings, Drawing, KernelRows, Setup, Strategy
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.attention.operation import is_attention
from mamf.plans import MATMUL, SWEEP, Plan
from mamf.report.charts.attention import attention_chart
from mamf.report.charts.logs import model_chart, sweep_chart
from mamf.report.charts.picture import Picture
from mamf.report.rows import flat_device, summary_record

#: Operations with a command of that name.
_WITH_COMMAND = ("attention", "bandwidth", "model")


class Sweep(KernelRows):
    name = SWEEP
    noun = "a sweep"

    def strategy(self, setup: Setup) -> Strategy:
        if setup.plan.operation != MATMUL:
            return super().strategy(setup)
        from mamf.engine.strategies.shapes import Sweep as ShapeSweep

        (kernel,) = setup.opened
        return ShapeSweep(setup.plan, kernel, setup.backend, setup.answers, setup.on_phase)

    def command(self, plan: Plan) -> str:
        if plan.operation == MATMUL:
            return SWEEP
        return plan.operation if plan.operation in _WITH_COMMAND else f"{SWEEP} --operation {plan.operation}"

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        rows, header, of = log.measurements, log.header, log.plan.operation
        if of == "attention":
            ceilings, directions = log.all_ceilings, drawing.directions
            return attention_chart(rows, ceilings, header, drawing.regime, directions)
        drawing.require_no_direction(log)
        if of == "model":
            return model_chart(rows, log.known_ceilings, header, drawing.regime)
        if of == MATMUL:
            return sweep_chart(rows, header, drawing.regime)
        return super().chart(log, drawing)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        if plan.operation == MATMUL:
            return summary_record(rows, end)
        if plan.operation == "attention":
            return attention_summary_record(rows, dict(ceilings), end)
        return super().summary(plan, rows, ceilings, end)


def attention_summary_record(rows: Sequence[Measurement], ceilings: Ceilings, end: End) -> dict[str, Any]:
    """The last record of the log: the best kernel of each regime, dtype and direction by share of the ceiling."""
    best: dict[str, Measurement] = {}
    for row in rows:
        if is_attention(row) and row.ok:
            key = f"{row.regime} {row.problem.dtype} {row.problem.direction}"
            if key not in best or row.rank > best[key].rank:
                best[key] = row
    return {
        **end.summary(sum(row.ok and is_attention(row) for row in rows)),
        "best": {key: _brief(row, ceilings) for key, row in best.items()},
    }


def _brief(row: Measurement, ceilings: Ceilings) -> dict[str, Any]:
    share = mamfu(row, ceilings)
    return {
        "kernel": row.kernel,
        "shape": str(row.shape),
        "tflops": round(row.best_rate, 3),
        "mamfu": None if share is None else round(share, 4),
        **flat_device(row),
    }
