"""Reproductions: figures from elsewhere that were measured again."""

from __future__ import annotations

from mamf.kinds.kind import KernelRows, View
from mamf.logs.reproducing import judge_reproduction
from mamf.logs.run_log import RunLog
from mamf.plans import REPRODUCE
from mamf.report.document import Document
from mamf.report.reproduction import reproduction_document


class Reproduce(KernelRows):
    name = REPRODUCE
    noun = "a reproduction"

    def document(self, log: RunLog, view: View) -> Document:
        return reproduction_document(judge_reproduction(log), log.header, log.summary)
