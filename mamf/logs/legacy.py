"""Runs of mamf-finder, the ancestor, as run logs of tier legacy. What its logs leave open stays open.

Its figures have no samples, no interval and no verification behind them, so they are no measurements of mamf's and are
never ranked with them: a ``reported`` record stands where a run of mamf has a ``measurement``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mamf.environment import tool_version
from mamf.errors import RunLogError, RunLogWriteError
from mamf.logs.run_log import MALFORMED, SCHEMA, is_readable, parse_record, what, whole_lines
from mamf.logs.writer import RunLogWriter
from mamf.operations.matmul.shapes import MatmulShape

TIER = "legacy"
#: What mamf-finder calls its figures: of a loop (``stated``: by versions that do not say which), and its two ceilings.
STATISTICS = ("stated", "mean", "median", "fastest", "MAMF", "MSMF")


@dataclass(frozen=True)
class Reported:
    """One figure or line of figures as printed.

    ``tflops``: by name in STATISTICS. ``shape`` is None where the log does not say which shape was tried. ``stage``:
    ``scout``, ``screen`` or ``confirm`` where the version has stages, else empty. ``label``: ``GPU 3`` in a node's
    summary.
    """

    tflops: Mapping[str, float]
    shape: MatmulShape | None = None
    stage: str = ""
    label: str = ""
    watts: float | None = None
    clock_mhz: float | None = None
    celsius: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinderRun:
    """One run of mamf-finder. None, or empty: the log does not say.

    ``version``: the grammar of the log, as in ``v2g``. ``started``: local time of that machine, without a zone.
    ``dtype``: mamf's name. ``device_properties``: as printed. ``best``: by name in STATISTICS, as the log sums it up.
    ``tried``: how many shapes by the summary. ``means``: ``arithmetic`` and ``geometric`` in TFLOPS. ``is_complete``:
    False when it was interrupted; its best are scouts then, and no ceilings.
    """

    version: str | None
    started: str | None = None
    command: str | None = None
    dtype: str | None = None
    platform: str | None = None
    device: str | None = None
    device_properties: Mapping[str, str] = field(default_factory=dict)
    software: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rows: tuple[Reported, ...] = ()
    best: Mapping[str, Reported] = field(default_factory=dict)
    tried: int | None = None
    ranges: str | None = None
    means: Mapping[str, float] = field(default_factory=dict)
    elapsed_seconds: float | None = None
    is_complete: bool = True
    remarks: tuple[str, ...] = ()


_OF_ROWS = ("rows", "best", "tried", "means", "elapsed_seconds", "is_complete")


def write_legacy_log(run: FinderRun, path: Path) -> None:
    """Raises UsageError when the file exists or cannot be created, RunLogWriteError when the disk is full; then nothing
    is left.
    """
    fields = asdict(run)
    header = {name: value for name, value in fields.items() if name not in _OF_ROWS}
    tool = {"name": "mamf-finder", "version": header.pop("version")}
    summary = {
        "status": "complete" if run.is_complete else "interrupted",
        "tried": run.tried,
        "elapsed_seconds": run.elapsed_seconds,
        "means": dict(run.means),
        "best": {name: _reported_record(best) for name, best in run.best.items()},
    }
    writer = RunLogWriter.create(path, {"tier": TIER, "tool": tool, "importer": tool_version(), **header})
    try:
        with writer:
            for row in run.rows:
                writer.write("reported", _reported_record(row))
            writer.write("summary", summary)
    except RunLogWriteError:
        path.unlink()
        raise


def _reported_record(row: Reported) -> dict[str, Any]:
    return {**asdict(row), "shape": None if row.shape is None else str(row.shape)}


def is_legacy(header: Mapping[str, Any]) -> bool:
    return header.get("tier") == TIER


def read_legacy_or_none(path: Path) -> FinderRun | None:
    """An imported run, or None for a log of mamf's own. Raises RunLogError when the file cannot be read."""
    try:
        header = parse_record(whole_lines(path)[0])
    except ValueError:
        return None
    return read_legacy_log(path) if is_legacy(header) else None


def read_legacy_log(path: Path) -> FinderRun:
    """Raises RunLogError saying what is wrong with it."""
    try:
        header, *rows = map(parse_record, whole_lines(path))
        summary = rows.pop() if rows else {}
        if not is_readable(header.get("schema")) or header["record"] != "header" or summary.get("record") != "summary":
            raise ValueError(f"not a whole imported log of a schema up to {SCHEMA}")
        if any(row["record"] != "reported" for row in rows):
            raise ValueError("a record that is no reported figure")
        return _run(header, rows, summary)
    except RunLogError:
        raise
    except MALFORMED as error:
        raise RunLogError(f"{path}: {what(error)}; import the original again") from None


def _run(header: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any]) -> FinderRun:
    known = {name: header[name] for name in FinderRun.__dataclass_fields__ if name in header}
    return FinderRun(
        **known
        | {
            "version": header["tool"]["version"],
            "notes": tuple(header["notes"]),
            "remarks": tuple(header["remarks"]),
            "rows": tuple(_reported(row) for row in rows),
            "best": {name: _reported(best) for name, best in summary["best"].items()},
            "tried": summary["tried"],
            "means": summary["means"],
            "elapsed_seconds": summary["elapsed_seconds"],
            "is_complete": summary["status"] == "complete",
        }
    )


def _reported(record: Mapping[str, Any]) -> Reported:
    known = {name: record[name] for name in Reported.__dataclass_fields__}
    shape = record["shape"]
    return Reported(**known | {"shape": shape and MatmulShape.parse(shape), "remarks": tuple(record["remarks"])})
