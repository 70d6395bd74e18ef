"""The two factors of a rate: the clock that the compute units had, and the share of their cycles that a kernel used.

``rate = cycles used x compute units x FLOP per cycle x clock``. The first factor is the kernel's own, and is the same
in every regime and for any data; the clock is the card's, and depends on the energy that the kernel and its data take.
"""

from __future__ import annotations

import functools

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.files import packaged_rows
from mamf.peaks import find_peak, peak_per_cycle


@functools.cache
def _by_architecture() -> dict[tuple[str, str], float]:
    return {
        (row["architecture"], dtype): float(row["flop"])
        for row in packaged_rows("flop_per_cycle.csv")
        for dtype in row["dtypes"].split()
    }


def flop_per_cycle(info: DeviceInfo, dtype: str) -> float | None:
    """FLOP that one compute unit can do in a clock cycle, or None if it is unknown.

    From ``flop_per_cycle.csv``, which cites the architectures' whitepapers. It leaves out architectures whose products
    differ, such as GeForce cards with half the tensor rate of workstation cards: there it is the datasheet's peak over
    its clock and units.
    """
    known = DTYPES.get(dtype)
    if known is None:
        return None
    listed = _by_architecture().get((info.architecture or "", known.peak_name))
    return listed or peak_per_cycle(find_peak(info.name, dtype, info.compute_units), info.compute_units)


def rate_of_units(info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """FLOP/s of all compute units at a clock, if they use every cycle; None if a factor is unknown."""
    of_unit = flop_per_cycle(info, dtype)
    return info.compute_units * of_unit * clock_hz if of_unit and info.compute_units and clock_hz else None


def cycles_used(rate: float, info: DeviceInfo, dtype: str, clock_hz: float | None) -> float | None:
    """The share of all compute units' cycles that a rate in FLOP/s takes at a clock, or None if a factor is unknown.

    Units that a launch leaves idle count as cycles that it does not use.
    """
    possible = rate_of_units(info, dtype, clock_hz)
    return rate / possible if possible else None
