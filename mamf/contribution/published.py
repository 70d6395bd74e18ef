"""``results/published``: figures that other people published. This project checked none of them.

Their tier is "published, not checked": they are never ranked with measured figures. The package ships published.csv,
the highest figure of each listed device and dtype, written by ``tools/published_peaks.py``.
"""

from __future__ import annotations

import csv
import functools
import importlib.resources
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mamf.errors import UsageError

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

    Raises UsageError for a file that cannot be read, and for a malformed row: it names the line.
    """
    path = results / FIGURES
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    rows = csv.DictReader(io.StringIO(text), strict=True)
    try:
        if (found := tuple(rows.fieldnames or ())) != COLUMNS:
            wrong = ", ".join(map(repr, sorted({*found} ^ {*COLUMNS})))
            raise ValueError(f"unknown or missing columns: {wrong}; the columns are {', '.join(COLUMNS)}")
        return [_figure(row) for row in rows]
    except (csv.Error, ValueError) as error:
        raise UsageError(f"{path}:{rows.reader.line_num}: {error}") from None


def _figure(row: Mapping[str, Any]) -> PublishedFigure:
    """Raises ValueError."""
    if None in row or None in row.values():
        raise ValueError(f"it does not have {len(COLUMNS)} cells")
    if missing := [name for name in ("accelerator", "vendor", "dtype", "tflops") if not row[name]]:
        raise ValueError(f"{missing[0]} is missing")
    numbers = {name: kind(row[name]) for name, kind in _NUMBERS.items() if row[name]}
    if not all(0 < number < math.inf for number in numbers.values()):
        raise ValueError("a number is not above 0")
    if not _ADDRESS.fullmatch(row["source"]):
        raise ValueError(f"source: {row['source']!r} is not an http or https address")
    return PublishedFigure(**{**row, **dict.fromkeys(_NUMBERS), **numbers})


@functools.cache
def published_peaks() -> dict[tuple[str, str], PublishedFigure]:
    """The published figures that ship with this package: the highest by device, as peaks.csv names it, and dtype.
    ``statistic``: of how many.
    """
    text = importlib.resources.files("mamf").joinpath(SHIPPED).read_text(encoding="utf-8")
    return {(each.device, each.dtype): each for each in map(_figure, csv.DictReader(text.splitlines()))}
