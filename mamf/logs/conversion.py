"""Converts run logs from schemas 1 to 3 to schema 4, for ``mamf results convert`` alone.

Samples, device and times stay as they are. Rows name their operation and problem, and the header says which schema the
log had (``converted_from``): sustained figures are medians, intervals cover one visit, and memory is that of the whole
process. Early logs of schema 4 that do not name their operation are completed in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError
from mamf.files import create_whole, write_whole
from mamf.logs.legacy import TIER, legacy_run
from mamf.logs.lines import lines_of, parse_records
from mamf.logs.run_log import CONVERTIBLE, MALFORMED, SCHEMA, describe_error, run_log_of, why_unreadable
from mamf.logs.writer import lock

_TARGET = 4
#: The values of fields that early rows lack.
_ROW = {
    "timer_overhead_seconds": 0.0,
    "details": {},
    "peak_memory_bytes": None,
    "repeatability": None,
    "phase": "",
    "round": 0,
}


def convert(path: Path, folder: Path | None = None) -> str:
    """Convert a log and return one line about it. A log that needs no conversion is left alone.

    The converted log takes the place of the original, which is kept as ``NAME.schemaN`` beside it; with ``folder``, it
    is written there and the original stays. Raises RunLogError for a file that is damaged or no run log, UsageError if
    a file would be overwritten or another process writes the log, RunLogWriteError if the disk is full. Then nothing
    has changed.
    """
    with path.open("rb") as file:
        lock(file.fileno(), path)
        schema, text = _converted(path)
        if not text:
            return f"{path}: schema {schema}, unchanged"
        beside = path.with_name(f"{path.name}.schema{schema}") if folder is None else folder / path.name
        create_whole(beside, file.read() if folder is None else text)
        if folder is not None:
            return f"{path}: schema {schema}, converted to {beside}"
        try:
            write_whole(path, text)
        except BaseException:
            beside.unlink()
            raise
    return f"{path}: schema {schema}, converted; the original is {beside}"


def _converted(path: Path) -> tuple[int, str]:
    """The schema of a log, and the converted log: empty if it needs no conversion. Raises RunLogError."""
    records = [record for _, record in parse_records(path, lines_of(path))]
    schema: Any = records[0].get("schema")
    if schema not in CONVERTIBLE and (why := why_unreadable(path, schema)):
        raise RunLogError(why)
    try:
        converted = _converted_records(records)
    except MALFORMED as error:
        raise RunLogError(f"{path}: {describe_error(error)}") from None
    if converted == records:
        return schema, ""
    if records[0].get("tier") == TIER:
        legacy_run(path, iter(converted))
    else:
        run_log_of(path, enumerate(converted, start=1))
    return schema, "".join(f"{json.dumps(record)}\n" for record in converted)


def _converted_records(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    header, *rest = records
    is_early = header["schema"] < _TARGET
    if header.get("tier"):  # logs of mamf-finder have not changed
        return [header | ({"schema": SCHEMA} if is_early else {}), *rest]
    plan = {"command": "sweep"} | header["plan"]
    if plan["command"] == "attention":
        plan = {"operation": "attention", "searches": []} | plan
    known = {"schema": _TARGET, "converted_from": header["schema"]} if is_early else {}
    return [header | known | {"plan": plan}, *(_missing(record, plan) | record for record in rest)]


def _missing(record: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the fields that an early record may lack."""
    problem = plan.get("problem")
    if record["record"] == "measurement":
        operation = "attention" if "seqlen_q" in record["shape"] else "matmul"
        return {"record": "measurement", "operation": operation, "problem": problem, **_ROW}
    return {"record": "ceiling", "problem": problem, "repeatability": None} if record["record"] == "ceiling" else {}
