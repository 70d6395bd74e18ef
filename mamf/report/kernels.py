"""Kernels of an operation that has no report of its own: its rows by regime and problem, best first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mamf.ceilings.known import KnownCeilings
from mamf.ceilings.roof import Roofs
from mamf.logs.known import operation_called
from mamf.logs.records import significant_digits
from mamf.logs.run_log import OwnCeilings
from mamf.measurement import Measurement
from mamf.report.accuracy import accuracy_remarks
from mamf.report.devices import COMPARABLE, DEVICE, device_cells, device_lines, flat_device
from mamf.report.layers import layer_column
from mamf.report.own_ceilings import brief, ceilings_text, flat_ceiling, problem_title, share_of
from mamf.report.shares import (
    MAMFU,
    MFU,
    OF_PEAK,
    flat_mamfu,
    flat_share,
    known_ceiling_lines,
    peak_cells,
    share_cells,
)
from mamf.report.text import (
    DASH,
    by_column,
    csv_text,
    drawing,
    end_line,
    half_width_cell,
    machine_line,
    prose,
    significant,
    told_once,
    whole,
    why_unknown,
)

#: Rows that are ranked together: of a regime and a problem.
Group = tuple[str, Any]
_NONE: KnownCeilings = {}
_FIRST, _LAST = (
    ("kernel", "shape"),
    ("+-%", DEVICE, COMPARABLE, OF_PEAK, MFU, MAMFU, "% of roof", "ms", "launches", "MHz", "W", "error"),
)


def best_first(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows that are ranked together; what has no figure last."""
    return sorted(rows, key=lambda row: (row.ok, row.rank if row.ok else ()), reverse=True)


def grouped(rows: Iterable[Measurement]) -> dict[Group, list[Measurement]]:
    """Rows by what they are ranked within, each group best first and what has no figure last."""
    found: dict[Group, list[Measurement]] = {}
    for row in rows:
        if not row.is_reference and not row.phase:
            found.setdefault((row.regime, row.problem), []).append(row)
    return {group: best_first(each) for group, each in found.items()}


def problem_record(row: Measurement) -> dict[str, Any]:
    return operation_called(row.operation).problem_record(row.problem)


def share_of_peak(row: Measurement, header: Mapping[str, Any]) -> float | None:
    return share_of(row.best_rate, row.problem, header) if row.ok else None


def title(row: Measurement) -> str:
    """What a group's rows have in common."""
    return problem_title(row.regime, row.problem)


def flat_kernel(
    row: Measurement, header: Mapping[str, Any], roofs: Roofs | None = None, known: KnownCeilings = _NONE
) -> dict[str, Any]:
    """One measurement as columns; None where there is no figure. ``roofs``, ``known``: that it is a share of."""
    measured = row.summary is not None
    interval = row.rate_interval if measured else None
    clock, share = row.conditions.clock_hz, share_of_peak(row, header)
    return {
        "operation": row.operation,
        "regime": row.regime,
        **problem_record(row),
        "shape": str(row.shape),
        "kernel": row.kernel,
        **flat_device(row),
        "status": row.status,
        "reason": row.reason,
        "unit": row.work.unit,
        **{f"rate_{name}": row.rate(name) if measured else None for name in ("mean", "median", "fastest")},
        "rate_interval_low": interval and interval.low,
        "rate_interval_high": interval and interval.high,
        "share_of_peak": share,
        **flat_mamfu(row, known),
        **flat_share(row, roofs),
        "ms": row.seconds * 1e3 if measured else None,
        "flop": row.flop,
        "bytes": row.work.nbytes,
        "launches": row.launches,
        "clock_mhz": clock and clock / 1e6,
        "watts": row.conditions.watts,
        "celsius": row.conditions.celsius,
        "throttle_reasons": " ".join(row.conditions.throttle_reasons),
        "implausible_samples": len(row.implausible_samples),
        "relative_error": row.error,
        **layer_column(row, header),
        **own_columns(row),
    }


def own_columns(row: Measurement) -> Mapping[str, object]:
    """Columns that the operation adds to those of every row."""
    return operation_called(row.operation).columns(row) if row.ok else {}


def flat_rows(
    rows: Iterable[Measurement],
    header: Mapping[str, Any],
    roofs: Roofs | None = None,
    known: KnownCeilings = _NONE,
) -> list[dict[str, Any]]:
    """Rows of equal columns: what one lacks is None."""
    found = [flat_kernel(row, header, roofs, known) for each in grouped(rows).values() for row in each]
    names = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in names} for row in found]


def cells(
    row: Measurement, header: Mapping[str, Any], roofs: Roofs | None = None, known: KnownCeilings = _NONE
) -> dict[str, str]:
    """One measured row by column, in the columns' order of importance."""
    clock = row.conditions.clock_hz
    return {
        "kernel": row.kernel,
        "shape": str(row.shape),
        **layer_column(row, header),
        row.work.unit: significant(row.best_rate),
        "+-%": half_width_cell(row.interval, row.seconds),
        **device_cells(row),
        **peak_cells(row, share_of_peak(row, header), known),
        **share_cells(row, roofs),
        "ms": f"{row.seconds * 1e3:.4g}",
        "launches": str(row.launches),
        "MHz": whole(clock and clock / 1e6),
        "W": whole(row.conditions.watts),
        "error": DASH if row.error is None else f"{row.error:.1e}",
        **{name: _text(value) for name, value in own_columns(row).items()},
    }


def _text(value: object) -> str:
    return DASH if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def remarks(row: Measurement) -> str:
    """What a reader must know about a row beside its figures."""
    parts = [*row.conditions.throttle_reasons, *row.remarks, *accuracy_remarks(row), *why_unknown(row)]
    if row.implausible_samples:
        parts.append(f"{len(row.implausible_samples)} implausible samples left out")
    return ", ".join(parts)


def remark_lines(rows: Sequence[Measurement], failed: Sequence[Measurement]) -> list[str]:
    """Each remark once, with the rows that it is of; then why rows have no figure."""
    told = [(remarks(row), row) for row in rows] + [(f"{row.status}: {row.reason}", row) for row in failed]
    return told_once((text, f"{row.kernel} {row.shape}") for text, row in told)


def group_text(
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    format: str,
    top: int | None,
    width: int | None,
    roofs: Roofs | None = None,
    known: KnownCeilings = _NONE,
) -> str:
    """A group's title, table and remarks."""
    measured = [row for row in rows if row.ok]
    shown = measured if top is None else measured[:top]
    columns, lines = by_column(cells(row, header, roofs, known) for row in shown)
    left_aligned = (
        [*_FIRST, *(name for name in columns if name not in (*_FIRST, shown[0].work.unit, *_LAST))] if shown else ()
    )
    notes = remark_lines(shown, [row for row in rows if not row.ok])
    if len(measured) > len(shown):
        notes.insert(0, f"... and {len(measured) - len(shown)} more in the log (--top all shows them)")
    body = drawing(format, width)(columns, lines, left_aligned) if shown else ""
    gap = "\n" if format == "markdown" else ""
    return f"{prose([title(rows[0])], format, gap)}{body}{gap}{prose(notes, format, gap)}"


def head(rows: Sequence[Measurement], header: Mapping[str, Any]) -> list[str]:
    """What was measured on what, and what the rate counts."""
    name = header["plan"].get("operation", "unknown")
    counts = dict.fromkeys(f"{row.work.unit}: {row.work.convention}" for row in rows)
    return [f"{name} on {machine_line(header)}", *counts, *device_lines(rows, header)]


def render_kernels(
    format: str,
    rows: Sequence[Measurement],
    header: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    top: int | None = None,
    width: int | None = None,
    ceilings: OwnCeilings | None = None,
    roofs: Roofs | None = None,
    known: KnownCeilings = _NONE,
) -> str:
    """A run of kernels in one of mamf.report.FORMATS. ``width``: of the terminal, None for all columns; ``ceilings``:
    what was confirmed of the operation; ``roofs``, ``known``: that rows are shares of.
    """
    confirmed = list((ceilings or {}).values())
    if format == "csv":
        return csv_text(flat_rows(rows, header, roofs, known))
    if format == "json":
        measured = flat_rows(rows, header, roofs, known)
        flat = {"measurements": measured, "ceilings": [flat_ceiling(each, header) for each in confirmed]}
        return json.dumps({"header": header, **flat, "summary": summary}, indent=2) + "\n"
    parts = [ceilings_text(confirmed, header, format, width)] if confirmed else []
    parts += [group_text(each, header, format, top, width, roofs, known) for each in grouped(rows).values()]
    parts = [part.rstrip("\n") + "\n" for part in parts]
    return "\n".join(
        [
            prose([*head(rows, header), *known_ceiling_lines(known.values())], format),
            *parts,
            prose([end_line(summary)], format),
        ]
    )


def kernels_summary_record(
    rows: Sequence[Measurement],
    status: str,
    reason: str,
    elapsed_seconds: float,
    left: int,
    ceilings: OwnCeilings | None = None,
) -> dict[str, Any]:
    """The last record of the log: the best row of each regime and problem, and the ceilings in short. It follows from
    the rows.
    """
    best = [each[0] for each in grouped(rows).values() if each[0].ok]
    return {
        "status": status,
        "reason": reason,
        "measured": sum(row.ok and not row.is_reference for row in rows),
        "left": left,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "best": {
            title(row): {
                "kernel": row.kernel,
                "shape": str(row.shape),
                "rate": significant_digits(row.best_rate),
                "unit": row.work.unit,
                "best_by": row.best_by,
                **flat_device(row),
            }
            for row in best
        },
        **(
            {"ceilings": {problem_title(each.regime, each.problem): brief(each) for each in ceilings.values()}}
            if ceilings
            else {}
        ),
    }
