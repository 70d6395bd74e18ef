"""``results/published``: figures that other people published. This project checked none of them.

Their tier is "published, not checked": they are never ranked with measured figures. The package ships published.csv,
the highest figure of each listed device and dtype, written by ``tools/published_peaks.py``.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.errors import UsageError
from mamf.files import packaged_rows
from mamf.rate import PUBLISHED, Rate

FIGURES, NOTICE = Path("published", "figures.csv"), Path("published", "NOTICE.md")
SHIPPED = "published.csv"
COLUMNS = (
    *("accelerator", "device", "vendor", "dtype", "tflops", "statistic", "m", "n", "k", "software"),
    *("power_limit_watts", "date", "version", "source", "license"),
)
_ADDRESS = re.compile(r"https?://[\w.-]+(:\d{1,5})?([/?#][!#-&(-;=?-\[\]_a-z~]*)?", re.ASCII)
_NUMBERS = {"tflops": float, "m": int, "n": int, "k": int, "power_limit_watts": float}


@dataclass(frozen=True, kw_only=True)
class PublishedRate(Rate):
    """A row of figures.csv. ``reference``: its address, http or https. ``accelerator``: as people call it; ``device``:
    torch's name. ``m``, ``n``, ``k``: ``k`` is summed over. ``version``: of the script. ``license``: of the source; if
    it is empty, so is all but accelerator, vendor, dtype, figure and address. Texts are as published: escape them.
    """

    accelerator: str
    vendor: str
    statistic: str
    m: int | None
    n: int | None
    k: int | None
    software: str
    power_limit_watts: float | None
    version: str
    license: str


def read_published(results: Path) -> list[PublishedRate]:
    """The figures in ``published/figures.csv`` of a results folder, in their order; none without that file.

    Raises UsageError for a file that cannot be read, and for a malformed row.
    """
    path = results / FIGURES
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_rate_of(row) for row in csv.DictReader(file, strict=True)]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _rate_of(row: Mapping[str, Any]) -> PublishedRate:
    """Raises TypeError, KeyError or ValueError."""
    values = {**row, **{name: kind(row[name]) if row[name] else None for name, kind in _NUMBERS.items()}}
    is_whole = all(row[name] for name in ("accelerator", "vendor", "dtype", "tflops"))
    if not is_whole or not all(values[name] is None or 0 < values[name] < math.inf for name in _NUMBERS):
        raise ValueError(f"a cell is missing or a number is not above 0: {row}")
    if not _ADDRESS.fullmatch(row["source"]):
        raise ValueError(f"source: {row['source']!r} is not an http or https address")
    rate, reference = values.pop("tflops"), values.pop("source")
    return PublishedRate(rate=rate, reference=reference, source="published", tier=PUBLISHED, **values)


@functools.cache
def published_rates() -> dict[tuple[str, str], PublishedRate]:
    """The published figures that ship with this package: the highest by device, as peaks.csv names it, and dtype.
    ``statistic``: of how many.
    """
    return {(each.device, each.dtype): each for each in map(_rate_of, packaged_rows(SHIPPED))}
