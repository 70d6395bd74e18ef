"""Write mamf/published.csv: the highest figure that other people published for each device and dtype.

    python tools/published_peaks.py

The tool reads the figures in results/published/figures.csv, and the devices in mamf/peaks.csv. It uses a figure only if
the name of its accelerator means exactly one device, and if the figure is at most 25 % above the dense peak of this
device. Boards may run faster than their datasheets say, but not by more than that (``UNKNOWN_CLOCK_HEADROOM``).

mamf/published.csv contains only the figure, the accelerator, the vendor, the dtype and the address of the source. So
the licenses of the sources do not apply to it.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mamf.contribution.known_ceilings import PUBLISHED_FIGURES_FILE, SHIPPED_PUBLISHED_FIGURES_FILE
from mamf.errors import UsageError
from mamf.files import write_file_atomically
from mamf.peaks import UNKNOWN_CLOCK_HEADROOM, DeviceModel, find_device_models, find_peak_of_listed_device

ROOT = Path(__file__).resolve().parents[1]
#: Accelerators to leave out, because they share a row of peaks.csv or the name with another device.
OTHER_DEVICES = re.compile(r"\bCPU\b|\bA800\b")

COLUMNS = (
    *("accelerator", "device", "vendor", "dtype", "tflops", "statistic", "m", "n", "k", "software"),
    *("power_limit_watts", "date", "version", "source", "license"),
)
ADDRESS = re.compile(r"https?://[\w.-]+(:\d{1,5})?([/?#][!#-&(-;=?-\[\]_a-z~]*)?", re.ASCII)
#: The columns with numbers, and their types. The other columns contain texts as other people published them, so
#: escape them before you print them.
NUMBER_COLUMNS = {"tflops": float, "m": int, "n": int, "k": int, "power_limit_watts": float}
#: A row of figures.csv, by column. results/published/NOTICE.md describes the columns. An empty number is None.
Published = dict[str, Any]


def convert_row(row: Mapping[str, Any]) -> Published:
    """Return a row of figures.csv with its numbers converted.

    Raises TypeError, KeyError or ValueError if the row is malformed.
    """
    values = {**row, **{name: kind(row[name]) if row[name] else None for name, kind in NUMBER_COLUMNS.items()}}
    has_required_cells = all(row[name] for name in ("accelerator", "vendor", "dtype", "tflops"))
    if not has_required_cells or not all(
        values[name] is None or 0 < values[name] < math.inf for name in NUMBER_COLUMNS
    ):
        raise ValueError(f"a required cell is empty, or a number is not above 0: {row}")
    if not ADDRESS.fullmatch(row["source"]):
        raise ValueError(f"source: {row['source']!r} is not an http or https address")
    return values


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    write_file_atomically(ROOT / "mamf" / SHIPPED_PUBLISHED_FIGURES_FILE, format_csv(read_published(ROOT / "results")))


def read_published(results: Path) -> list[Published]:
    """Read ``published/figures.csv`` in a results folder. Return its rows, or an empty list if there is no such file.

    Raises UsageError if the file cannot be read or a row is malformed.
    """
    path = results / PUBLISHED_FIGURES_FILE
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [convert_row(row) for row in csv.DictReader(file, strict=True)]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, TypeError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def format_csv(figures: Iterable[Published]) -> str:
    """Return the text of mamf/published.csv: one line with the highest figure of each device and dtype."""
    groups: dict[tuple[str, str], list[Published]] = {}
    for device, figure in select_plausible_figures(figures):
        groups.setdefault((device.listed_name, figure["dtype"]), []).append(figure)
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for (listed, _), group in sorted(groups.items()):
        best = max(group, key=lambda figure: (figure["tflops"], figure["source"]))
        lowest = min(figure["tflops"] for figure in group)
        statistic = f"the highest of {len(group)}, from {lowest:g}" if len(group) > 1 else ""
        copied_columns = {name: best[name] for name in ("accelerator", "vendor", "dtype", "source")}
        writer.writerow({**copied_columns, "device": listed, "tflops": f"{best['tflops']:g}", "statistic": statistic})
    return file.getvalue()


def select_plausible_figures(figures: Iterable[Published]) -> Iterator[tuple[DeviceModel, Published]]:
    """Yield each figure that belongs to exactly one device and is plausible for its dense peak, with the device."""
    for figure in figures:
        if OTHER_DEVICES.search(figure["accelerator"]):
            continue
        try:
            devices = find_device_models(figure["device"] or figure["accelerator"])
        except UsageError:  # peaks.csv does not contain the device
            continue
        peak = find_peak_of_listed_device(devices[0].listed_name, figure["dtype"]) if len(devices) == 1 else None
        if peak and figure["tflops"] <= peak.rate * UNKNOWN_CLOCK_HEADROOM:
            yield devices[0], figure


if __name__ == "__main__":
    main()
