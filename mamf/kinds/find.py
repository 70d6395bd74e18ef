"""Finds: confirmed ceilings, of matmul by a search on a grid, of any other operation among given shapes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mamf.ceilings.ceiling import why_hopeless
from mamf.errors import UsageError
from mamf.kinds.kind import AnyCeilings, Drawing, KernelRows, Setup, Strategy, View
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import FIND, Plan
from mamf.report.ceilings import devices_document, find_document, find_summary_record
from mamf.report.charts.logs import find_chart
from mamf.report.charts.picture import Picture
from mamf.report.document import Document


class Find(KernelRows):
    name = FIND
    has_ceilings = True
    noun = "a find"

    def strategy(self, setup: Setup) -> Strategy:
        from mamf.engine.search.finding import Find
        from mamf.engine.search.kernels import KernelsFind

        plan, rows = setup.plan, list(setup.rows)
        if plan.is_search:
            return Find(plan, setup.opened, setup.backend, rows, setup.on_phase)
        held, on_phase = setup.answers, setup.on_phase
        return KernelsFind(plan, setup.opened, setup.backend, held=held, on_phase=on_phase, rows=rows)

    def count_left(self, setup: Setup) -> int:
        """The unconfirmed ceilings of problems that some kernel supports."""
        plan, found = setup.plan, setup.confirmed
        if why_hopeless(setup.rows):
            return 0
        failed = {step for step, row in setup.answers.items() if not row.ok}
        hopeful = plan.problems if plan.is_search else {step.problem for step in plan.steps(failed)}
        return sum(key not in found for key in itertools.product(hopeful, plan.regimes))

    def is_cut_short(self, setup: Setup, left_out: int) -> bool:
        return bool(left_out if why_hopeless(setup.rows) else self.count_left(setup))

    def command(self, plan: Plan) -> str:
        return FIND if plan.is_search else f"{FIND} --operation {plan.operation}"

    def document(self, log: RunLog, view: View) -> Document:
        if log.parts:
            return devices_document(log)
        if log.plan.is_search:
            return find_document(log.measurements, log.ceilings, log.header, log.summary)
        return super().document(log, view)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        if log.parts:
            raise UsageError(f"{log.path} has a find of each device: draw one of its logs")
        if not log.plan.is_search:
            return super().chart(log, drawing)
        drawing.require_no_direction(log)
        return find_chart(log.measurements, log.ceilings, log.header, drawing.regime)

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        """``ceilings``: by problem and regime."""
        if plan.is_search:
            return find_summary_record(rows, {regime: ceiling for (_, regime), ceiling in ceilings.items()}, end)
        return super().summary(plan, rows, ceilings, end)
