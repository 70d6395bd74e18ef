"""The confirmed ceilings that ship with this package: contributed.csv, generated from results/."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mamf.ceilings.ceiling import Ceiling
from mamf.ceilings.share import label_dtype
from mamf.files import packaged_rows
from mamf.plans import MATMUL

FILE = "contributed.csv"


@dataclass(frozen=True)
class ContributedCeiling:
    """A contributed ceiling: ``tflops``, with the 95 % repeat interval ``low`` to ``high``. ``log``: the path in
    results/. Units, limit and clock are None if the vendor's libraries did not report them; ``clock_mhz`` is the
    highest clock. ``shapes``: the winning shapes in finds on such devices, fastest first. ``kernel``: the
    winner of the fastest find that compared several kernels; empty if none did.
    ``cards``: how many such cards were measured; ``lowest``: the ceiling of the slowest of them.
    ``date``: the day of the log (UTC); ``software``: torch, the vendor's libraries and the driver.
    """

    device: str
    compute_units: int | None
    power_limit_watts: float | None
    dtype: str
    regime: str
    tflops: float
    low: float
    high: float
    log: str
    shapes: tuple[str, ...] = ()
    clock_mhz: float | None = None
    kernel: str = ""
    cards: int = 1
    lowest: float | None = None
    date: str = ""
    software: str = ""


@functools.cache
def contributed_ceilings() -> tuple[ContributedCeiling, ...]:
    """All contributed ceilings of this package."""
    return tuple(ContributedCeiling(**_values(row)) for row in packaged_rows(FILE))


def _values(row: Mapping[str, str]) -> dict[str, Any]:
    numbers = ("power_limit_watts", "clock_mhz", "tflops", "low", "high", "lowest")
    return {
        **row,
        **{name: float(row[name]) if row[name] else None for name in numbers},
        "compute_units": int(row["compute_units"]) if row["compute_units"] else None,
        "cards": int(row["cards"]),
        "shapes": tuple(row["shapes"].split()),
    }


def contributed_by(device: str, compute_units: int | None, dtype: str) -> list[ContributedCeiling]:
    """The ceilings that such devices contributed for a dtype, as ``label_dtype`` names it."""
    return [
        each
        for each in contributed_ceilings()
        if (each.device, each.compute_units, each.dtype) == (device, compute_units, dtype)
    ]


def place_among_known(ceiling: Ceiling, device: Mapping[str, Any]) -> str:
    """Where a ceiling stands among those of other cards of its model and power limit; empty if none is known."""
    if ceiling.problem.operation != MATMUL or ceiling.problem.data != "normal":
        return ""
    for known in contributed_by(device["name"], device["compute_units"], label_dtype(ceiling.problem)):
        if known.regime == ceiling.regime and known.power_limit_watts == device["power_limit_watts"]:
            cards = f"{known.cards} cards from {known.lowest:.4g} to" if known.cards > 1 else "one card at"
            return f"{known.device} in results/: {cards} {known.tflops:.4g}; this one {ceiling.rate:.4g}"
    return ""
