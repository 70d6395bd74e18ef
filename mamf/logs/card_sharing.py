"""Whether a run had its card alone: asked again after the last row, and kept in the device's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamf.backend import Backend, shared_name, shared_ways


def sharing_after(backend: Backend) -> dict[str, Any]:
    """A field of the summary: the ways in which the card is shared after the run and was not before; empty if none."""
    try:
        now = backend.sharing()
    except Exception:  # a device that failed has ended the run already, with a reason
        return {}
    new = [way for way in now if way not in shared_ways(backend.info.name)]
    return {"shared_after": new} if new else {}


def with_sharing(header: dict[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any]:
    """The header, with a device's name that says how the card was shared after the run."""
    if not summary or not summary.get("shared_after"):
        return header
    device = header["device"]
    return header | {"device": device | {"name": shared_name(device["name"], summary["shared_after"])}}


def describe_sharing(device_name: str) -> str:
    """Why the figures of a shared card are not those of its model; an empty text for a whole card."""
    ways = ", ".join(shared_ways(device_name))
    return f"the card is shared ({ways}): its figures are not a whole card's, and it has no known peak" if ways else ""
