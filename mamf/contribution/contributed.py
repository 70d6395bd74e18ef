"""The confirmed ceilings of results/ as one small file that travels with the package: contributed.csv."""

from __future__ import annotations

import csv
import functools
import importlib.resources
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.contribution.collection import CeilingEntry
from mamf.contribution.confirming import Claim, Entry, by_key, part_confirmed, shortened, why_unconfirmed
from mamf.logs.records import significant_digits
from mamf.regimes.names import CEILINGS

FILE = "contributed.csv"
_COLUMNS = (
    *("device", "compute_units", "power_limit_watts", "clock_mhz", "dtype", "regime"),
    *("tflops", "low", "high", "log", "shapes"),
)
_MOST_SHAPES = 6


@dataclass(frozen=True)
class ContributedCeiling:
    """A ceiling that somebody measured: ``tflops``, and ``low`` to ``high`` where a repeat on that card lies. ``log``:
    its place in results/. Units, limit and clock are None where the vendor's libraries did not tell; ``clock_mhz`` is a
    CPU's highest. ``shapes``: that won in the finds of such devices, the fastest first.
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


def contributed_csv(entries: Iterable[CeilingEntry]) -> str:
    """The highest ceiling of each kind of device, dtype and regime that a complete find with normal data confirmed, and
    that is not unconfirmed by a second submitter.
    """
    groups: dict[tuple[str, ...], list[CeilingEntry]] = {}
    for entry in part_confirmed(entries)[0]:
        if _counts(entry):
            groups.setdefault((entry.device, *_build(entry), entry.dtype, entry.regime), []).append(entry)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for key, found in sorted(groups.items()):
        fastest = sorted(found, key=lambda entry: entry.tflops, reverse=True)
        best, shapes = fastest[0], list(dict.fromkeys(entry.shape for entry in fastest))[:_MOST_SHAPES]
        figures = [value and significant_digits(value) for value in (best.tflops, best.low, best.high)]
        writer.writerow([*key, *figures, best.place.as_posix(), " ".join(shapes)])
    return buffer.getvalue()


def _counts(entry: CeilingEntry) -> bool:
    data = entry.header["plan"]["problem"]["data"]
    return entry.is_confirmed and entry.tier == "complete" and entry.regime in CEILINGS and data == "normal"


def _build(entry: CeilingEntry) -> tuple[str, ...]:
    """Unit count and power limit, and a CPU's clock: devices of one name are built and set in several ways."""
    device: dict[str, Any] = entry.header["device"]
    clock_mhz = None if device.get("is_accelerator", True) else (device["max_clock_hz"] or 0) / 1e6 or None
    figures = (device["compute_units"], device["power_limit_watts"], clock_mhz)
    return tuple("" if each is None else f"{each:g}" for each in figures)


@functools.cache
def contributed_ceilings() -> tuple[ContributedCeiling, ...]:
    """Those that came with this package."""
    text = importlib.resources.files("mamf").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(
        ContributedCeiling(
            device=row["device"],
            compute_units=int(row["compute_units"]) if row["compute_units"] else None,
            power_limit_watts=float(row["power_limit_watts"]) if row["power_limit_watts"] else None,
            dtype=row["dtype"],
            regime=row["regime"],
            tflops=float(row["tflops"]),
            low=float(row["low"]),
            high=float(row["high"]),
            log=row["log"],
            shapes=tuple(row["shapes"].split()),
            clock_mhz=float(row["clock_mhz"]) if row["clock_mhz"] else None,
        )
        for row in csv.DictReader(text.splitlines())
    )


def why_above_contributed(entries: Iterable[Entry]) -> str:
    """Why a log's figures are unconfirmed beside the ceilings that came with this package, or nothing: for a log that
    does not lie in results/.
    """
    known = by_key(
        Claim((kind, row.device, row.dtype, row.regime), "", Path(row.log), row.tflops, row.high, True, "")
        for row in contributed_ceilings()
        for kind in ("find", "sweep")
    )
    return shortened([reason for entry in entries if (reason := why_unconfirmed(entry.claim, known))])
