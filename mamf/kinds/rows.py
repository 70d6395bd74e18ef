"""Rows of kernels, ranked together: the default for all run kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamf.kinds.kind import AnyCeilings, Drawing, Kind, View
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import Plan
from mamf.report.charts.kernels import kernels_chart
from mamf.report.charts.plotting import Picture
from mamf.report.document import Document
from mamf.report.kernels import kernels_document, kernels_summary_record
from mamf.report.shares import Shares


class KernelRows(Kind):
    """``has_ceilings``: whether the run confirms ceilings of its operation."""

    has_ceilings = False

    def document(self, log: RunLog, view: View) -> Document:
        shares = Shares(log.header, log.all_ceilings, log.known_ceilings, view.roofs)
        own = log.own_ceilings if self.has_ceilings else None
        rows, end, baseline = log.measurements, log.summary, view.baseline
        return kernels_document(rows, shares, end, top=view.top, confirmed=own, baseline=baseline)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        return kernels_chart(log.measurements, log.header, drawing.regime, drawing.rates_first)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        own = dict(ceilings) if self.has_ceilings else {}
        return kernels_summary_record(rows, end.status, end.reason, end.elapsed_seconds, end.left, own)
