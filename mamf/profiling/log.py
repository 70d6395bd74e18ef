"""Write and read the logs of ``mamf profile``, and make its reports.

The header of a profile's log contains ``"tier": "profile"``, which distinguishes the log from other logs. The log has
records of classes, modules, kernels, memory and dtypes, and a summary. With ``--ranks all``, a folder has one log per
rank. Rankings, comparisons and result tables ignore profiles, because profiles have no samples.

There are two reports. One shows a single profile (classes, modules, top kernels, memory). The other compares all ranks
and names the ranks that the others wait for.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError, UsageError
from mamf.files import create_file_atomically
from mamf.logs.records import get_utc_time, make_known_ceiling_record, read_known_ceiling_record, read_record
from mamf.logs.run_log import (
    MALFORMED_LOG_ERRORS,
    SCHEMA_VERSION,
    describe_record_error,
    explain_unreadable_schema,
    parse_record,
    read_lines,
)
from mamf.logs.writer import encode_record
from mamf.machine.environment import describe_environment, describe_mamf_version
from mamf.measurement import IDLE_LABEL, Rate
from mamf.profiling.classes import COMMUNICATION, UNCLASSIFIED
from mamf.profiling.profile import PEAK_MEMORY, ClassRow, DtypeRow, KernelRow, MemoryRow, Profile
from mamf.report.document import (
    Answer,
    Block,
    Column,
    Document,
    Lines,
    Table,
    format_count,
    format_four_digits,
    format_percent,
    format_rate,
    make_rate_column,
)
from mamf.report.shares import describe_known_ceilings

PROFILE_TIER = "profile"
RANK_LOG_PATTERN = "rank-*.jsonl"
#: For each kind of record in a profile's log, the field of Profile that contains these records, and their Python type.
_FIELD_AND_TYPE_BY_RECORD: Mapping[str, tuple[str, type]] = {
    "profile": ("classes", ClassRow),
    "kernel": ("kernels", KernelRow),
    "memory": ("memory", MemoryRow),
    "known_ceiling": ("ceilings", Rate),
    "module": ("modules", ClassRow),
    "dtype": ("dtypes", DtypeRow),
}
_SUMMARY_FIELDS = ("seconds", "steps", "device", "is_of_device", "unprofiled_step_seconds", "notes")
#: Types of the fields that the header of every profile's log has, by field name.
_HEADER_TYPES: Mapping[str, type] = {"tool": dict, "command": str, "started": str, "script": str, "environment": dict}
#: For each rank, the name of the profiled script and the profile.
ProfilesByRank = Mapping[int, tuple[str, Profile]]


def write_profile(path: Path, command: str, script: str, profile: Profile) -> Path:
    """Write a profile's log atomically, so that a crash leaves no partial log. Return the path of the log.

    If ``path`` exists, append a number to the file's name. Raises UsageError if the file cannot be created.
    """
    header = {
        "schema": SCHEMA_VERSION,
        "tier": PROFILE_TIER,
        "tool": describe_mamf_version(),
        "command": command,
        "started": get_utc_time(),
        "script": script,
        "environment": describe_environment(),
    }
    lines = [encode_record("header", header)]
    for record, (field, _) in _FIELD_AND_TYPE_BY_RECORD.items():
        for row in getattr(profile, field):
            lines.append(
                encode_record(record, make_known_ceiling_record(row) if isinstance(row, Rate) else asdict(row))
            )
    lines.append(encode_record("summary", {name: getattr(profile, name) for name in _SUMMARY_FIELDS}))
    return create_file_atomically(path, b"".join(lines), may_add_number_to_name=True)


def read_profile_or_none(path: Path) -> tuple[str, Profile] | None:
    """Return the script's name and the profile in a profile's log; return None if it is not a log of a profile.

    Raises RunLogError if the log of a profile is damaged or has an unknown version.
    """
    lines, header = list(read_lines(path)), dict[str, Any]()
    with suppress(ValueError):
        header = parse_record(lines[0])
    if header.get("tier") != PROFILE_TIER:
        return None
    if reason := explain_unreadable_schema(path, header.get("schema")):
        raise RunLogError(reason)
    line_number, rows = 1, defaultdict[str, list[Any]](list)
    try:
        for name, expected_type in _HEADER_TYPES.items():
            read_record(header[name], expected_type, name)
        for line_number, line in enumerate(lines[1:], start=2):  # noqa: B007 (an error message uses it)
            record = parse_record(line)
            if record["record"] == "summary":
                return header["script"], _make_profile_from_records(rows, record)
            if record["record"] in _FIELD_AND_TYPE_BY_RECORD:
                field, expected_type = _FIELD_AND_TYPE_BY_RECORD[record["record"]]
                rows[field].append(
                    read_known_ceiling_record(record) if expected_type is Rate else read_record(record, expected_type)
                )
        raise ValueError("the log has no summary, because its end was cut off: run 'mamf profile' again")
    except MALFORMED_LOG_ERRORS as error:
        raise RunLogError(f"{path}, line {line_number}: {describe_record_error(error)}") from None


def _make_profile_from_records(rows: Mapping[str, list[Any]], summary: dict[str, Any]) -> Profile:
    profile = read_record({"classes": (), **{name: summary[name] for name in _SUMMARY_FIELDS}, **rows}, Profile)
    if any(
        each is not None and each <= 0 for each in (profile.seconds, profile.steps, profile.unprofiled_step_seconds)
    ):
        raise ValueError("steps and seconds must be above 0")
    return profile


def get_rank() -> int:
    """Return the rank of this process from the environment variable RANK, which torchrun sets; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def get_rank_log_path(folder: Path, rank: int) -> Path:
    return folder / RANK_LOG_PATTERN.replace("*", str(rank))


def find_rank_logs(folder: Path) -> dict[int, Path]:
    """Return the path of each rank's log in a folder, by rank, even if the log is incomplete."""
    return {
        int(name): path
        for path in folder.glob(RANK_LOG_PATTERN)
        if (name := path.stem.removeprefix("rank-")).isdecimal() and len(name) < 6
    }


def read_rank_logs(folder: Path) -> ProfilesByRank:
    """Read the logs of all ranks in a folder. Ignore damaged logs. Raises UsageError if no log is readable."""
    profiles_by_rank: dict[int, tuple[str, Profile]] = {}
    for rank, path in sorted(find_rank_logs(folder).items()):
        with suppress(RunLogError):
            if script_and_profile := read_profile_or_none(path):
                profiles_by_rank[rank] = script_and_profile
    if not profiles_by_rank:
        raise UsageError(
            f"{folder} has no profiles of ranks: give a folder with {RANK_LOG_PATTERN} from 'mamf profile --ranks all'"
        )
    return profiles_by_rank


# Maximum and minimum number of characters to print of a name. Names of C++ kernels may have a thousand characters.
_MAX_NAME_LENGTH, _MIN_NAME_LENGTH = 100, 24
# Times of at most this many seconds are rounding errors and count as 0.
_MAX_ROUNDING_ERROR_SECONDS = 1e-12
# If mamf cannot count the FLOP of more than this share of a class's time, the report says for how much time it can.
_MIN_REPORTED_UNCOUNTED_SHARE = 0.01
#: A rank is a straggler if its step is longer than that of the fastest rank, and the difference is at least this share
#: of its step. Time in which only communication runs does not count. On two H200, the step times of ranks with equal
#: work differed by 1.3 to 2.9 % over three steps.
_MIN_STRAGGLER_SHARE = 0.05


def _shorten_name(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 3]}..."


def make_profile_document(script: str, profile: Profile, max_rows: int | None = 10) -> Document:
    """Make the report of a profile. In csv, the report has only the table of classes.

    ``max_rows``: the maximum number of modules and of kernels to show; None shows all.
    """
    dtype_columns: list[Column[DtypeRow]] = [
        Column("part", "part", attrgetter("name"), is_left_aligned=True),
        Column("dtype", "dtype", attrgetter("dtype"), is_left_aligned=True),
        Column("count", "tensors in all steps", attrgetter("count")),
    ]
    blocks: list[Block] = [
        Lines([*_describe_steps(script, profile), *describe_known_ceilings(profile.ceilings)]),
        Table(_make_profile_columns(profile), profile.classes, key="classes"),
        Table(_make_profile_columns(profile, "module"), profile.modules, key="modules", max_shown_rows=max_rows),
        Table(_make_kernel_columns(profile), profile.kernels, key="kernels", max_shown_rows=max_rows),
        Table(_make_memory_columns(profile), profile.memory, key="memory"),
        Table(dtype_columns, profile.dtypes, key="dtypes"),
        Lines(list(_yield_table_remarks(profile))),
        Answer([describe_largest_classes(profile)]),
    ]
    derived_fields = ("flop", "tflops", "mamfu", "whole_seconds", "busy_seconds")
    data = {
        "script": script,
        **{name: getattr(profile, name) for name in (*_SUMMARY_FIELDS, *derived_fields)},
        "ceilings": list(map(make_known_ceiling_record, profile.ceilings)),
    }
    return Document(f"Profile of {script}", blocks, data)


def _describe_steps(script: str, profile: Profile) -> Iterator[str]:
    device_name = describe_device(profile)
    if profile.steps is None:
        yield (
            f"{script} on {device_name}: {format_milliseconds(profile.seconds)} ms in total; "
            "the trace does not mark its steps"
        )
        return
    yield (
        f"{script} on {device_name}: {format_count(profile.steps, 'step')} of "
        f"{format_milliseconds(profile.step_seconds)} ms with the profiler"
    )
    if profile.unprofiled_step_seconds is not None:
        percent = 100 * (profile.step_seconds / profile.unprofiled_step_seconds - 1)
        yield (
            f"{format_milliseconds(profile.unprofiled_step_seconds)} ms without the profiler, in the steps right "
            f"before: the profiler makes a step {abs(percent):.0f} % {'longer' if percent >= 0 else 'shorter'}"
        )
    if profile.tflops is not None:
        mamfu_note = "" if profile.mamfu is None else f", {100 * profile.mamfu:.1f} % MAMFU"
        step_time_note = "" if profile.unprofiled_step_seconds is None else ", from the step time without the profiler"
        yield (
            f"a step needs {format_rate(profile.flop / profile.steps / 1e12, 'TFLOP')}: "
            f"{format_rate(profile.tflops, 'TFLOPS')}{mamfu_note}{step_time_note}"
        )


def _make_profile_columns(profile: Profile, row_kind: str = "class") -> list[Column[ClassRow]]:
    """Return the columns of the table of classes, or of modules if ``row_kind`` is ``module``.

    The printed table has values per step; csv and json have sums over all profiled steps.
    """
    steps = profile.steps or 1
    rows = profile.classes if row_kind == "class" else profile.modules
    return [
        Column(
            row_kind,
            row_kind,
            lambda row: row.name,
            _shorten_name,
            is_left_aligned=True,
            min_characters=_MIN_NAME_LENGTH,
        ),
        Column("share", "share %", lambda row: row.visible / profile.whole_seconds, format_percent),
        Column("step_seconds", "ms", lambda row: row.visible / steps, format_milliseconds),
        Column(
            "",
            "hidden ms",
            lambda row: row.hidden / steps if row.hidden > _MAX_ROUNDING_ERROR_SECONDS else None,
            format_milliseconds,
            3,
        ),
        Column(
            "",
            "calls" if row_kind == "class" else "",
            lambda row: None if row.name == IDLE_LABEL else row.calls / steps,
            drop_priority=3,
        ),
        Column("calls", "", lambda row: row.calls),
        Column("visible_seconds", "", lambda row: row.visible),
        Column("hidden_seconds", "", lambda row: row.hidden),
        Column("flop", "", lambda row: row.total_flop),
        Column("dtypes", "", lambda row: " ".join(row.flop)),
        Column("multiplying_seconds", "", lambda row: row.multiplying),
        make_rate_column("", "TFLOP", lambda row: row.total_flop / steps / 1e12 or None, rows, drop_priority=4),
        make_rate_column("rate_tflops", "TFLOPS", lambda row: row.tflops, rows, drop_priority=2),
        Column("mamfu", "MAMFU", lambda row: row.mamfu, format_percent, 1),
    ]


def _make_kernel_columns(profile: Profile) -> list[Column[KernelRow]]:
    row_kind, steps = "kernel" if profile.is_of_device else "operation", profile.steps or 1
    return [
        Column(
            "kernel",
            row_kind,
            lambda row: row.name,
            _shorten_name,
            is_left_aligned=True,
            min_characters=_MIN_NAME_LENGTH,
        ),
        Column("class", "class", lambda row: row.class_name, drop_priority=2, is_left_aligned=True),
        Column("", "calls", lambda row: row.calls / steps, drop_priority=3),
        Column("", "ms", lambda row: row.seconds / steps, format_milliseconds),
        Column("count", "", attrgetter("calls")),
        Column("seconds", "", attrgetter("seconds")),
        Column("share", "share %", lambda row: row.seconds / profile.whole_seconds, format_percent),
    ]


def _make_memory_columns(profile: Profile) -> list[Column[MemoryRow]]:
    peak = next((row.nbytes for row in profile.memory if row.name == PEAK_MEMORY), None)
    return [
        Column("part", "memory", lambda row: row.name, is_left_aligned=True),
        Column("bytes", "MiB", lambda row: row.nbytes, lambda nbytes: f"{nbytes / 2**20:.4g}"),
        Column("share_of_peak", "% of the peak", lambda row: peak and row.nbytes and row.nbytes / peak, format_percent),
    ]


def format_milliseconds(seconds: float) -> str:
    return format_four_digits(seconds * 1e3) if seconds else "0"


def describe_device(profile: Profile) -> str:
    return profile.device or ("an unknown device" if profile.is_of_device else "the CPU")


def describe_largest_classes(profile: Profile) -> str:
    """Return one line with the three classes that have the largest shares of a step, and their MAMFU (FLOP rate as a
    share of the matmul ceiling), if known. If steps were uneven, the idle time is an upper bound.
    """
    shares = [
        f"{row.name} {'at most ' if profile.is_uneven and row.name == IDLE_LABEL else ''}"
        f"{100 * row.visible / profile.whole_seconds:.1f} %"
        + (f" (MAMFU {100 * row.mamfu:.1f} %)" if row.mamfu else "")
        for row in sorted(profile.classes, key=lambda row: -row.visible)
    ]
    return f"largest parts of {'a step' if profile.steps else 'the time'}: {', '.join(shares[:3])}"


def _yield_table_remarks(profile: Profile) -> Iterator[str]:
    per_step_note = "calls, times and FLOP are per step; " if profile.steps else ""
    hidden_time_note = (
        "; for the others it is hidden time"
        if any(row.hidden > _MAX_ROUNDING_ERROR_SECONDS for row in profile.classes)
        else ""
    )
    yield f"{per_step_note}time in which several classes run counts for only one of them{hidden_time_note}"
    if not profile.is_of_device:
        yield "the trace shows no work on a device: times are of CPU operations, without the operations that they call"
        yield "calls of a class: an operation counts once, together with the operations of this class that it calls"
    yield _explain_shares(profile)
    if profile.mamfu is None and (dtypes := ", ".join(profile.dtypes_without_ceiling)):
        yield (
            f"no MAMFU of all FLOP, because the sustained ceiling of {dtypes} is unknown or too noisy: repeat the "
            f"command with --ceiling and the log of 'mamf find --dtype {' '.join(profile.dtypes_without_ceiling)}'"
        )
    for row in profile.classes:
        if row.mamfu is not None and row.mamfu > 1:
            yield (
                f"{row.name} is above its sustained ceiling, which matmuls back to back reach: between other work the "
                "clock recovers, so the burst ceiling (mamf find) is the limit"
            )
        class_seconds = row.visible + row.hidden
        if row.flop and row.multiplying < (1 - _MIN_REPORTED_UNCOUNTED_SHARE) * class_seconds:
            yield (
                f"{row.name}: FLOP and TFLOPS cover {100 * row.multiplying / class_seconds:.0f} % of its time; "
                "how many FLOP the rest of the time computes is unknown"
            )
        if row.name == UNCLASSIFIED:
            yield (
                f"{100 * row.visible / profile.whole_seconds:.1f} % of the time is unclassified: "
                "no rule matches the names of its operations or kernels"
            )
    if any(row.name == PEAK_MEMORY and row.nbytes is None for row in profile.memory):
        yield "the peak memory and the rest are unknown, because the CPU does not report its peak memory"
    if any(row.name.startswith("in ") for row in profile.memory):
        yield "'in MODULE': memory that its forward pass allocated in these steps, and that was not freed at the peak"
    if profile.modules:
        yield (
            "the time of a module includes its backward pass and its inner modules; TFLOPS and MAMFU are those of its "
            "matmuls and attention during their own time; modules whose names differ only in numbers are added up"
        )
    yield from profile.notes


def _explain_shares(profile: Profile) -> str:
    """Return one line that says which duration is 100 % in the shares, and whether the idle time is known, unknown or
    only an upper bound.
    """
    unprofiled_seconds, busy_seconds = profile.unprofiled_step_seconds, profile.busy_seconds / (profile.steps or 1)
    if unprofiled_seconds is None:
        return "mamf timed no step without the profiler: idle time is an upper bound, all other shares are lower bounds"
    busy, unprofiled = (format_milliseconds(each) for each in (busy_seconds, unprofiled_seconds))
    if busy_seconds > unprofiled_seconds + _MAX_ROUNDING_ERROR_SECONDS:
        return (
            f"the {'device' if profile.is_of_device else 'CPU'} was busy for {busy} ms of a step in the trace, longer "
            f"than a step without the profiler ({unprofiled} ms), because the profiler slows it: shares are relative "
            "to the busy time, and idle time is unknown"
        )
    return (
        f"shares are relative to the step time without the profiler ({unprofiled} ms); idle is this time minus the "
        f"busy time in the trace ({busy} ms)"
        + (", too high because steps were faster with the profiler" if profile.is_uneven else "")
    )


# -- all ranks ---------------------------------------------------------------------------------------------------------


def make_ranks_document(ranks: ProfilesByRank, expected_rank_count: int = 0) -> Document:
    """Make the report that compares all ranks.

    ``expected_rank_count``: the number of ranks of the job, so that the report can list ranks without a profile; 0 if
    unknown.
    """
    script = next(script for script, _ in ranks.values())
    missing_ranks = sorted(set(range(max(expected_rank_count, max(ranks) + 1))) - ranks.keys())
    devices = [describe_device(profile) for _, profile in ranks.values()]
    device_counts = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    noncommunication_seconds_by_rank = {
        rank: _get_noncommunication_step_seconds(profile) for rank, (_, profile) in ranks.items()
    }
    blocks: list[Block] = [
        Lines([f"{script} on {format_count(len(ranks), 'rank')}: {device_counts}"]),
        Lines(
            [
                f"the profile of rank {rank} is missing: check that all machines write to the same folder"
                for rank in missing_ranks
            ]
        ),
        Table(
            _make_rank_columns(min(noncommunication_seconds_by_rank.values())),
            [(rank, profile) for rank, (_, profile) in ranks.items()],
            key="ranks",
        ),
        Lines(
            [
                "times are in ms per step; exposed communication: time in which only communication runs, with waiting, "
                "minus the time by which the profiler made the step longer; own: step time minus exposed communication",
                "to see the profile of one rank: mamf show FOLDER/rank-N.jsonl",
            ]
        ),
        Answer([_describe_stragglers(noncommunication_seconds_by_rank)]),
    ]
    return Document(f"Profile of {script} by rank", blocks, {"script": script, "missing": missing_ranks})


# Return how many seconds a step takes, without the time in which only communication runs. Waiting for other ranks
# counts as communication.
def _get_noncommunication_step_seconds(profile: Profile) -> float:
    return (profile.whole_seconds - profile.get_visible_seconds(COMMUNICATION)) * profile.step_factor


def _get_exposed_communication_seconds(profile: Profile) -> float:
    """Return the seconds of communication per step in which no other work runs.

    The profiler slows hosts, so ranks wait longer for one another. The device may then be busy in the trace for longer
    than the steps take without the profiler. Assume that the difference is waiting, and subtract it.
    """
    excess_seconds = profile.whole_seconds - profile.seconds_without_profiler if profile.is_of_device else 0.0
    return max(0.0, profile.get_visible_seconds(COMMUNICATION) - excess_seconds) * profile.step_factor


def _describe_stragglers(noncommunication_seconds_by_rank: Mapping[int, float]) -> str:
    slowest_rank, fastest_seconds = (
        max(noncommunication_seconds_by_rank, key=lambda rank: noncommunication_seconds_by_rank[rank]),
        min(noncommunication_seconds_by_rank.values()),
    )
    straggler_names = [
        str(rank)
        for rank, seconds in noncommunication_seconds_by_rank.items()
        if seconds - fastest_seconds >= _MIN_STRAGGLER_SHARE * seconds
    ]
    lag_text = format_milliseconds(noncommunication_seconds_by_rank[slowest_rank] - fastest_seconds)
    verdict = f"stragglers: rank {', '.join(straggler_names)}" if straggler_names else "no straggler"
    return f"{verdict}; rank {slowest_rank} takes {lag_text} ms more per step for its own work than the fastest rank"


def _make_rank_columns(fastest_seconds: float) -> list[Column[Any]]:
    def make_seconds_column(
        name: str, title: str, get_seconds: Callable[[Profile], float | None], drop_priority: int = 0
    ) -> Column[Any]:
        return Column(
            f"{name}_seconds", f"{title} ms", lambda row: get_seconds(row[1]), format_milliseconds, drop_priority
        )

    return [
        Column("rank", "rank", itemgetter(0)),
        make_seconds_column(
            "step",
            "step",
            lambda profile: _get_exposed_communication_seconds(profile) + _get_noncommunication_step_seconds(profile),
        ),
        make_seconds_column("own", "own", _get_noncommunication_step_seconds),
        make_seconds_column("behind", "behind", lambda it: _get_noncommunication_step_seconds(it) - fastest_seconds),
        make_seconds_column("exposed", "exposed communication", _get_exposed_communication_seconds),
        make_seconds_column(
            "hidden",
            "hidden communication",
            lambda profile: (
                profile.step_factor * sum(row.hidden for row in profile.classes if row.name == COMMUNICATION)
            ),
            2,
        ),
        make_seconds_column(  # idle time is None if it is unknown
            "idle", "idle", lambda profile: profile.get_visible_seconds(IDLE_LABEL) * profile.step_factor or None, 1
        ),
        Column("mamfu", "MAMFU", lambda row: row[1].mamfu, format_percent, 1),
    ]
