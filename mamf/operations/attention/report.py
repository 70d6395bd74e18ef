"""The last record of an attention log; everything else is an ordinary report of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.ceilings.share import Ceilings, mamfu
from mamf.measurement import Measurement
from mamf.operations.attention.rows import is_attention
from mamf.report.devices import flat_device
from mamf.report.kernels import render_kernels
from mamf.report.winners import baseline_of, speed_up

__all__ = ["attention_summary_record", "baseline_of", "render_attention", "speed_up"]


def render_attention(
    format: str,
    rows: Sequence[Measurement],
    ceilings: Ceilings,
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    baseline: str | None = None,
    width: int | None = None,
    top: int | None = None,
) -> str:
    """A run of attention kernels in one of mamf.report.FORMATS. ``width``: of the terminal, None for all columns."""
    return render_kernels(format, rows, header, summary, top, width, shared=ceilings, baseline=baseline)


def attention_summary_record(
    rows: Sequence[Measurement], ceilings: Ceilings, status: str, reason: str, elapsed_seconds: float, left: int
) -> dict[str, Any]:
    """The last record of the log: the best kernel of each regime, dtype and direction by share of the ceiling."""
    best: dict[str, Measurement] = {}
    for row in rows:
        if is_attention(row) and row.ok:
            key = f"{row.regime} {row.problem.dtype} {row.problem.direction}"
            if key not in best or row.rank > best[key].rank:
                best[key] = row
    return {
        "status": status,
        "reason": reason,
        "measured": sum(row.ok and is_attention(row) for row in rows),
        "left": left,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "best": {key: _brief(row, ceilings) for key, row in best.items()},
    }


def _brief(row: Measurement, ceilings: Ceilings) -> dict[str, Any]:
    share = mamfu(row, ceilings)
    return {
        "kernel": row.kernel,
        "shape": str(row.shape),
        "tflops": round(row.best_rate, 3),
        "mamfu": None if share is None else round(share, 4),
        **flat_device(row),
    }
