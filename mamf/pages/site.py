"""``mamf results site``: static pages, a feed and downloads from the logs in results/. For programs: index.json with
its JSON Schema, and ceilings.csv; docs/site.md shows them.

The same logs give the same bytes. The folder holds a list of the site's files, so that a build replaces its own files
only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.known_ceilings import NOTICE
from mamf.contribution.rules import folder_of
from mamf.errors import UsageError
from mamf.files import make_folder, write_whole
from mamf.logs.records import significant_digits
from mamf.pages.site_data import ALL_TIERS, CeilingLine, SiteData, read_site_data
from mamf.pages.site_device import device_page
from mamf.pages.site_index import CSV, FEED, FEED_SCHEMA, INDEX, NOTICE_COPY, PUBLISHED, index_page, published_page
from mamf.report.page import render_page
from mamf.report.text import csv_text

#: In the output folder: the files of the site, one per line.
LIST = ".mamf-site"
_DEVICES = "devices"
_LONGEST_NAME = 80


def build_site(root: Path, output: Path, logs: str | None = None) -> SiteData:
    """Write the site of the results folder ``root``; give what it shows.

    ``logs``: the base address of the logs, by default a relative one. Files of an earlier build that are no longer part
    of the site are removed. Raises UsageError if ``output`` lies in ``root`` or holds files that no build wrote,
    RunLogError for a log that cannot be read, RunLogWriteError if the disk is full.
    """
    if root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UsageError(f"{output} lies in {root}, which holds logs only: name another folder")
    base, old = _base_of_logs(logs, root, output), _own_files(output)
    data = read_site_data(root)
    _write(output, dict(_site_files(data, root, base)), old)
    return data


def _base_of_logs(address: str | None, root: Path, output: Path) -> str:
    """What is put before the place of a log: ``address``, or the way from the site to ``root``."""
    if address is None:
        try:
            return quote(Path(os.path.relpath(root.resolve(), output.resolve())).as_posix()) + "/"
        except ValueError:  # another drive
            raise UsageError(f"no relative link leads from {output} to {root}: name the address with --logs") from None
    if not address.lower().startswith(("https://", "http://")):
        raise UsageError(f"--logs {address}: name an address that begins with https:// or http://")
    return address.rstrip("/") + "/"


def _own_files(output: Path) -> set[str]:
    """The files of an earlier build. Names that begin with a dot, such as .git, are left alone. Raises UsageError for
    any other.
    """
    listed = (output / LIST).read_text(errors="replace").splitlines() if (output / LIST).is_file() else []
    names = {path.relative_to(output) for path in output.rglob("*") if path.is_symlink() or not path.is_dir()}
    found = {name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)}
    foreign = sorted(name for name in found if name not in listed or (output / name).is_symlink())
    if foreign:
        raise UsageError(f"{output} holds files that are not from a site, such as {foreign[0]}: name an empty folder")
    return found


def _site_files(data: SiteData, root: Path, logs: str) -> Iterator[tuple[str, str]]:
    pages = {name: f"{_DEVICES}/{file}" for name, file in page_names(run.device for run in data.runs).items()}
    below = logs if "://" in logs else f"../{logs}"
    for name, part in data.by_device().items():
        yield pages[name], render_page(device_page(name, part, below))
    if data.published:
        yield PUBLISHED, render_page(published_page(data))
        yield NOTICE_COPY, (root / NOTICE).read_text(encoding="utf-8")
    yield CSV, feed_csv(data.lines)
    yield FEED, feed_json(data.lines)
    yield FEED_SCHEMA, feed_schema()
    yield INDEX, render_page(index_page(data, logs, pages))


def page_names(devices: Iterable[str]) -> dict[str, str]:
    """A file name for each device that any file system takes. Names that would share one have a hash at their end."""
    slugs = {name: folder_of(name) for name in sorted(set(devices))}
    unique = {slug for slug in slugs.values() if list(slugs.values()).count(slug) == 1 and len(slug) < _LONGEST_NAME}

    def file_name(name: str) -> str:
        digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
        return f"{slugs[name]}.html" if slugs[name] in unique else f"{slugs[name][:_LONGEST_NAME]}-{digest}.html"

    return {name: file_name(name) for name in slugs}


def _write(output: Path, texts: Mapping[str, str], old: set[str]) -> None:
    make_folder(output / _DEVICES)
    # First all names, so that the build after an interrupted one knows its files.
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

#: By name the type in JSON Schema, the description, and how it is read from a ceiling.
FIELDS: dict[str, tuple[Any, str, Callable[[CeilingLine], Any]]] = {
    "device": ("string", "The device's name as torch reports it", lambda line: line.device),
    "vendor": ("string", '"unknown" if no log names it', lambda line: line.vendor),
    "dtype": ("string", "torch's name, or mamf's for a scaled format", lambda line: line.dtype),
    "regime": (
        "string",
        "burst (highest clock), sustained (power limit, as in training), classic (the loop of mamf-finder); of tier "
        "legacy the statistic of mamf-finder",
        lambda line: line.regime,
    ),
    "tflops": (
        "number",
        "1e12 FLOP/s of the fastest card (int8: operations)",
        lambda line: significant_digits(line.tflops),
    ),
    "low": (
        *(["number", "null"], "Lower end of the 95 % repeat interval, TFLOPS"),
        lambda line: line.interval and significant_digits(line.interval.low),
    ),
    "high": (
        *(["number", "null"], "Upper end of the 95 % repeat interval, TFLOPS"),
        lambda line: line.interval and significant_digits(line.interval.high),
    ),
    "datasheet_tflops": (
        *(["number", "null"], "The datasheet's dense peak; null if no datasheet is listed"),
        lambda line: line.peak and significant_digits(line.peak.rate),
    ),
    "tier": (
        "string",
        "complete; unconfirmed (only one contributor measured it); interrupted; legacy (not checked). Use complete",
        lambda line: line.tier,
    ),
    "cards": ("integer", "How many cards were measured; 0 if unknown", lambda line: len(line.cards)),
    "lowest_tflops": (
        *(["number", "null"], "TFLOPS of the slowest card"),
        lambda line: significant_digits(line.cards[-1].tflops) if line.cards else None,
    ),
    "compute_units": (
        *(["integer", "null"], "Of the fastest card"),
        lambda line: line.entry and line.entry.header["device"]["compute_units"],
    ),
    "power_limit_watts": (
        *(["number", "null"], "Of the fastest card"),
        lambda line: line.entry and line.entry.header["device"]["power_limit_watts"],
    ),
    "source": ("string", "The log, as a path in results/", lambda line: line.place.as_posix()),
    "software": ("object", "Versions by name: torch, libraries, driver", lambda line: dict(line.software)),
}


def _record(line: CeilingLine) -> dict[str, Any]:
    return {name: read(line) for name, (_, _, read) in FIELDS.items()}


def feed_json(lines: Sequence[CeilingLine]) -> str:
    """index.json: a line per ceiling."""
    rows = ",".join(f"\n{json.dumps(_record(line), allow_nan=False)}" for line in lines)
    return f'{{"schema": {SCHEMA}, "title": {json.dumps(_TITLE)}, "ceilings": [{rows}\n]}}\n'


def feed_csv(lines: Sequence[CeilingLine]) -> str:
    """ceilings.csv: the same, software as text."""
    rows = [_record(line) | {"software": ", ".join(map(" ".join, line.software.items()))} for line in lines]
    return csv_text(rows) or ",".join(FIELDS) + "\n"


def feed_schema() -> str:
    """index.schema.json."""
    fields = {name: {"type": kind, "description": text} for name, (kind, text, _) in FIELDS.items()}
    fields["tier"]["enum"] = list(ALL_TIERS)
    fields["software"]["additionalProperties"] = {"type": "string"}
    ceilings = {"type": "array", "items": {"type": "object", "required": list(fields), "properties": fields}}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLE,
        "type": "object",
        "required": ["schema", "ceilings"],
        "properties": {"schema": {"const": SCHEMA}, "title": {"type": "string"}, "ceilings": ceilings},
    }
    return json.dumps(schema, indent=2) + "\n"
