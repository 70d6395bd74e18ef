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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mamf.errors import UsageError
from mamf.files import packaged_rows

FIGURES, NOTICE = Path("published", "figures.csv"), Path("published", "NOTICE.md")
SHIPPED = "published.csv"
_ADDRESS = re.compile(r"https?://[\w.-]+(:\d{1,5})?([/?#][!#-&(-;=?-\[\]_a-z~]*)?", re.ASCII)
_NUMBERS = {"tflops": float, "m": int, "n": int, "k": int, "power_limit_watts": float}


@dataclass(frozen=True)
class PublishedFigure:
    """``tflops`` in 1e12 FLOP/s (int8: operations), as ``source``, an http or https address, has it. ``accelerator``:
    as people call it; ``device``: torch's name. ``m``, ``n``, ``k``: ``k`` is summed over. ``version``: of the script.
    ``license``: of the source; if it is empty, so is all but accelerator, vendor, dtype, figure and address. Texts are
    as published: escape them.
    """

    accelerator: str
    device: str
    vendor: str
    dtype: str
    tflops: float
    statistic: str
    m: int | None
    n: int | None
    k: int | None
    software: str
    power_limit_watts: float | None
    date: str
    version: str
    source: str
    license: str


COLUMNS = tuple(field.name for field in fields(PublishedFigure))


def read_published(results: Path) -> list[PublishedFigure]:
    """The figures in ``published/figures.csv`` of a results folder, in their order; none without that file.

    Raises UsageError for a file that cannot be read, and for a malformed row.
    """
    path = results / FIGURES
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [_figure(row) for row in csv.DictReader(file, strict=True)]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _figure(row: Mapping[str, Any]) -> PublishedFigure:
    """Raises TypeError, KeyError or ValueError."""
    numbers = {name: kind(row[name]) if row[name] else None for name, kind in _NUMBERS.items()}
    is_whole = all(row[name] for name in ("accelerator", "vendor", "dtype", "tflops"))
    if not is_whole or not all(0 < number < math.inf for number in numbers.values() if number is not None):
        raise ValueError(f"a cell is missing or a number is not above 0: {row}")
    if not _ADDRESS.fullmatch(row["source"]):
        raise ValueError(f"source: {row['source']!r} is not an http or https address")
    return PublishedFigure(**{**row, **numbers})


@functools.cache
def published_peaks() -> dict[tuple[str, str], PublishedFigure]:
    """The published figures that ship with this package: the highest by device, as peaks.csv names it, and dtype.
    ``statistic``: of how many.
    """
    return {(each.device, each.dtype): each for each in map(_figure, packaged_rows(SHIPPED))}
