"""Runs of mamf-finder, the predecessor, as run logs of tier legacy. Facts missing from its logs stay unknown.

Its figures have no samples, intervals or verification, so they are never ranked with measurements of mamf: they are
``reported`` records instead of ``measurement`` records.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from mamf.errors import RunLogError
from mamf.files import create_whole
from mamf.logs.records import json_values, read_record
from mamf.logs.run_log import MALFORMED, SCHEMA, Seen, describe_error, lines_of, parse_record, why_unreadable
from mamf.machine.environment import tool_version
from mamf.machine.privacy import scrub, scrub_record

TIER = "legacy"
#: What mamf-finder calls its figures: of a loop (``stated``: by version 1, which does not say which), and its ceilings.
STATISTICS = ("stated", "mean", "median", "fastest", "MAMF", "MSMF")


class Reported(Struct, frozen=True):
    """One figure or line of figures as printed.

    ``tflops``: by name in STATISTICS. ``shape``: MxNxK, None where the log does not say which shape was tried.
    ``stage``: ``scout``, ``screen`` or ``confirm`` where the version has stages, else empty. ``label``: ``GPU 3`` in a
    node's summary.
    """

    tflops: Mapping[str, float]
    shape: Annotated[str, Meta(pattern=r"^[1-9]\d*x[1-9]\d*x[1-9]\d*$", max_length=32)] | None = None
    stage: str = ""
    label: str = ""
    watts: float | None = None
    clock_mhz: float | None = None
    celsius: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinderRun:
    """One run of mamf-finder. None, or empty: the log does not say.

    ``version``: as printed, such as ``v4``. ``started``: local time of that machine, without a zone.
    ``dtype``: mamf's name. ``device_properties``: as printed. ``best``: by name in STATISTICS, as the log sums it up.
    ``tried``: how many shapes by the summary. ``means``: ``arithmetic`` and ``geometric`` in TFLOPS. ``is_complete``:
    False when it was interrupted; its best are scouts then, and no ceilings.
    """

    version: str | None
    started: str | None = None
    command: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_properties: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Reported, ...] = ()
    best: Mapping[str, Reported] = field(default_factory=dict)
    tried: int | None = None
    means: Mapping[str, float] = field(default_factory=dict)
    elapsed_seconds: float | None = None
    is_complete: bool = True
    remarks: tuple[str, ...] = ()


#: Fields of a run that its summary holds; ``rows`` are records, and the others make its header.
OF_SUMMARY = ("tried", "elapsed_seconds", "means", "best")
OF_HEADER = tuple(
    name for name in FinderRun.__dataclass_fields__ if name not in (*OF_SUMMARY, "rows", "is_complete", "version")
)
_ENCODER = json.JSONEncoder(allow_nan=False)
# The same remark stands in thousands of rows.
_scrubbed = functools.lru_cache(4096)(scrub)
_NOT_WHOLE = "not a whole imported log"


def write_legacy_log(run: FinderRun, path: Path) -> None:
    """Raises UsageError when the file exists or cannot be created, RunLogWriteError when the disk is full; then nothing
    is left.
    """
    create_whole(path, (f"{_ENCODER.encode(record)}\n" for record in _records(run)))


def _records(run: FinderRun) -> Iterator[dict[str, Any]]:
    """What the log printed is scrubbed."""
    yield {
        "record": "header",
        "schema": SCHEMA,
        "tier": TIER,
        "tool": {"name": "mamf-finder", "version": run.version},
        "importer": tool_version(),
        **scrub_record({name: getattr(run, name) for name in OF_HEADER}),
    }
    for row in run.rows:
        yield {"record": "reported", **_reported_record(row)}
    best = {name: _reported_record(each) for name, each in run.best.items()}
    yield {
        "record": "summary",
        "status": "complete" if run.is_complete else "interrupted",
        **{name: getattr(run, name) for name in OF_SUMMARY},
        "best": best,
    }


def _reported_record(row: Reported) -> dict[str, Any]:
    return {**json_values(row), "label": _scrubbed(row.label), "remarks": list(map(_scrubbed, row.remarks))}


def read_legacy_or_none(path: Path, seen: Seen | None = None) -> FinderRun | None:
    """An imported run, or None for a log of mamf's own. Raises RunLogError when the file cannot be read."""
    try:
        header = parse_record(next(lines_of(path)))
    except ValueError:
        return None
    return legacy_run(path, map(parse_record, lines_of(path, seen))) if header.get("tier") == TIER else None


def legacy_run(path: Path, records: Iterator[dict[str, Any]]) -> FinderRun:
    """The run of the records in a file, each taken once. Raises RunLogError saying what is wrong with them."""
    try:
        header = next(records)
        if why := why_unreadable(path, header.get("schema")):
            raise RunLogError(why)
        if header["record"] != "header":
            raise ValueError(_NOT_WHOLE)
        rows: list[Reported] = []
        for record in records:
            if record["record"] != "reported":
                break
            rows.append(read_record(record, Reported))
        else:
            raise ValueError(_NOT_WHOLE)
        if record["record"] != "summary" or next(records, None) is not None:
            raise ValueError(_NOT_WHOLE)
        run = read_record(
            {
                **header,
                **{name: record[name] for name in OF_SUMMARY},
                "version": header["tool"]["version"],
                "rows": rows,
                "is_complete": record["status"] == "complete",
            },
            FinderRun,
        )
        if unnamed := [name for name, best in run.best.items() if name not in best.tflops]:
            raise ValueError(f"missing field `best.{unnamed[0]}.tflops.{unnamed[0]}`")
    except RunLogError:
        raise
    except MALFORMED as error:
        raise RunLogError(f"{path}: {describe_error(error)}; import the original again") from None
    return run
