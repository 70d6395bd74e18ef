"""Products beside other work: what each loses while both run."""

from __future__ import annotations

from mamf.kinds.kind import Drawing, KernelRows, View
from mamf.logs.run_log import RunLog
from mamf.plans import OVERLAP
from mamf.report.charts.picture import Picture
from mamf.report.document import Document
from mamf.report.overlap import overlap_chart, overlap_document


class Overlap(KernelRows):
    name = OVERLAP
    noun = "an overlap"

    def document(self, log: RunLog, view: View) -> Document:
        return overlap_document(log.measurements, log.header, log.summary, view.top)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        return overlap_chart(log.measurements, log.header)
