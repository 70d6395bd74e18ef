"""Rows of given shapes: products, or kernels of any operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamf.charts.chart import sweep_chart
from mamf.charts.plotting import Picture
from mamf.kinds.kind import AnyCeilings, Drawing
from mamf.kinds.rows import KernelRows
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.attention.charts import attention_chart
from mamf.operations.attention.report import attention_summary_record
from mamf.operations.model.charts import model_chart
from mamf.plans import MATMUL, SWEEP, Plan
from mamf.report import summary_record

#: Operations with a command of that name.
_WITH_COMMAND = ("attention", "bandwidth", "model")


class Sweep(KernelRows):
    name = SWEEP
    noun = "a sweep"

    def command(self, plan: Plan) -> str:
        if plan.operation == MATMUL:
            return SWEEP
        return plan.operation if plan.operation in _WITH_COMMAND else f"{SWEEP} --operation {plan.operation}"

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        rows, header, of = log.measurements, log.header, log.plan.operation
        if of == "attention":
            ceilings, directions = log.all_ceilings, drawing.directions
            return attention_chart(rows, ceilings, header, drawing.regime, directions, drawing.drawn)
        drawing.require_no_direction(log)
        if of == "model" and not drawing.quantities:
            return model_chart(rows, log.known_ceilings, header, drawing.regime)
        if of == MATMUL:
            return sweep_chart(rows, header, drawing.regime, drawing.rates_first)
        return super().chart(log, drawing)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        how = (end.status, end.reason, end.elapsed_seconds, end.left)
        if plan.operation == MATMUL:
            return summary_record(rows, *how)
        if plan.operation == "attention":
            return attention_summary_record(rows, dict(ceilings), *how)
        return super().summary(plan, rows, ceilings, end)
