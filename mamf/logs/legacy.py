"""Write and read runs of mamf-finder, the predecessor of mamf, as run logs of the tier (kind of log) ``legacy``.

Figures of mamf-finder have no samples, no intervals and no verification, so they are never ranked together with
measurements of mamf. Their records are named ``reported``, not ``measurement``. A value that mamf-finder did not print
is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from mamf.errors import RunLogError
from mamf.files import create_file_atomically
from mamf.logs.records import make_json_values, read_record
from mamf.logs.run_log import (
    MALFORMED_LOG_ERRORS,
    SCHEMA_VERSION,
    ReadProgressCallback,
    describe_record_error,
    explain_unreadable_schema,
    parse_record,
    read_lines,
)
from mamf.machine.environment import describe_mamf_version
from mamf.machine.privacy import scrub_record, scrub_text

LEGACY_TIER = "legacy"
#: The names of the figures that mamf-finder prints: statistics of a timed loop, and the ceilings MAMF (in the burst
#: regime) and MSMF (sustained). ``stated`` is the figure of version 1, which does not say which statistic it prints.
FINDER_STATISTICS = ("stated", "mean", "median", "fastest", "MAMF", "MSMF")


class ReportedFigures(Struct, frozen=True):
    """A line of a mamf-finder log with one or several figures for one shape.

    - ``tflops``: the figures by name in FINDER_STATISTICS. ``shape``: MxNxK; None if the log does not say it.
    - ``stage``: the stage of mamf-finder that measured the figures: ``scout`` (quick first measurements), ``screen``
      (which chooses what to confirm) or ``confirm``; empty in versions without stages.
    - ``label``: the device of the figures, such as ``GPU 3``, in the summary of a node (all devices of a machine).
    - ``remarks``: what mamf-finder printed about the figures.
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
    """A run of mamf-finder, as its log describes it. A field is None or empty if the log does not contain its value.

    - ``version``: the version as printed, such as ``v4``.
    - ``started``: the start of the run in the local time of its machine, without a time zone.
    - ``dtype``: the dtype by its name in mamf. ``device_properties``: properties as printed, by name.
    - ``best``: the best figures in the summary of the log, by name in FINDER_STATISTICS.
    - ``tried``: the number of shapes that the run tried.
    - ``means``: the means of all figures in TFLOPS, by name: ``arithmetic`` and ``geometric``.
    - ``is_complete``: False if the run was interrupted. Its best figures then come from quick first measurements and
      are not ceilings.
    """

    version: str | None
    started: str | None = None
    command: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_properties: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[ReportedFigures, ...] = ()
    best: Mapping[str, ReportedFigures] = field(default_factory=dict)
    tried: int | None = None
    means: Mapping[str, float] = field(default_factory=dict)
    elapsed_seconds: float | None = None
    is_complete: bool = True
    remarks: tuple[str, ...] = ()


#: The fields of FinderRun that the summary record stores, and those that the header stores. Each row of the run is
#: stored in a separate record.
SUMMARY_FIELDS = ("tried", "elapsed_seconds", "means", "best")
HEADER_FIELDS = tuple(
    name for name in FinderRun.__dataclass_fields__ if name not in (*SUMMARY_FIELDS, "rows", "is_complete", "version")
)


def write_legacy_log(run: FinderRun, path: Path) -> None:
    """Write a run of mamf-finder as a run log of the tier ``legacy``.

    Raises UsageError if the file exists or cannot be created, and RunLogWriteError if the disk is full. Never leaves a
    partial file.
    """
    create_file_atomically(path, (f"{json.dumps(record, allow_nan=False)}\n" for record in _yield_records(run)))


def _yield_records(run: FinderRun) -> Iterator[dict[str, Any]]:
    """Yield the records of a run of mamf-finder, header first, without private texts."""
    yield {
        "record": "header",
        "schema": SCHEMA_VERSION,
        "tier": LEGACY_TIER,
        "tool": {"name": "mamf-finder", "version": run.version},
        "importer": describe_mamf_version(),
        **scrub_record({name: getattr(run, name) for name in HEADER_FIELDS}),
    }
    yield from ({"record": "reported", **_make_reported_record(row)} for row in run.rows)
    yield {
        "record": "summary",
        "status": "complete" if run.is_complete else "interrupted",
        **{name: getattr(run, name) for name in SUMMARY_FIELDS},
        "best": {name: _make_reported_record(each) for name, each in run.best.items()},
    }


def _make_reported_record(row: ReportedFigures) -> dict[str, Any]:
    return {
        **make_json_values(row),
        "label": scrub_text(row.label),
        "remarks": list(map(scrub_text, row.remarks)),
    }


def read_legacy_log_or_none(path: Path, on_read: ReadProgressCallback | None = None) -> FinderRun | None:
    """Read a log of the tier ``legacy``. Returns None if the log has another tier, because mamf itself wrote it.

    Raises RunLogError if the file cannot be read.
    """
    try:
        header = parse_record(next(read_lines(path)))
    except ValueError:
        return None
    return (
        build_legacy_run(path, map(parse_record, read_lines(path, on_read)))
        if header.get("tier") == LEGACY_TIER
        else None
    )


def build_legacy_run(path: Path, records: Iterator[dict[str, Any]]) -> FinderRun:
    """Build a run of mamf-finder from the records of a log.

    Raises a RunLogError that says what is wrong with the records.
    """
    try:
        header, *others = records
        if why := explain_unreadable_schema(path, header.get("schema")):
            raise RunLogError(why)
        if [each["record"] for each in (header, *others)] != ["header", *["reported"] * (len(others) - 1), "summary"]:
            raise ValueError("the imported log has no summary, or its records are in the wrong order")
        *rows, summary = others
        run = read_record(
            {
                **header,
                **{name: summary[name] for name in SUMMARY_FIELDS},
                "version": header["tool"]["version"],
                "rows": rows,
                "is_complete": summary["status"] == "complete",
            },
            FinderRun,
        )
        if unnamed := [name for name, best in run.best.items() if name not in best.tflops]:
            raise ValueError(f"missing field `best.{unnamed[0]}.tflops.{unnamed[0]}`")
    except RunLogError:
        raise
    except MALFORMED_LOG_ERRORS as error:
        raise RunLogError(f"{path}: {describe_record_error(error)}; import the original log again") from None
    return run
