"""Imported runs of mamf-finder as tables, csv, json and markdown: their figures as printed, and labelled as legacy."""

from __future__ import annotations

import datetime
import heapq
import json
from collections.abc import Iterator, Mapping
from typing import Any

from mamf.logs.legacy import STATISTICS, TIER, FinderRun, Reported
from mamf.report.text import DASH, csv_text, markdown, prose, table, whole

_LEFT = {"MxNxK", "stage", "label", "remarks"}


def render_legacy(form: str, run: FinderRun, top: int | None = 10) -> str:
    """``form``: of FORMATS. ``top``: rows of a table, best first; None for all, and csv and json hold all."""
    # Every row is shown by csv and json; of a table only the best are put into order.
    most = None if form in ("csv", "json") else top
    ordered = heapq.nlargest(len(run.rows) if most is None else most, run.rows, key=_highest)
    if form == "csv":
        return csv_text([_flat(row) for row in ordered])
    if form == "json":
        rows = [_flat(row) for row in ordered]
        rest = {name: getattr(run, name) for name in FinderRun.__dataclass_fields__ if name not in ("rows", "best")}
        best = {name: _flat(row) for name, row in run.best.items()}
        return json.dumps({"tier": TIER, **rest, "best": best, "rows": rows}, indent=1) + "\n"
    names = {name for row in run.rows for name in row.tflops}
    statistics = [name for name in STATISTICS if name in names]
    columns = ["MxNxK", "stage", "label", *statistics, "W", "MHz", "remarks"]
    shown = (markdown if form == "markdown" else table)(columns, [_cells(row, statistics) for row in ordered], _LEFT)
    left = len(run.rows) - len(ordered)
    more = f"... and {left} more in the log (--top all shows them)\n" if left else ""
    return f"{prose(_title(run), form)}\n{shown}{more}\n{prose(_end(run), form)}"


def _highest(row: Reported) -> float:
    return max(row.tflops.values(), default=0.0)


def _title(run: FinderRun) -> Iterator[str]:
    known = (run.device, run.dtype, *(f"{name} {version}" for name, version in run.software.items()))
    yield ", ".join(text for text in known if text) or "unknown device"
    version = run.version or "of unknown version"
    yield f"tier {TIER}: figures of mamf-finder {version}, in TFLOPS, without samples or checks"


def _end(run: FinderRun) -> Iterator[str]:
    for name, best in run.best.items():
        yield f"best {name}: {best.tflops[name]:g} TFLOPS @ {best.shape or 'an unknown shape'}"
    if run.means:
        yield f"mean of all: {', '.join(f'{name} {value:g}' for name, value in run.means.items())} TFLOPS"
    if run.tried is not None:
        # As mamf-finder prints it: 2 days, 14:42:00.
        seconds = run.elapsed_seconds
        elapsed = "" if seconds is None else f" in {datetime.timedelta(seconds=round(seconds))}"
        yield f"tried {run.tried} shapes{elapsed}"
    if not run.is_complete:
        are_scouts = any(best.stage == "scout" for best in run.best.values())
        yield "interrupted: these are scouts, and no ceilings" if are_scouts else "interrupted: no ceilings"
    yield from (f"remark: {remark}" for remark in run.remarks)


def _cells(row: Reported, statistics: list[str]) -> list[str]:
    figures = [f"{row.tflops[name]:.1f}" if name in row.tflops else DASH for name in statistics]
    shape = str(row.shape) if row.shape else "unknown"
    return [shape, row.stage, row.label, *figures, whole(row.watts), whole(row.clock_mhz), ", ".join(row.remarks)]


def _flat(row: Reported) -> Mapping[str, Any]:
    return {
        "shape": str(row.shape) if row.shape else None,
        "stage": row.stage,
        "label": row.label,
        **{f"tflops_{name}": row.tflops.get(name) for name in STATISTICS},
        "watts": row.watts,
        "clock_mhz": row.clock_mhz,
        "celsius": row.celsius,
        "remarks": "; ".join(row.remarks),
    }
