"""A row's share of the roof as columns, wherever rows stand in a table. None of them where no roof was asked for."""

from __future__ import annotations

from typing import Any

from mamf.ceilings.roof import NEAR, RoofPoint, Roofs, point_of
from mamf.measurement import Measurement
from mamf.report.text import DASH

COLUMNS = ("% of roof", "bound by")


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
