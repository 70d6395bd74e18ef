"""A row's shares as columns, wherever rows stand in a table: of the datasheet, of the ceiling, and of the roof where
one was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mamf.ceilings.known import KnownCeiling, KnownCeilings, known_share
from mamf.ceilings.roof import NEAR, RoofPoint, Roofs, point_of
from mamf.logs.known import operation_called
from mamf.measurement import Measurement
from mamf.report.text import DASH, significant

COLUMNS = ("% of roof", "bound by")
OF_PEAK, MFU, MAMFU = "% of peak", "MFU", "MAMFU"


def has_mamfu(row: Measurement) -> bool:
    return operation_called(row.operation).counts_model_flop


def flat_mamfu(row: Measurement, known: KnownCeilings) -> dict[str, Any]:
    """``ceiling``: in TFLOPS."""
    if not has_mamfu(row):
        return {}
    ceiling = known.get((row.problem.dtype, row.regime))
    return {"ceiling": ceiling and ceiling.tflops, "mamfu": known_share(row, known)}


def peak_cells(row: Measurement, share_of_peak: float | None, known: KnownCeilings) -> dict[str, str]:
    """The share of the datasheet's figure, and of a model's step that of the ceiling beside it, in percent."""
    if not has_mamfu(row):
        return {OF_PEAK: _percent(share_of_peak)}
    return {MFU: _percent(share_of_peak), MAMFU: _percent(known_share(row, known))}


def known_ceiling_lines(known: Iterable[KnownCeiling]) -> list[str]:
    """What MAMFU is of."""
    return [
        f"MAMFU: of {significant(each.tflops)} TFLOPS, the {each.dtype} {each.regime} ceiling: {each.told}"
        for each in known
    ]


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}"


def flat_share(row: Measurement, roofs: Roofs | None) -> dict[str, Any]:
    """``roof``: the most that such work can reach, in the unit of the row's rate."""
    if roofs is None:
        return {}
    point = _point(row, roofs)
    return {
        "roof": point and point.roof,
        "share_of_roof": point and point.share,
        "bound_by": point and point.bound,
    }


def share_cells(row: Measurement, roofs: Roofs | None) -> dict[str, str]:
    """The share in percent, and the ceiling that bounds the row; whether it is near its limit."""
    if roofs is None:
        return {}
    point = _point(row, roofs)
    if point is None or point.share is None or point.bound is None:
        return dict.fromkeys(COLUMNS, DASH)
    near = ", near its limit" if point.share >= NEAR else ""
    return dict(zip(COLUMNS, (f"{100 * point.share:.1f}", f"{point.bound}{near}"), strict=True))


def _point(row: Measurement, roofs: Roofs) -> RoofPoint | None:
    return point_of(row, roofs, str(row.shape)) if row.ok else None
