"""A profile as a run log of tier ``profile``: a record for each class, module, kernel, part of memory; a summary. With
``--ranks all`` a folder has a log for each rank.

A profile has no samples, so it is not a measurement: rankings, comparisons and result tables ignore it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import Struct

from mamf.errors import RunLogError, UsageError
from mamf.files import create_whole
from mamf.logs.records import known_ceiling_from_record, known_ceiling_record, read_record, utc_now
from mamf.logs.run_log import MALFORMED, SCHEMA, describe_error, lines_of, parse_record, why_unreadable
from mamf.logs.writer import as_line
from mamf.machine.environment import describe_environment, tool_version
from mamf.measurement import Rate
from mamf.profiling.profile import ClassRow, DtypeRow, KernelRow, MemoryRow, Profile

TIER = "profile"
RANK_LOGS = "rank-*.jsonl"
#: The records of rows, with the field of a Profile that has them.
_RECORDS: Mapping[str, tuple[str, type]] = {
    "profile": ("classes", ClassRow),
    "kernel": ("kernels", KernelRow),
    "memory": ("memory", MemoryRow),
    "known_ceiling": ("ceilings", Rate),
    "module": ("modules", ClassRow),
    "dtype": ("dtypes", DtypeRow),
}
_OF_SUMMARY = ("seconds", "steps", "device", "is_of_device", "unprofiled_step_seconds", "notes")
#: The script and the profile of each rank.
Ranks = Mapping[int, tuple[str, Profile]]


class ProfileHeader(Struct):
    """The fields that every header of a profile has."""

    schema: int
    tool: dict[str, Any]
    command: str
    started: str
    script: str
    environment: dict[str, Any]


def write_profile(path: Path, command: str, script: str, profile: Profile) -> Path:
    """Write the whole log at once, so that no partial log is left. Returns its path, which has a number if another
    program made this file meanwhile. Raises UsageError when it cannot be made.
    """
    header = {
        "schema": SCHEMA,
        "tier": TIER,
        "tool": tool_version(),
        "command": command,
        "started": utc_now(),
        "script": script,
        "environment": describe_environment(),
    }
    lines = [as_line("header", header)]
    for record, (field, _) in _RECORDS.items():
        for row in getattr(profile, field):
            values = known_ceiling_record(row) if isinstance(row, Rate) else asdict(row)
            lines.append(as_line(record, values))
    lines.append(as_line("summary", {name: getattr(profile, name) for name in _OF_SUMMARY}))
    return create_whole(path, b"".join(lines), is_numbered=True)


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
                rows[field].append(known_ceiling_from_record(record) if kind is Rate else read_record(record, kind))
        raise ValueError("the log has no summary: its end was cut off")
    except MALFORMED as error:
        raise RunLogError(f"{path}, line {number}: {describe_error(error)}") from None


def _profile(rows: Mapping[str, list[Any]], summary: dict[str, Any]) -> Profile:
    profile = read_record({"classes": (), **{name: summary[name] for name in _OF_SUMMARY}, **rows}, Profile)
    durations = profile.seconds, profile.steps, profile.unprofiled_step_seconds
    if any(each is not None and each <= 0 for each in durations):
        raise ValueError("a profile of no step")
    return profile


def rank_log(folder: Path, rank: int) -> Path:
    return folder / RANK_LOGS.replace("*", str(rank))


def rank_logs(folder: Path) -> dict[int, Path]:
    """Whole or not, by rank."""
    names = {path: path.stem.removeprefix("rank-") for path in folder.glob(RANK_LOGS)}
    return {int(name): path for path, name in names.items() if name.isdecimal() and len(name) < 6}


def read_rank_logs(folder: Path) -> Ranks:
    """Without those that are not whole. Raises UsageError for a folder without any."""
    ranks: dict[int, tuple[str, Profile]] = {}
    for rank, path in sorted(rank_logs(folder).items()):
        with suppress(RunLogError):
            if profiled := read_profile_or_none(path):
                ranks[rank] = profiled
    if not ranks:
        raise UsageError(f"{folder} holds no profiles of ranks ({RANK_LOGS})")
    return ranks
