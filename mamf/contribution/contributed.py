"""The confirmed ceilings of results/ as one small file that travels with the package: contributed.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mamf.ceilings.contributed import contributed_ceilings
from mamf.contribution.collection import CeilingEntry
from mamf.contribution.confirming import Claim, Entry, by_key, part_confirmed, shortened, why_unconfirmed
from mamf.logs.records import significant_digits
from mamf.regime_names import CEILINGS

_COLUMNS = (
    *("device", "compute_units", "power_limit_watts", "clock_mhz", "dtype", "regime"),
    *("tflops", "low", "high", "log", "shapes"),
)
_MOST_SHAPES = 6


def contributed_csv(entries: Iterable[CeilingEntry]) -> str:
    """The highest ceiling of each kind of device, dtype and regime that a complete find with normal data confirmed,
    except those that need a second submitter.
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
    """Unit count and power limit, and a CPU's clock: devices with one name exist in several builds."""
    device: dict[str, Any] = entry.header["device"]
    clock_mhz = None if device.get("is_accelerator", True) else (device["max_clock_hz"] or 0) / 1e6 or None
    figures = (device["compute_units"], device["power_limit_watts"], clock_mhz)
    return tuple("" if each is None else f"{each:g}" for each in figures)


def why_above_contributed(entries: Iterable[Entry]) -> str:
    """Why a log's figures are unconfirmed beside the ceilings that came with this package, or an empty
    text. For logs outside of results/.
    """
    known = by_key(
        Claim((kind, row.device, row.dtype, row.regime), "", Path(row.log), row.tflops, row.high, True, "")
        for row in contributed_ceilings()
        for kind in ("find", "sweep")
    )
    return shortened([reason for entry in entries if (reason := why_unconfirmed(entry.claim, known))])
