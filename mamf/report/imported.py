"""Imported runs of mamf-finder as tables, csv, json and markdown: their figures as printed, and labelled as legacy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mamf.logs.legacy import STATISTICS, TIER, FinderRun, Reported
from mamf.report.text import DASH, csv_text, markdown, prose, table, whole

_LEFT = {"MxNxK", "stage", "label", "remarks"}


def render_legacy(form: str, run: FinderRun, top: int | None = 10) -> str:
    """``form``: of FORMATS. ``top``: rows of a table, best first; None for all, and csv and json hold all."""
    ordered = sorted(run.rows, key=lambda row: -max(row.tflops.values(), default=0.0))
    if form == "csv":
        return csv_text([_flat(row) for row in ordered])
    if form == "json":
        rows = [_flat(row) for row in ordered]
        rest = {name: value for name, value in asdict(run).items() if name not in ("rows", "best")}
        best = {name: _flat(row) for name, row in run.best.items()}
        return json.dumps({"tier": TIER, **rest, "best": best, "rows": rows}, indent=1) + "\n"
    statistics = [name for name in STATISTICS if any(name in row.tflops for row in run.rows)]
    columns = ["MxNxK", "stage", "label", *statistics, "W", "MHz", "remarks"]
    draw = markdown if form == "markdown" else table
    shown = draw(columns, [_cells(row, statistics) for row in ordered[:top]], _LEFT)
    left = len(ordered) - len(ordered[:top])
    more = f"... and {left} more in the log (--top all shows them)\n" if left else ""
    return f"{prose(_title(run), form)}\n{shown}{more}\n{prose(_end(run), form)}"


def _title(run: FinderRun) -> Iterator[str]:
    known = (run.device, run.dtype, *(f"{name} {version}" for name, version in run.software.items()))
    yield ", ".join(text for text in known if text) or "unknown device"
    version = run.version or "of unknown version"
    yield f"tier {TIER}: figures of mamf-finder {version}, in TFLOPS, without samples or checks"


def _end(run: FinderRun) -> Iterator[str]:
    for name, best in run.best.items():
        yield f"best {name}: {best.tflops[name]:g} TFLOPS @ {best.shape or 'an unknown shape'}"
    if not run.is_complete:
        yield "interrupted: these are scouts, and no ceilings" if run.best else "interrupted"
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
