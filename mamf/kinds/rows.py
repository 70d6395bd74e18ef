"""Rows of kernels, ranked together: what a run shows whose kind has nothing else to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamf.charts.kernels import kernels_chart
from mamf.charts.plotting import Picture
from mamf.kinds.kind import AnyCeilings, Drawing, Kind, View
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import Plan
from mamf.report.kernels import kernels_summary_record, render_kernels


class KernelRows(Kind):
    """``has_ceilings``: whether the run confirms ceilings of its operation."""

    has_ceilings = False

    def render(self, log: RunLog, view: View) -> str:
        own, known = log.own_ceilings if self.has_ceilings else {}, log.known_ceilings
        rows, header, end = log.measurements, log.header, log.summary
        return render_kernels(view.format, rows, header, end, view.top, view.width, own, view.roofs, known)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        return kernels_chart(log.measurements, log.header, drawing.regime, drawing.rates_first)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        own = dict(ceilings) if self.has_ceilings else {}
        return kernels_summary_record(rows, end.status, end.reason, end.elapsed_seconds, end.left, own)
