"""Imported runs of mamf-finder: their figures as printed, labelled as legacy."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from mamf.logs.legacy import STATISTICS, TIER, FinderRun, Reported
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import counted, plain, whole


def finder_document(run: FinderRun, top: int | None = None) -> Document:
    best = sorted(run.rows, key=lambda row: max(row.tflops.values(), default=0.0), reverse=True)
    rest = {name: getattr(run, name) for name in FinderRun.__dataclass_fields__ if name not in ("rows", "best")}
    columns = _columns()
    records = {name: {each.name: each.read(row) for each in columns} for name, row in run.best.items()}
    table = Table(
        columns, best, top=top, remarks=lambda row: row.remarks, label=lambda row: str(row.shape or "unknown")
    )
    blocks: list[Block] = [Lines(list(_title(run))), table, Answer(list(_end(run)))]
    return Document(f"mamf-finder on {run.device}", blocks, {"tier": TIER, **rest, "best": records})


def _columns() -> list[Column[Reported]]:
    def tflops(name: str) -> Column[Reported]:
        return Column(f"{name.lower()}_tflops", name, lambda row: row.tflops.get(name), lambda value: f"{value:.1f}")

    return [
        Column("shape", "shape", lambda row: str(row.shape) if row.shape else None, left=True),
        Column("stage", "stage", lambda row: row.stage, plain, 2, True),
        Column("label", "label", lambda row: row.label, plain, 2, True),
        *map(tflops, STATISTICS),
        Column("power_watts", "W", lambda row: row.watts, whole, 4),
        Column("clock_mhz", "MHz", lambda row: row.clock_mhz, whole, 4),
        Column("temperature_celsius", "C", lambda row: row.celsius, whole, 5),
        Column("remarks", "", lambda row: "; ".join(row.remarks)),
    ]


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
        yield f"tried {counted(run.tried, 'shape')}{elapsed}"
    if not run.is_complete:
        are_scouts = any(best.stage == "scout" for best in run.best.values())
        yield "interrupted: these are scouts, and no ceilings" if are_scouts else "interrupted: no ceilings"
    yield from (f"remark: {remark}" for remark in run.remarks)
