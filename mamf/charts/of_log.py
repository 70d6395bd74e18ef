"""Which chart a log is drawn as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mamf.backend import DeviceInfo
from mamf.ceilings.explanation import fall
from mamf.charts.chart import QUANTITIES, Quantity, find_chart, sweep_chart
from mamf.charts.kernels import kernels_chart
from mamf.charts.plotting import Picture
from mamf.charts.roofline import roofline_chart
from mamf.charts.waterfall import waterfall_chart
from mamf.errors import UsageError
from mamf.limits import require_known
from mamf.logs.roofs import roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.operations.attention.charts import attention_chart
from mamf.operations.attention.operation import Attention
from mamf.operations.attention.shapes import DIRECTIONS
from mamf.operations.model.charts import model_chart
from mamf.operations.model.operation import Model
from mamf.plans import EXPLAIN, ROOFLINE, FindPlan, KernelsPlan


def chart_of(
    log: RunLog,
    regime: str | None = None,
    directions: Sequence[str] | None = None,
    quantities: Sequence[Quantity] | None = None,
) -> Picture:
    """A log as a chart, by the kind of its plan. None: the log's first regime of attention, else all; all directions;
    both quantities of attention, else tflops. Raises UsageError for what a log of its kind does not have.
    """
    for what, asked, known in (("direction", directions, DIRECTIONS), ("quantity", quantities, QUANTITIES)):
        for name in asked or ():
            require_known((what, name, known))
    chart = _chart_of(log, regime, directions, quantities)
    if log.tier == "interrupted":
        return replace(chart, notes=(*chart.notes, "the run was interrupted: what is best may never have been tried"))
    return chart


def _chart_of(
    log: RunLog, regime: str | None, directions: Sequence[str] | None, quantities: Sequence[Quantity] | None
) -> Picture:
    plan, rows = log.plan, log.measurements
    drawn = tuple(name for name in QUANTITIES if name in (quantities or QUANTITIES))
    if isinstance(plan, KernelsPlan) and plan.operation == Attention.name:
        return attention_chart(rows, log.all_ceilings, log.header, regime, directions, drawn)
    if directions:
        of = plan.operation if isinstance(plan, KernelsPlan) else "matmul"
        raise UsageError(f"{log.path} is of {of}, which has no direction: leave it out")
    if isinstance(plan, KernelsPlan) and plan.purpose == ROOFLINE:
        roofs = roofs_of_logs([log])
        return roofline_chart(roofs.only([regime]) if regime else roofs, [], log.header)
    if isinstance(plan, KernelsPlan) and plan.purpose == EXPLAIN:
        return waterfall_chart(fall(rows, DeviceInfo(**log.header["device"])), rows, log.header)
    if isinstance(plan, FindPlan):
        if quantities and drawn != ("tflops",):
            raise UsageError(f"{log.path} is of a find, whose shapes take incomparable times: draw tflops alone")
        return find_chart(rows, log.ceilings, log.header, regime)
    if isinstance(plan, KernelsPlan) and plan.operation == Model.name and not quantities:
        return model_chart(rows, log.known_ceilings, log.header, regime)
    kind = kernels_chart if isinstance(plan, KernelsPlan) else sweep_chart
    return kind(rows, log.header, regime, drawn if quantities else ("tflops",))
