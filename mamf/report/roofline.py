"""Roofs, the balance points between them, and how far rows lie below: as table, csv, json and markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.roof import LEVELS, RoofPoint, Roofs, point_of
from mamf.logs.known import operation_called
from mamf.measurement import Measurement
from mamf.report.text import DASH, by_column, csv_text, drawing, prose, significant

_LEFT_ROOFS = ("roof", "regime", "unit", "interval", "at", "kernel")
_LEFT_POINTS = ("row", "kernel", "regime", "dtype", "unit", "what bounds it")


def points_of(rows: Iterable[Measurement], roofs: Roofs) -> list[RoofPoint]:
    """Measured rows under their roofs; what a search took on its way, and references, are left out."""
    kept = [row for row in rows if row.ok and not row.is_reference and not row.phase]
    return [point_of(row, roofs, named(row)) for row in kept]


def named(row: Measurement) -> str:
    """Its shape, and what sets its problem apart."""
    return ", ".join([str(row.shape), *operation_called(row.operation).words(row.problem)])


def roof_cells(roofs: Roofs) -> list[dict[str, str]]:
    """A line for each ceiling; for one of computing the FLOP per byte at which each level of bandwidth meets it."""
    found = []
    for (dtype, regime), ceiling in roofs.compute.items():
        balance = {
            f"FLOP/byte of {level}": significant(ceiling.rate / roofs.bandwidth[level, regime].rate)
            for level in LEVELS
            if (level, regime) in roofs.bandwidth
        }
        found.append({**_ceiling_cells(dtype, ceiling), **balance})
    return found + [_ceiling_cells(level, ceiling) for (level, _), ceiling in roofs.bandwidth.items()]


def _ceiling_cells(name: str, ceiling: Ceiling) -> dict[str, str]:
    interval = ceiling.interval
    return {
        "roof": name,
        "regime": ceiling.regime,
        "rate": significant(ceiling.rate),
        "unit": ceiling.unit,
        "interval": f"{significant(interval.low)} to {significant(interval.high)}",
        "at": ", ".join([str(ceiling.shape), *operation_called(ceiling.problem.operation).words(ceiling.problem)]),
        "kernel": ceiling.kernel,
    }


def flat_point(point: RoofPoint) -> dict[str, Any]:
    """A row as named columns."""
    return {**asdict(point), "share": point.share}


def point_cells(point: RoofPoint) -> dict[str, str]:
    return {
        "row": point.name,
        "kernel": point.kernel,
        "regime": point.regime,
        "dtype": point.dtype,
        "FLOP/byte": DASH if point.intensity is None else significant(point.intensity),
        "rate": significant(point.rate),
        "unit": point.unit,
        "roof": DASH if point.roof is None else significant(point.roof),
        "% of roof": DASH if point.share is None else f"{100 * point.share:.1f}",
        "what bounds it": point.verdict or DASH,
    }


def missing(roofs: Roofs, points: Iterable[RoofPoint]) -> list[str]:
    """Why some roofs are not there, a line each."""
    lines = []
    for regime in roofs.regimes:
        for level in LEVELS:
            if (level, regime) not in roofs.bandwidth:
                lines.append(f"no bandwidth of {level} is known in {regime}: {_REASONS[level]}")
    without = sorted({(point.dtype, point.regime) for point in points if point.roof is None and point.unit == "TFLOPS"})
    return lines + [f"no roof over {dtype} in {regime}: one of its ceilings is not known" for dtype, regime in without]


_REASONS = {
    "cache": "no ceiling is of arrays that fit the cache, in several passes ('mamf roofline' measures them)",
    "memory": "no ceiling is of arrays of at least 4 times the cache, by a pattern that reads",
}


def render_roofline(
    format: str,
    roofs: Roofs,
    points: Sequence[RoofPoint],
    head: Sequence[str],
    foot: Sequence[str] = (),
    top: int | None = None,
    width: int | None = None,
) -> str:
    """In one of mamf.report.FORMATS; csv holds the rows, or without any the roofs, json everything.

    ``head`` and ``foot``: lines around it. ``top``: so many of the rows, those nearest to their roof; None for all.
    """
    best_first = sorted(points, key=lambda point: -1.0 if point.share is None else point.share, reverse=True)
    if format == "csv":
        return csv_text([flat_point(point) for point in best_first] or uniform(roof_cells(roofs)))
    if format == "json":
        content = {"device": roofs.device, "roofs": roof_cells(roofs), "rows": list(map(flat_point, best_first))}
        return json.dumps(content, indent=2) + "\n"
    draw = drawing(format, width)
    parts = [prose(head, format), draw(*by_column(roof_cells(roofs)), _LEFT_ROOFS)]
    shown = best_first if top is None else best_first[:top]
    if shown:
        parts.append(draw(*by_column(map(point_cells, shown)), _LEFT_POINTS))
    told = [*missing(roofs, points), *foot]
    if len(shown) < len(best_first):
        told.insert(0, f"... and {len(best_first) - len(shown)} more rows (--top all shows them)")
    return "\n".join([*parts, prose(told, format)])


def uniform(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows of equal keys."""
    columns, cells = by_column(rows)
    return [dict(zip(columns, line, strict=True)) for line in cells]
