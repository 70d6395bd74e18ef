"""Ceilings of compute and of bandwidth in one log: the roofs of a device. ``mamf roofline`` now writes one per find."""

from __future__ import annotations

from mamf.kinds.find import Find
from mamf.kinds.kind import Drawing, View
from mamf.logs.compare import roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.plans import ROOFLINE
from mamf.report.charts.plotting import Picture
from mamf.report.charts.roofline import roofline_chart
from mamf.report.document import Document
from mamf.report.roofline import roofline_document
from mamf.report.text import machine_line


class Roofline(Find):
    name = ROOFLINE
    noun = "a roofline"

    def document(self, log: RunLog, view: View) -> Document:
        return roofline_document(roofs_of_logs([log]), [], machine_line(log.header), view.top)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        return roofline_chart(roofs_of_logs([log]), [], log.header)
