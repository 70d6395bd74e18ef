"""Render rows, ceilings, logs and comparisons as HTML for a notebook. The result looks like reports in a terminal."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling
from mamf.errors import DEFAULT_COMPARISON_TOLERANCE
from mamf.kinds.kind import ReportOptions
from mamf.kinds.registry import get_kind
from mamf.logs.compare import Comparison
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.report.comparison import make_comparison_document
from mamf.report.document import Block, Document, Lines, Table, add_logged_warnings
from mamf.report.kernels import make_ranking_table
from mamf.report.page import render_fragment
from mamf.report.rows import describe_failures
from mamf.report.shares import ShareCalculator, make_ceiling_table

#: A table shows its best rows, at most _MAX_TABLE_ROWS. All tables of a log together show at most _MAX_LOG_ROWS rows.
_MAX_TABLE_ROWS, _MAX_LOG_ROWS = 10, 50


@functools.singledispatch
def render_html(value: object) -> str:
    raise TypeError(
        f"mamf cannot render a {type(value).__name__} as HTML: give a row, a ceiling, a log or a comparison"
    )


def _make_device_header(device: str) -> dict[str, Any]:
    """Make the header of a log with only the name of the device, for rows and ceilings outside a log."""
    return {"device": asdict(DeviceInfo("", 0, device, ""))}


def _render_blocks(*blocks: Block) -> str:
    return render_fragment(Document("", blocks))


@render_html.register
def _(row: Measurement) -> str:
    return _render_blocks(
        make_ranking_table([row], ShareCalculator(_make_device_header("unknown")), lambda row: None),
        Lines(describe_failures([row])),
    )


@render_html.register
def _(ceiling: Ceiling) -> str:
    return _render_blocks(Lines([ceiling.device]), make_ceiling_table([ceiling], _make_device_header(ceiling.device)))


@render_html.register
def _(comparison: Comparison) -> str:
    return render_fragment(make_comparison_document(comparison, DEFAULT_COMPARISON_TOLERANCE))


@render_html.register
def _(log: RunLog) -> str:
    document, shown_blocks, remaining_row_count = (
        add_logged_warnings(get_kind(log.plan).make_document(log, ReportOptions(max_rows=_MAX_TABLE_ROWS)), log),
        list[Block](),
        _MAX_LOG_ROWS,
    )
    for block in document.visible_blocks:
        if isinstance(block, Table):
            remaining_row_count -= len(block.visible_rows)
        if remaining_row_count >= 0 or not isinstance(block, Table):
            shown_blocks.append(block)
    hint_blocks = (
        [Lines(["this log has more tables: 'mamf show' prints all of them, and 'mamf report' writes a page"])]
        if remaining_row_count < 0
        else []
    )
    return _render_blocks(Lines([str(log.path)]), *shown_blocks, *hint_blocks)
