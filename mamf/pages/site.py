"""``mamf results site``: static pages from the logs in results/, and for programs index.json and ceilings.csv, whose
fields docs/site.md describes.

The same logs give the same bytes. The folder holds a list of the site's files, so that a build replaces its own files
only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.rules import folder_of
from mamf.errors import UsageError
from mamf.files import make_folder, write_whole
from mamf.logs.records import significant_digits
from mamf.pages.site_data import CeilingLine, SiteData, read_site_data
from mamf.pages.site_pages import CSV, FEED, INDEX, device_page, index_page
from mamf.report.page import render_page
from mamf.report.text import csv_text

#: In the output folder: the files of the site, one per line.
LIST = ".mamf-site"
_DEVICES = "devices"
_LONGEST_NAME = 80


def build_site(root: Path, output: Path, logs: str | None = None) -> SiteData:
    """Write the site of the results folder ``root`` and return its data.

    ``logs``: the base address of the logs, by default a relative one. Files of an earlier build that are no longer part
    of the site are removed. Raises UsageError if ``output`` lies in ``root`` or holds files that no build wrote,
    RunLogError for a log that cannot be read, RunLogWriteError if the disk is full.
    """
    if root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UsageError(f"{output} lies in {root}, which holds logs only: name another folder")
    base, old = _base_of_logs(logs, root, output), _own_files(output)
    data = read_site_data(root)
    _write(output, dict(_site_files(data, base)), old)
    return data


def _base_of_logs(address: str | None, root: Path, output: Path) -> str:
    """Give the base address of logs: ``address``, or the relative path from the site to ``root``."""
    if address is None:
        try:
            return quote(Path(os.path.relpath(root.resolve(), output.resolve())).as_posix()) + "/"
        except ValueError:  # another drive
            raise UsageError(f"no relative link leads from {output} to {root}: name the address with --logs") from None
    if not address.lower().startswith(("https://", "http://")):
        raise UsageError(f"--logs {address}: name an address that begins with https:// or http://")
    return address.rstrip("/") + "/"


def _own_files(output: Path) -> set[str]:
    """List the files of an earlier build. Names that begin with a dot, such as .git, are left alone. Raises UsageError
    if there are other files.
    """
    listed = (output / LIST).read_text(errors="replace").splitlines() if (output / LIST).is_file() else []
    names = {path.relative_to(output) for path in output.rglob("*") if path.is_symlink() or not path.is_dir()}
    present = {name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)}
    foreign = sorted(name for name in present if name not in listed or (output / name).is_symlink())
    if foreign:
        raise UsageError(f"{output} holds files that are not from a site, such as {foreign[0]}: name an empty folder")
    return present


def _site_files(data: SiteData, logs: str) -> Iterator[tuple[str, str]]:
    pages = {name: f"{_DEVICES}/{file}" for name, file in page_names(run.device for run in data.runs).items()}
    below = logs if "://" in logs else f"../{logs}"
    for name, part in data.by_device().items():
        yield pages[name], render_page(device_page(name, part, below))
    yield CSV, feed_csv(data.lines)
    yield FEED, feed_json(data.lines)
    yield INDEX, render_page(index_page(data, logs, pages))


def page_names(devices: Iterable[str]) -> dict[str, str]:
    """Choose a file name for each device that every file system accepts; a hash keeps equal ones apart."""
    slugs = {name: folder_of(name) for name in sorted(set(devices))}
    unique = {slug for slug in slugs.values() if list(slugs.values()).count(slug) == 1 and len(slug) < _LONGEST_NAME}

    def file_name(name: str) -> str:
        digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
        return f"{slugs[name]}.html" if slugs[name] in unique else f"{slugs[name][:_LONGEST_NAME]}-{digest}.html"

    return {name: file_name(name) for name in slugs}


def _write(output: Path, texts: Mapping[str, str], old: set[str]) -> None:
    make_folder(output / _DEVICES)
    # First all names, so that a build after an interrupted one knows its files.
    write_whole(output / LIST, "\n".join(sorted(old | set(texts))))
    for name, text in texts.items():
        write_whole(output / name, text)
    for name in old - set(texts):
        (output / name).unlink()
    write_whole(output / LIST, "\n".join(sorted(texts)))


# -- for programs ------------------------------------------------------------------------------------------------------


#: Of the feed. It changes if a field is removed, renamed or gets another meaning; new fields leave it.
SCHEMA = 1
_TITLE = "Measured ceilings of matrix products by device, dtype and regime"


def feed_record(line: CeilingLine) -> dict[str, Any]:
    """Describe a ceiling for programs."""
    device = line.entry.header["device"] if line.entry else {}
    low, high = (line.interval.low, line.interval.high) if line.interval else (None, None)
    return {
        "device": line.device,
        "vendor": line.vendor,
        "dtype": line.dtype,
        "regime": line.regime,
        "tflops": significant_digits(line.tflops),
        "low": low and significant_digits(low),
        "high": high and significant_digits(high),
        "datasheet_tflops": line.peak and significant_digits(line.peak.rate),
        "tier": line.tier,
        "cards": len(line.cards),
        "lowest_tflops": significant_digits(line.cards[-1].tflops) if line.cards else None,
        "compute_units": device.get("compute_units"),
        "power_limit_watts": device.get("power_limit_watts"),
        "source": line.place.as_posix(),
        "software": dict(line.software),
    }


def feed_json(lines: Sequence[CeilingLine]) -> str:
    """Write index.json, with a line for each ceiling."""
    rows = ",".join(f"\n{json.dumps(feed_record(line), allow_nan=False)}" for line in lines)
    return f'{{"schema": {SCHEMA}, "title": {json.dumps(_TITLE)}, "ceilings": [{rows}\n]}}\n'


def feed_csv(lines: Sequence[CeilingLine]) -> str:
    """Write ceilings.csv: the same with software as text."""
    rows = [feed_record(line) | {"software": ", ".join(map(" ".join, line.software.items()))} for line in lines]
    return csv_text(rows)
