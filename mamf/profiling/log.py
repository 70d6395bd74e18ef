"""A profile as a run log of tier ``profile``: a record for each class, module, kernel, part of memory; a summary.

A profile has no samples, so it is not a measurement: rankings, comparisons and result tables ignore it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import Struct

from mamf.ceilings.share import KnownCeiling
from mamf.errors import RunLogError
from mamf.logs.lines import lines_of, parse_record
from mamf.logs.records import read_record, utc_now
from mamf.logs.run_log import MALFORMED, describe_error, why_unreadable
from mamf.logs.writer import RunLogWriter
from mamf.machine.environment import describe_environment, tool_version
from mamf.profiling.breakdown import ClassRow
from mamf.profiling.profile import KernelRow, MemoryRow, Profile

TIER = "profile"
#: The records of rows, by the field of a Profile that has them.
_RECORDS: Mapping[str, tuple[str, type]] = {
    "profile": ("classes", ClassRow),
    "kernel": ("kernels", KernelRow),
    "memory": ("memory", MemoryRow),
    "known_ceiling": ("ceilings", KnownCeiling),
    "module": ("modules", ClassRow),
}
_OF_SUMMARY = ("seconds", "steps", "device", "is_of_device", "unprofiled_step_seconds", "notes")


class ProfileHeader(Struct):
    """The fields that every header of a profile has."""

    schema: int
    tool: dict[str, Any]
    command: str
    started: str
    script: str
    environment: dict[str, Any]


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
                writer.write(record, asdict(row))
        writer.write("summary", {name: getattr(profile, name) for name in _OF_SUMMARY})
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
        script = read_record(header, ProfileHeader).script
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 (an error names it)
            record = parse_record(line)
            if record["record"] == "summary":
                return script, _profile(rows, record)
            if record["record"] in _RECORDS:
                field, kind = _RECORDS[record["record"]]
                rows[field].append(read_record(record, kind))
        raise ValueError("the log has no summary: mamf was killed while it wrote it")
    except MALFORMED as error:
        raise RunLogError(f"{path}, line {number}: {describe_error(error)}") from None


def _profile(rows: Mapping[str, list[Any]], summary: dict[str, Any]) -> Profile:
    profile = read_record({"classes": (), **{name: summary[name] for name in _OF_SUMMARY}, **rows}, Profile)
    durations = profile.seconds, profile.steps, profile.unprofiled_step_seconds
    if any(each is not None and each <= 0 for each in durations):
        raise ValueError("a profile of no step")
    return profile
