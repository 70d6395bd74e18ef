"""A profile as a run log of tier ``profile``: a record for each class, module, kernel, part of memory; a summary.

A profile has no samples, so it is not a measurement: rankings, comparisons and result tables ignore it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from mamf.errors import RunLogError
from mamf.logs.lines import lines_of, parse_record
from mamf.logs.records import known_ceiling_from_record, known_ceiling_record, utc_now
from mamf.logs.run_log import MALFORMED, describe_error, why_unreadable
from mamf.logs.schema import KNOWN_CEILING
from mamf.logs.validator import ANY_NAME, Nullable, require
from mamf.logs.writer import RunLogWriter
from mamf.machine.environment import describe_environment, tool_version
from mamf.profiling.breakdown import ClassRow
from mamf.profiling.profile import KernelRow, MemoryRow, Profile
from mamf.rate import Rate

TIER = "profile"
_HEADER = {"schema": int, "tool": {}, "command": str, "started": str, "script": str, "environment": {}}
#: The records of rows, with the field of a Profile that has them.
_RECORDS: Mapping[str, tuple[str, type]] = {
    "profile": ("classes", ClassRow),
    "kernel": ("kernels", KernelRow),
    "memory": ("memory", MemoryRow),
    "known_ceiling": ("ceilings", Rate),
    "module": ("modules", ClassRow),
}
_FIELDS: Mapping[object, Any] = {
    float | None: Nullable(float),
    int | None: Nullable(int),
    Mapping[str, int]: {ANY_NAME: int},
    tuple[str, ...]: [str],
}
_SUMMARY_FIELDS = ("seconds", "steps", "device", "is_of_device", "unprofiled_step_seconds", "notes")


@functools.cache
def _schema(kind: type) -> dict[str, Any]:
    """The fields of a row, or of the summary of a Profile."""
    if kind is Rate:
        return KNOWN_CEILING
    types = get_type_hints(kind)
    names = _SUMMARY_FIELDS if kind is Profile else types
    return {name: _FIELDS.get(types[name], types[name]) for name in names}


def write_profile(path: Path, command: str, script: str, profile: Profile) -> Path:
    """Returns where the log is: a path with a number if another program made this file meanwhile.

    Raises UsageError when it cannot be made.
    """
    header = {
        "tier": TIER,
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "script": script,
        "environment": describe_environment(),
    }
    with RunLogWriter.create(path, header, is_numbered=True) as writer:
        for record, (field, _) in _RECORDS.items():
            for row in getattr(profile, field):
                writer.write(record, known_ceiling_record(row) if isinstance(row, Rate) else asdict(row))
        writer.write("summary", {name: getattr(profile, name) for name in _SUMMARY_FIELDS})
        return writer.path


def read_profile_or_none(path: Path) -> tuple[str, Profile] | None:
    """The script and its profile, or None for a log of another kind. Raises RunLogError when it cannot be read."""
    lines = list(lines_of(path))
    try:
        header = parse_record(lines[0])
    except ValueError:
        return None
    if header.get("tier") != TIER:
        return None
    if why := why_unreadable(path, header.get("schema")):
        raise RunLogError(why)
    number, rows = 1, defaultdict[str, list[Any]](list)
    try:
        require(header, _HEADER)
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 (an error names it)
            record = parse_record(line)
            if record["record"] == "summary":
                return header["script"], _profile(rows, record)
            if record["record"] in _RECORDS:
                field, kind = _RECORDS[record["record"]]
                require(record, _schema(kind))
                values = {name: record[name] for name in _schema(kind)}
                rows[field].append(known_ceiling_from_record(record) if kind is Rate else kind(**values))
        raise ValueError("the log has no summary: mamf was killed while it wrote it")
    except MALFORMED as error:
        raise RunLogError(f"{path}, line {number}: {describe_error(error)}") from None


def _profile(rows: Mapping[str, list[Any]], summary: dict[str, Any]) -> Profile:
    require(summary, _schema(Profile))
    if not all(summary[name] is None or summary[name] > 0 for name in ("seconds", "steps", "unprofiled_step_seconds")):
        raise ValueError("a profile of no step")
    known: dict[str, Any] = {name: summary[name] for name in _SUMMARY_FIELDS} | {"notes": tuple(summary["notes"])}
    return Profile(**known | {field: tuple(found) for field, found in rows.items()})
