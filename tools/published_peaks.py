"""Writes mamf/published.csv: for each device of peaks.csv and dtype the highest figure that other people published.

    python tools/published_peaks.py [--check]

From results/published/figures.csv. A figure counts if the name of its accelerator means one device, and if it exceeds
that device's dense peak by at most 25 %, as far as a board may boost above its datasheet's clock. Only the figure, what
it is of and its address are kept, so no license applies. ``--check``: exit code 1 if the file is out of date.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.contribution.known_ceilings import FIGURES, SHIPPED
from mamf.errors import UsageError
from mamf.files import write_whole
from mamf.measurement import PUBLISHED, Rate
from mamf.peaks import HEADROOM_UNKNOWN_CLOCK, NamedDevice, find_devices, listed_peak

ROOT = Path(__file__).resolve().parents[1]
#: Accelerators that share rows of peaks.csv, or the name, with another device.
OTHER_DEVICES = re.compile(r"\bCPU\b|\bA800\b")

COLUMNS = (
    *("accelerator", "device", "vendor", "dtype", "tflops", "statistic", "m", "n", "k", "software"),
    *("power_limit_watts", "date", "version", "source", "license"),
)
ADDRESS = re.compile(r"https?://[\w.-]+(:\d{1,5})?([/?#][!#-&(-;=?-\[\]_a-z~]*)?", re.ASCII)
NUMBERS = {"tflops": float, "m": int, "n": int, "k": int, "power_limit_watts": float}


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


def published_rate(row: Mapping[str, Any]) -> PublishedRate:
    """Read a row of figures that other people published. Raises TypeError, KeyError or ValueError."""
    values = {**row, **{name: kind(row[name]) if row[name] else None for name, kind in NUMBERS.items()}}
    is_whole = all(row[name] for name in ("accelerator", "vendor", "dtype", "tflops"))
    if not is_whole or not all(values[name] is None or 0 < values[name] < math.inf for name in NUMBERS):
        raise ValueError(f"a cell is missing or a number is not above 0: {row}")
    if not ADDRESS.fullmatch(row["source"]):
        raise ValueError(f"source: {row['source']!r} is not an http or https address")
    rate, reference = values.pop("tflops"), values.pop("source")
    return PublishedRate(rate=rate, reference=reference, source="published", tier=PUBLISHED, **values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    target, text = ROOT / "mamf" / SHIPPED, csv_text(read_published(ROOT / "results"))
    if not options.check:
        write_whole(target, text)
    return int(target.read_text(encoding="utf-8") != text)


def read_published(results: Path) -> list[PublishedRate]:
    """The figures in ``published/figures.csv`` of a results folder, in their order; none without that file.

    Raises UsageError for a file that cannot be read, and for a malformed row.
    """
    path = results / FIGURES
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [published_rate(row) for row in csv.DictReader(file, strict=True)]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def csv_text(figures: Iterable[PublishedRate]) -> str:
    groups: dict[tuple[str, str], list[PublishedRate]] = {}
    for device, figure in bounded(figures):
        groups.setdefault((device.device, figure.dtype), []).append(figure)
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for (listed, dtype), found in sorted(groups.items()):
        best = max(found, key=lambda figure: (figure.rate, figure.reference))
        lowest = min(figure.rate for figure in found)
        statistic = f"the highest of {len(found)}, from {lowest:g}" if len(found) > 1 else ""
        kept = {"accelerator": best.accelerator, "vendor": best.vendor, "source": best.reference}
        writer.writerow({**kept, "device": listed, "dtype": dtype, "tflops": f"{best.rate:g}", "statistic": statistic})
    return file.getvalue()


def bounded(figures: Iterable[PublishedRate]) -> Iterator[tuple[NamedDevice, PublishedRate]]:
    """Figures of one device that its dense peak bounds."""
    for figure in figures:
        if OTHER_DEVICES.search(figure.accelerator):
            continue
        try:
            devices = find_devices(figure.device or figure.accelerator)
        except UsageError:  # not listed
            continue
        peak = listed_peak(devices[0].device, figure.dtype) if len(devices) == 1 else None
        if peak and figure.rate <= peak.rate * HEADROOM_UNKNOWN_CLOCK:
            yield devices[0], figure


if __name__ == "__main__":
    sys.exit(main())
