"""Rows, ceilings, logs and comparisons for a notebook, as the html of their reports."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.logs.compare import DEFAULT_TOLERANCE, Comparison
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.plans import FindPlan
from mamf.report.ceilings import find_document
from mamf.report.comparison import comparison_document
from mamf.report.document import Block, Document, Lines
from mamf.report.formats.html import fragment
from mamf.report.kernels import group_table, kernels_document
from mamf.report.own_ceilings import ceiling_table
from mamf.report.remarks import failure_lines
from mamf.report.shares import Shares

#: Rows of a table, best first.
_MOST_ROWS = 10


def log_document(log: RunLog, top: int | None = None) -> Document:
    """The report of a run log of rows or ceilings."""
    rows, header = log.measurements, log.header
    if isinstance(log.plan, FindPlan):
        return find_document(rows, log.ceilings, header, log.summary)
    shares = Shares(header, log.all_ceilings, log.known_ceilings)
    return kernels_document(rows, shares, log.summary, top=top, confirmed=log.own_ceilings)


@functools.singledispatch
def html_of(shown: object) -> str:
    raise TypeError(f"a {type(shown).__name__} has no table")


def _header(device: str) -> dict[str, Any]:
    """The header of what does not belong to a log."""
    return {"device": asdict(DeviceInfo("", 0, device, ""))}


def _html(*blocks: Block) -> str:
    return fragment(Document("", blocks))


@html_of.register
def _(row: Measurement) -> str:
    table = group_table([row], Shares(_header("unknown")), lambda row: None)
    return _html(table, Lines(failure_lines([row])))


@html_of.register
def _(ceiling: Ceiling) -> str:
    return _html(Lines([ceiling.device]), ceiling_table([ceiling], _header(ceiling.device)))


@html_of.register
def _(found: Comparison) -> str:
    return fragment(comparison_document(found, DEFAULT_TOLERANCE))


@html_of.register
def _(log: RunLog) -> str:
    return _html(Lines([str(log.path)]), *log_document(log, _MOST_ROWS).blocks)
