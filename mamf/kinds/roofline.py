"""Ceilings of compute and of bandwidth in one log: the roofs of a device."""

from __future__ import annotations

from mamf.kinds.find import Find
from mamf.kinds.kind import Drawing, View
from mamf.logs.comparability import roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.plans import ROOFLINE, Plan
from mamf.report.charts.plotting import Picture
from mamf.report.charts.roofline import roofline_chart
from mamf.report.document import Document
from mamf.report.roofline import roofline_document
from mamf.report.text import end_line, machine_line


class Roofline(Find):
    name = ROOFLINE
    noun = "a roofline"

    def command(self, plan: Plan) -> str:
        return ROOFLINE

    def document(self, log: RunLog, view: View) -> Document:
        if not (log.all_ceilings or log.own_ceilings):
            return super().document(log, view)
        head, foot = [machine_line(log.header)], [end_line(log.summary)]
        return roofline_document(roofs_of_logs([log]), [], head, foot, view.top)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        drawing.require_no_direction(log)
        roofs = roofs_of_logs([log])
        return roofline_chart(roofs.only([drawing.regime]) if drawing.regime else roofs, [], log.header)
