"""Verifications: random problems whose whole outputs were checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mamf.errors import UsageError
from mamf.kinds.kind import AnyCeilings, Drawing, Kind, View
from mamf.logs.recording import End
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import VERIFY, Plan
from mamf.report.charts.picture import Picture
from mamf.report.document import Document
from mamf.report.verification import counts, verification_document


class Verify(Kind):
    name = VERIFY
    noun = "a verification"
    is_collected = False  # it has no rates

    def document(self, log: RunLog, view: View) -> Document:
        return verification_document(log)

    def chart(self, log: RunLog, drawing: Drawing) -> Picture:
        raise UsageError(f"{log.path} is a verification, which has no rates to draw: 'mamf show' prints it")

    def summary(self, plan: Plan, rows: Sequence[Measurement], ceilings: AnyCeilings, end: End) -> dict[str, Any]:
        return {**end.summary(sum(row.ok for row in rows)), "best": {}, **counts(rows)}
