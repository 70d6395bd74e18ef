"""The layers of a model that the shapes of a preset are, by the plan of their run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layers_of(header: Mapping[str, Any]) -> Mapping[str, str]:
    """The layer of each shape, both as text; empty if shapes were given one by one, or for a single row."""
    plan = header.get("plan", {})
    return dict(zip(plan.get("shapes", ()), plan.get("layers", ()), strict=False))
