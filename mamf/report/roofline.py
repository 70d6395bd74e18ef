"""Roofs, the balance points between them, and how far rows lie below: as table, csv, json and markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.roof import LEVELS, RoofPoint, Roofs, point_of
from mamf.logs.known import operation_called
from mamf.measurement import Measurement
from mamf.operations.bandwidth.shapes import CACHES_OF_MEMORY
from mamf.report.text import DASH, by_column, csv_text, drawing, interval_cell, prose, significant
from mamf.statistics import CONFIDENCE, Interval

_LEFT_ROOFS = ("roof", "regime", "unit", "interval", "at", "kernel")
_LEFT_POINTS = ("row", "kernel", "regime", "dtype", "unit", "what bounds it")


def points_of(rows: Iterable[Measurement], roofs: Roofs) -> list[RoofPoint]:
    """Measured rows under their roofs; what a search took on its way, and references, are left out."""
    kept = [row for row in rows if row.ok and not row.is_reference and not row.phase]
    return [point_of(row, roofs, named(row)) for row in kept]


def named(row: Measurement) -> str:
    """Its shape, and what sets its problem apart."""
    return ", ".join([str(row.shape), *operation_called(row.operation).words(row.problem)])


def flat_roofs(roofs: Roofs) -> list[dict[str, Any]]:
    """Each ceiling as named columns; ``balance_*``: FLOP per byte at which a level of bandwidth meets a ceiling of
    computing.
    """
    found = [_flat(dtype, ceiling, roofs) for (dtype, _), ceiling in roofs.compute.items()]
    return found + [_flat(level, ceiling, roofs) for (level, _), ceiling in roofs.bandwidth.items()]


def _flat(name: str, ceiling: Ceiling, roofs: Roofs) -> dict[str, Any]:
    regime, problem = ceiling.regime, ceiling.problem
    computes = ceiling.unit == "TFLOPS"
    met = {level: roofs.bandwidth.get((level, regime)) if computes else None for level in LEVELS}
    return {
        "roof": name,
        "regime": regime,
        "rate": ceiling.rate,
        "unit": ceiling.unit,
        "interval_low": ceiling.interval.low,
        "interval_high": ceiling.interval.high,
        "at": ", ".join([str(ceiling.shape), *operation_called(problem.operation).words(problem)]),
        "kernel": ceiling.kernel,
        **{f"balance_{level}": ceiling.rate / each.rate if each else None for level, each in met.items()},
    }


def roof_cells(roofs: Roofs) -> list[dict[str, str]]:
    """The same as text; balance points only of levels that are known."""
    known = [level for level in LEVELS if any(level == name for name, _ in roofs.bandwidth)]
    return [
        {
            "roof": flat["roof"],
            "regime": flat["regime"],
            "rate": significant(flat["rate"]),
            "unit": flat["unit"],
            **{f"FLOP/byte of {level}": _figure(flat[f"balance_{level}"]) for level in known},
            "interval": interval_cell(Interval(flat["interval_low"], flat["interval_high"], CONFIDENCE)),
            "at": flat["at"],
            "kernel": flat["kernel"],
        }
        for flat in flat_roofs(roofs)
    ]


def _figure(value: float | None) -> str:
    return DASH if value is None else significant(value)


def flat_point(point: RoofPoint) -> dict[str, Any]:
    """A row as named columns."""
    return {**asdict(point), "share": point.share}


def point_cells(point: RoofPoint) -> dict[str, str]:
    return {
        "row": point.name,
        "kernel": point.kernel,
        "regime": point.regime,
        "dtype": point.dtype,
        "FLOP/byte": _figure(point.intensity),
        "rate": significant(point.rate),
        "unit": point.unit,
        "roof": _figure(point.roof),
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
    "memory": f"no ceiling is of passes that move {CACHES_OF_MEMORY} times the cache, by a pattern that reads",
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
        return csv_text([flat_point(point) for point in best_first] or flat_roofs(roofs))
    if format == "json":
        content = {"device": roofs.device, "roofs": flat_roofs(roofs), "rows": list(map(flat_point, best_first))}
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
