"""Where a log belongs: results/<accelerator>/<what it is>-<when>.jsonl; the file of ceilings that the package ships."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mamf.contribution.collection import Collection
from mamf.contribution.confirming import part_confirmed
from mamf.contribution.entries import Entry, software
from mamf.logs.legacy import FinderRun
from mamf.logs.records import significant_digits
from mamf.measurement import group_pairs
from mamf.plans import EXPLAIN, FIND, MATMUL, ROOFLINE, SWEEP
from mamf.regime_names import CEILINGS

# Names of devices on Windows, which cannot be names of folders.
_RESERVED = re.compile(r"con|prn|aux|nul|(?:com|lpt)\d")


def folder_of(device_name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``nvidia-h100-80gb-hbm3``."""
    name = slug([device_name])
    if not name:
        return "unknown-accelerator"
    return f"{name}-accelerator" if _RESERVED.fullmatch(name) else name


def name_of(header: Mapping[str, Any]) -> str:
    """The file name of a run: command or operation, kernels of matmul, dtypes, directions, regimes and start (UTC)."""
    plan = header["plan"]
    command, problems = plan["command"], plan["problems"]
    is_of_products = plan["operation"] == MATMUL and command in (SWEEP, FIND)
    parts = [
        *([] if is_of_products else [plan["operation"]]),
        *([command] if is_of_products or command in (FIND, ROOFLINE, EXPLAIN) else []),
        *([header["kernel"]] if is_of_products and command == SWEEP else []),
        *(problem["dtype"] + ("-fast" if problem.get("fast_accumulation") else "") for problem in problems),
        *(problem["direction"] for problem in problems if "direction" in problem),
        *plan["regimes"],
        moment(header["started"]),
    ]
    return f"{slug(parts)}.jsonl"


def legacy_name_of(run: FinderRun) -> str:
    """The file name of an imported run of mamf-finder."""
    started = moment(run.started) if run.started else "undated"
    return f"{slug(['mamf-finder', run.version or '', run.dtype or '', started])}.jsonl"


def place_of(header: Mapping[str, Any]) -> Path:
    """Folder and name, from the results folder."""
    return Path(folder_of(header["device"]["name"]), name_of(header))


def lies_at(actual: Path, place: Path) -> bool:
    """Whether ``actual`` is this place, or the numbered place of another run that began in the same second."""
    own = re.fullmatch(re.escape(place.stem) + r"(-([2-9]|[1-9]\d+))?", actual.stem)
    return own is not None and actual.with_stem(place.stem) == place


def moment(iso: str) -> str:
    """An ISO time as in a file name; raises ValueError for any other text."""
    return datetime.fromisoformat(iso).strftime("%Y%m%d-%H%M%S")


def slug(parts: Iterable[str]) -> str:
    """Lower-case words joined by dashes; each part once."""
    texts = (re.sub(r"[^a-z0-9_]+", "-", part.lower()).strip("-") for part in dict.fromkeys(parts))
    return "-".join(text for text in texts if text)


_COLUMNS = (
    *("device", "compute_units", "power_limit_watts", "clock_mhz", "dtype", "regime"),
    *("tflops", "low", "high", "log", "shapes", "kernel", "cards", "lowest"),
    *("date", "software"),
)
_MOST_SHAPES = 6


def contributed_csv(collection: Collection) -> str:
    """The highest confirmed ceiling of each kind of device, dtype and regime that a complete find with normal data
    measured.
    """
    kept = filter(_counts, part_confirmed(collection.of(MATMUL), collection.submitters)[0])
    groups = group_pairs(((entry.device, *_build(entry), entry.dtype, entry.regime), entry) for entry in kept)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for key, found in sorted(groups.items()):
        fastest = sorted(found, key=lambda entry: entry.figure, reverse=True)
        best, shapes = fastest[0], list(dict.fromkeys(entry.shape for entry in fastest))[:_MOST_SHAPES]
        ends = (best.interval.low, best.interval.high) if best.interval else ()
        figures = [significant_digits(rate) for rate in (best.figure, *ends)]
        kernel = next((each.kernel for each in fastest if len(each.header["plan"]["kernels"]) > 1), "")
        cards: dict[object, float] = {}
        for entry in reversed(fastest):
            cards[entry.header["device"]["uuid_hash"]] = entry.figure
        lowest = significant_digits(min(cards.values()))
        clock_hz = max(each.header["device"]["max_clock_hz"] or 0 for each in found)
        known = (best.place.as_posix(), " ".join(shapes), kernel, len(cards), lowest)
        of_run = (best.header["started"][:10], software(best.header))
        writer.writerow([*key[:3], f"{clock_hz / 1e6:g}" if clock_hz else "", *key[3:], *figures, *known, *of_run])
    return buffer.getvalue()


def _counts(entry: Entry) -> bool:
    """Virtual machines give CPUs of all speeds one name, so that their figures are of no use elsewhere."""
    is_accelerator, data = entry.header["device"]["is_accelerator"], entry.header["plan"]["problems"][0]["data"]
    is_found = (
        entry.is_confirmed and entry.interval is not None and entry.tier == "complete" and entry.regime in CEILINGS
    )
    return is_found and is_accelerator and data == "normal"


def _build(entry: Entry) -> tuple[str, ...]:
    """Unit count and power limit: devices with one name exist in several builds."""
    device: dict[str, Any] = entry.header["device"]
    return tuple("" if each is None else f"{each:g}" for each in (device["compute_units"], device["power_limit_watts"]))
