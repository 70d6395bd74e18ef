"""Rules about imported runs of mamf-finder: only a few properties can be checked."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mamf.backend import DeviceInfo
from mamf.contribution.evidence import Finding
from mamf.dtypes import DTYPES
from mamf.logs.legacy import STATISTICS, FinderRun, Reported
from mamf.measurement import TERA
from mamf.peaks import fastest_possible_flops

# A headline is rounded to whole TFLOPS by some versions.
_HEADLINE_ROUNDING = 0.6


def legacy_findings(run: FinderRun) -> Iterator[Finding]:
    if not run.device:
        yield Finding("missing-field", "the log names no accelerator", 1)
    if run.dtype is not None and run.dtype not in DTYPES:
        yield Finding("missing-field", f"{run.dtype!r} is no dtype of mamf: it stands in the table as printed", 1, True)
    if not run.rows and not run.best:
        yield Finding("missing-row", "the log holds no figure")
    limit = _limit(run)
    for number, row in enumerate(run.rows, start=2):
        yield from _figures(run, row, limit, number)
    for row in run.best.values():
        yield from _figures(run, row, limit, len(run.rows) + 2)
    yield from _best_of_rows(run)


def _figures(run: FinderRun, row: Reported, limit: float | None, line: int) -> Iterator[Finding]:
    for name, tflops in row.tflops.items():
        if name not in STATISTICS or not isinstance(tflops, (int, float)) or not 0 < tflops < math.inf:
            yield Finding("unreadable", f"{name} {tflops!r} is no figure of mamf-finder", line)
        elif limit is not None and tflops * TERA > limit:
            yield Finding("implausible", f"{tflops:g} TFLOPS are more than {run.device} can do", line)


def _limit(run: FinderRun) -> float | None:
    if run.dtype not in DTYPES or not run.device:
        return None
    return fastest_possible_flops(DeviceInfo("legacy", 0, run.device, ""), run.dtype)


def _best_of_rows(run: FinderRun) -> Iterator[Finding]:
    """The log's own best is among its rows, where all of them are there."""
    for name, best in run.best.items():
        seen = [row.tflops[name] for row in run.rows if name in row.tflops]
        is_whole = run.tried is not None and len(run.rows) >= run.tried
        if seen and is_whole and best.tflops[name] > max(seen) + _HEADLINE_ROUNDING:
            yield Finding("best-mismatch", f"best {name} {best.tflops[name]:g}, the rows give {max(seen):g} at most")
