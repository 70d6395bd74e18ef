"""Explanations: one product on every kind of data, to show where the datasheet's FLOPS went."""

from __future__ import annotations

from mamf.backend import DeviceInfo
from mamf.kinds.kind import Drawing, KernelRows, View
from mamf.logs.run_log import RunLog
from mamf.plans import EXPLAIN
from mamf.report.charts.picture import Picture
from mamf.report.document import Document
from mamf.report.explanation import explanation_document, waterfall_chart, waterfall_steps
from mamf.report.text import end_line, machine_line


class Explain(KernelRows):
    name = EXPLAIN
    noun = "an explanation"

    def document(self, log: RunLog, view: View) -> Document:
        rows = log.measurements
        if not rows:
            return super().document(log, view)
        first = rows[0]
        head = [machine_line(log.header), f"{first.problem.dtype}, {first.shape} by {first.kernel}"]
        return explanation_document(
            waterfall_steps(rows, DeviceInfo(**log.header["device"])), rows, head, [end_line(log.summary)]
        )

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        steps = waterfall_steps(log.measurements, DeviceInfo(**log.header["device"]))
        return waterfall_chart(steps, log.measurements, log.header)
