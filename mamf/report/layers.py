"""What the shapes of a preset are, by its run's plan: the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamf.measurement import Measurement


def layers_of(header: Mapping[str, Any]) -> Mapping[str, str]:
    """The layer of each shape, both as text; none where shapes were asked for one by one, or a row stands alone."""
    plan = header.get("plan", {})
    return dict(zip(plan.get("shapes", ()), plan.get("layers", ()), strict=False))


def layer_column(row: Measurement, header: Mapping[str, Any]) -> dict[str, str]:
    """The column ``layer`` of a row, in a run that has layers."""
    layers = layers_of(header)
    return {"layer": layers.get(str(row.shape), "")} if layers else {}
