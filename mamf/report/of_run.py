"""How a run of kernels is shown and summed up: by its operation's own report, or by the one that fits any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.ceilings.known import KnownCeilings
from mamf.ceilings.roof import Roofs
from mamf.ceilings.share import Ceilings
from mamf.logs.run_log import OwnCeilings
from mamf.measurement import Measurement
from mamf.operations.attention.report import attention_summary_record
from mamf.report.kernels import kernels_summary_record, render_kernels

_WITH_OWN_REPORT = "attention"


def render_kernels_run(
    format: str,
    operation: str,
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    *,
    own_ceilings: OwnCeilings | None = None,
    top: int | None = None,
    width: int | None = None,
    roofs: Roofs | None = None,
    known_ceilings: KnownCeilings | None = None,
) -> str:
    """A run in one of mamf.report.FORMATS.

    ``ceilings``, ``known_ceilings``, ``roofs``: that its rows are shares of; ``own_ceilings``: confirmed by the run.
    ``width``: of the terminal, None for all columns.
    """
    return render_kernels(format, rows, header, summary, top, width, own_ceilings, roofs, known_ceilings, ceilings)


def has_own_report(operation: str) -> bool:
    """Whether the summary of an operation's runs has shares of ceilings."""
    return operation == _WITH_OWN_REPORT


def kernels_run_summary(
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
    if has_own_report(operation) and own_ceilings is None:
        return attention_summary_record(rows, ceilings, status, reason, elapsed_seconds, left)
    return kernels_summary_record(rows, status, reason, elapsed_seconds, left, own_ceilings or {})
