"""Writes results/published: figures that other people published, and the notice of their authors and licenses.

    python tools/published.py INPUT.csv [--output results/published]

INPUT.csv has a row per published figure, with the columns of ``INPUT_COLUMNS``. Its ``notes`` say what stands in the
way of a comparison, in words that ``REASONS`` knows. The tool prints the notes of the rows that it keeps: read them.
Rows with a license keep their conditions. Rows without one keep only the figure, what it is of, and its address.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from published_notice import SOURCES, notice

from mamf.contribution.published import COLUMNS, FIGURES, NOTICE, read_published
from mamf.files import make_folder, write_whole

ROOT = Path(__file__).resolve().parents[1]
INPUT_COLUMNS = (
    *("accelerator", "torch_device_name", "dtype", "tflops", "statistic", "m", "n", "k", "torch", "software"),
    *("power_limit_w", "date", "version_of_script", "source", "license_of_source", "notes"),
)
Row = Mapping[str, str]


class Reason(NamedTuple):
    """Why a row is left out: ``pattern`` is found in its ``column``."""

    text: str
    column: str
    pattern: str


#: The first that applies counts.
REASONS = (
    Reason("operands hold one constant: little power, a high clock", "notes", "hold one constant"),
    Reason("an instruction loop, not a matmul", "statistic", "instruction loop"),
    Reason("impossible: the device was not synchronized", "notes", "IMPOSSIBLE|no synchroni[sz]ation"),
    Reason("the source warns that the device caches results", "notes", "this device caches"),
    Reason("overclocked, or with a raised clock setting", "notes", "overclocked|vboost"),
    Reason("a slow card or a low power limit, says the note", "notes", "a slow card"),
    Reason("the source replaced the figure", "notes", "superseded|replaced later|interim|the table has"),
    Reason("repeats another row", "notes", "copied, not a second measurement|also in database"),
    Reason("tf32 on a device that computes it as float32", "notes", "no TF32 unit"),
    Reason("not a product in this dtype: weights are widened before they are multiplied", "notes", "W8A16"),
    Reason("sums in float16", "notes", "fp16 accumulation"),
    Reason(
        "without the vendor's fast library, or by kernels for another chip", "notes", "without hipBLASLt|HSA_OVERRIDE"
    ),
    Reason("far below other figures of the device, says the note", "notes", "far below other publications"),
    Reason(
        "not a maximum: a mean over shapes, or the lowest of a range", "statistic", "not a maximum|lowest of the range"
    ),
    Reason("the accelerator is not named", "accelerator", "^not (stated|shown)"),
    Reason("without an http or https address", "source", r"^(?!https?://)"),
)
#: Spellings of the licenses that are stated. Everything else ("none found", "not checked") states none.
LICENSES = {
    "MIT": "MIT",
    "MIT (text in the file)": "MIT",
    "Apache-2.0": "Apache-2.0",
    "CC-BY-SA-4.0": "CC-BY-SA-4.0",
}
#: The first pattern that is found in the accelerator's name.
VENDORS = {
    "NVIDIA": "nvidia|tesla",
    "AMD": "amd|radeon|steamdeck",
    "Intel": "intel",
    "Apple": "^apple",
    "Huawei": "^ascend",
    "Hygon": "dcu",
    "Moore Threads": "^mtt",
    "Samsung": "^samsung",
}
OTHER_VENDOR = "other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "results" / FIGURES.parent)
    options = parser.parse_args()
    rows = read_input(options.input)
    left_out = Counter(reason for row in rows if (reason := why_left_out(row)))
    kept = [row for row in rows if not why_left_out(row)]
    figures = figures_of(kept)
    left_out["the same accelerator, dtype, figure and address as another row"] = len(kept) - len(figures)
    make_folder(options.output)
    write_whole(options.output / FIGURES.name, csv_text(figures))
    write_whole(options.output / NOTICE.name, notice(figures, left_out))
    read_published(options.output.parent)
    print(f"{len(rows)} rows, {len(figures)} figures in {options.output}; notes of the kept rows:")
    for note, count in Counter(row["notes"] for row in kept if row["notes"]).most_common():
        print(f"{count:5} {note}")
    return 0


def read_input(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        if missing := set(INPUT_COLUMNS).difference(rows.fieldnames or ()):
            raise SystemExit(f"{path} has no columns {', '.join(sorted(missing))}")
        return list(rows)


def why_left_out(row: Row) -> str | None:
    """The text of the first reason that applies, or None."""
    return next((each.text for each in REASONS if re.search(each.pattern, row[each.column])), None)


def figures_of(rows: Iterable[Row]) -> list[dict[str, str]]:
    """Rows of the output, each once, in an order that does not depend on that of the input."""
    unique = {tuple(figure.values()): figure for figure in map(figure_of, rows)}
    return sorted(unique.values(), key=_order)


def _order(figure: Row) -> tuple[object, ...]:
    names = (figure[name].casefold() for name in ("vendor", "accelerator", "dtype"))
    return (*names, -float(figure["tflops"]), figure["source"], *figure.values())


def figure_of(row: Row) -> dict[str, str]:
    """What the output may hold of a row."""
    part = " (one GCD)" if row["notes"].startswith("one GCD") else ""
    figure = dict.fromkeys(COLUMNS, "")
    figure |= {name: row[name] for name in ("dtype", "tflops")}
    figure["accelerator"] = row["accelerator"] + part
    figure["vendor"] = vendor_of(row["accelerator"])
    # What follows the address is a remark on how it was read.
    figure["source"] = row["source"].split()[0]
    if license := LICENSES.get(row["license_of_source"]):
        require_attribution(figure["source"], license)
        figure |= {name: row[name] for name in ("statistic", "m", "n", "k", "date")}
        figure["device"] = row["torch_device_name"]
        figure["software"] = software_of(row)
        figure["power_limit_watts"] = row["power_limit_w"]
        figure["version"] = re.sub(r" \(later than .*\)", "", row["version_of_script"])
        figure["license"] = license
    return figure


def software_of(row: Row) -> str:
    """Torch, other software, and the environment variables that the notes name."""
    torch = f"torch {row['torch']}" if row["torch"] else ""
    return ", ".join(filter(None, [torch, row["software"], *re.findall(r"\b[A-Z_]+=\w+", row["notes"])]))


def vendor_of(accelerator: str) -> str:
    return next((name for name, found in VENDORS.items() if re.search(found, accelerator, re.I)), OTHER_VENDOR)


def require_attribution(address: str, license: str) -> None:
    """A license asks for the author's name: it stands in ``SOURCES``."""
    if not any(address.startswith(f"{source.address}/") and source.license == license for source in SOURCES):
        raise SystemExit(f"who published {address} under {license}? Add it to SOURCES in tools/published_notice.py")


def csv_text(figures: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(figures)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
