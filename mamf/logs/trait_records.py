"""The traits of a device in a log, if they were measured or assumed and are no constants of its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mamf.backend import Backend
from mamf.regime_traits import BurstTraits, SustainedTraits


def traits_record(backend: Backend) -> dict[str, Any]:
    """The traits of an opened device as JSON values; empty if they are its adapter's own."""
    burst, sustained = backend.burst_traits, backend.sustained_traits
    if "burst_traits" not in vars(backend) and not burst.remark:
        return {}
    plain = {name: _plain(traits) for name, traits in (("burst", burst), ("sustained", sustained))}
    return {**plain, "cache_bytes": backend.info.cache_bytes}


def _plain(traits: BurstTraits | SustainedTraits) -> dict[str, Any]:
    return {name: value for name, value in vars(traits).items() if isinstance(value, (float, int, str))}


def apply_traits(backend: Backend, record: Mapping[str, Any]) -> None:
    """Give an opened device the traits of a log, if the log has any."""
    if record:
        backend.burst_traits = replace(backend.burst_traits, **record["burst"])
        backend.sustained_traits = replace(backend.sustained_traits, **record["sustained"])
        backend.info = replace(backend.info, cache_bytes=record["cache_bytes"])
