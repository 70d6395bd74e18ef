"""Limits that no kernel of a device exceeds, as data."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, BANDWIDTH = "compute", "bandwidth"


@dataclass(frozen=True)
class Roof:
    """``of``: compute (``rate`` in FLOP/s of a ``dtype``) or bandwidth (bytes/s). ``source``: measured, contributed or
    datasheet; ``told``: where it comes from, one line (a log field).
    """

    of: str
    rate: float
    source: str
    told: str
    dtype: str = ""
