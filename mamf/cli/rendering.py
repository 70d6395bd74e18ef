"""How a run of kernels is shown: by its operation's own report, or by the one that fits any."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mamf.ceilings.share import Ceilings
from mamf.logs.run_log import OwnCeilings
from mamf.measurement import Measurement
from mamf.operations.attention.report import attention_summary_record, render_attention
from mamf.report.kernels import kernels_summary_record, render_kernels

_WITH_OWN_REPORT = "attention"


def terminal_width(options: argparse.Namespace) -> int | None:
    """Columns of text that fit, None where all are to be shown: pipes and files take any width."""
    if options.wide or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def render_kernels_run(
    options: argparse.Namespace,
    operation: str,
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    own_ceilings: OwnCeilings | None = None,
) -> str:
    if operation == _WITH_OWN_REPORT and own_ceilings is None:
        return render_attention(options.format, rows, ceilings, header, summary)
    width = terminal_width(options)
    return render_kernels(options.format, rows, header, summary, options.top, width, own_ceilings or {})


def kernels_summary(
    operation: str,
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    status: str,
    reason: str,
    elapsed_seconds: float,
    left: int,
    own_ceilings: OwnCeilings | None = None,
) -> dict[str, Any]:
    """The last record of the log."""
    if operation == _WITH_OWN_REPORT and own_ceilings is None:
        return attention_summary_record(rows, ceilings, status, reason, elapsed_seconds, left)
    return kernels_summary_record(rows, status, reason, elapsed_seconds, left, own_ceilings or {})
