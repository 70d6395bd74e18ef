"""The profiles of all ranks of a job, one log each in a folder: their spread, and which rank the others wait for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError, UsageError
from mamf.measurement import IDLE
from mamf.operations.tracing.classes import CLASSES, COMMUNICATION
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.profile import Profile
from mamf.profiling.report import device_of, milliseconds
from mamf.report.document import Answer, Block, Column, Document, Lines, Table
from mamf.report.text import counted

RANK_LOGS = "rank-*.jsonl"
#: The share of a step by which a rank's own time must exceed the least of all to make it a straggler. Two equal ranks
#: on two H200 differed by 1.3 to 2.9 % in the three steps that were profiled.
_NOTABLE = 0.05
#: The script and the profile of each rank.
Ranks = Mapping[int, tuple[str, Profile]]


def rank_log(folder: Path, rank: int) -> Path:
    return folder / RANK_LOGS.replace("*", str(rank))


def rank_logs(folder: Path) -> dict[int, Path]:
    """Whole or not, by rank."""
    names = {path: path.stem.removeprefix("rank-") for path in folder.glob(RANK_LOGS)}
    return {int(name): path for path, name in names.items() if name.isdecimal() and len(name) < 6}


def read_rank_logs(folder: Path) -> Ranks:
    """Without those that are not whole. Raises UsageError for a folder without any."""
    found: dict[int, tuple[str, Profile]] = {}
    for rank, path in sorted(rank_logs(folder).items()):
        with suppress(RunLogError):
            if read := read_profile_or_none(path):
                found[rank] = read
    if not found:
        raise UsageError(f"{folder} holds no profiles of ranks ({RANK_LOGS})")
    return found


def wait_for_ranks(
    folder: Path, count: int, seconds: float = 60.0, sleep: Callable[[float], object] = time.sleep
) -> Ranks:
    """All ranks' profiles once they are whole; after ``seconds`` those that are."""
    for _ in range(int(4 * seconds)):
        if len(read_rank_logs(folder)) >= count:
            break
        sleep(0.25)
    return read_rank_logs(folder)


def ranks_document(ranks: Ranks, count: int = 0) -> Document:
    """Csv holds the ranks. ``count``: how many there are at least."""
    script = next(script for script, _ in ranks.values())
    profiles = {rank: profile.without_added_waiting() for rank, (_, profile) in ranks.items()}
    missing = sorted(set(range(max(count, max(ranks) + 1))) - ranks.keys())
    devices = [device_of(profile) for profile in profiles.values()]
    names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    blocks: list[Block] = [
        Lines([f"{script} on {counted(len(ranks), 'rank')}: {names}"]),
        Lines([f"no profile of rank {rank}: is the folder shared by all machines?" for rank in missing]),
        Table(_columns(min(map(_own, profiles.values()))), list(profiles.items()), key="ranks"),
        Table(_CLASSES, list(_spread(profiles)), key="classes"),
        Lines(
            [
                "ms are per step; exposed: not hidden by computation, a rank may wait in it; own: the step without it",
                "one rank: mamf show FOLDER/rank-N.jsonl",
            ]
        ),
        Answer([_answer(profiles)]),
    ]
    return Document(f"Profile of {script} by rank", blocks, {"script": script, "missing": missing})


def _per_step(profile: Profile, name: str, is_hidden: bool = False) -> float:
    rows = [row for row in profile.classes if row.name == name]
    return sum(row.hidden if is_hidden else row.visible for row in rows) / (profile.steps or 1)


# The seconds of a step without exposed communication, in which a rank also waits for others.
def _own(profile: Profile) -> float:
    return profile.whole_seconds / (profile.steps or 1) - _per_step(profile, COMMUNICATION)


def _spread(profiles: Mapping[int, Profile]) -> Iterator[tuple[str, float, float, float, int]]:
    for name in (*CLASSES, IDLE):
        took = {rank: _per_step(profile, name) for rank, profile in profiles.items()}
        least, median, most = min(took.values()), statistics.median(took.values()), max(took.values())
        if most:
            yield name, least, median, most, max(took, key=lambda rank: took[rank])


def _answer(profiles: Mapping[int, Profile]) -> str:
    own = {rank: _own(profile) for rank, profile in profiles.items()}
    slow, least = max(own, key=lambda rank: own[rank]), min(own.values())
    late = [str(rank) for rank, seconds in own.items() if seconds - least >= _NOTABLE * seconds]
    verdict = f"stragglers: rank {', '.join(late)}" if late else "no straggler"
    by = f"rank {slow} takes {milliseconds(own[slow] - least)} ms more per step for its own work than the fastest rank"
    return f"{verdict}; {by}"


def _columns(least: float) -> list[Column[Any]]:
    def per_step(
        name: str, title: str, read: Callable[[Profile], float], importance: int = 0
    ) -> Column[tuple[int, Profile]]:
        return Column(f"{name}_seconds", f"{title} ms", lambda row: read(row[1]), milliseconds, importance)

    return [
        Column("rank", "rank", itemgetter(0)),
        per_step("step", "step", lambda profile: profile.whole_seconds / (profile.steps or 1)),
        per_step("own", "own", _own),
        per_step("behind", "behind", lambda profile: _own(profile) - least),
        per_step("exposed", "exposed communication", lambda profile: _per_step(profile, COMMUNICATION)),
        per_step("hidden", "hidden communication", lambda profile: _per_step(profile, COMMUNICATION, True), 2),
        per_step("idle", "idle", lambda profile: _per_step(profile, IDLE), 1),
        Column("mamfu", "MAMFU", lambda row: row[1].mamfu, "{:.1%}".format, 1),
    ]


_CLASSES: list[Column[Any]] = [
    Column("class", "class", itemgetter(0), left=True),
    Column("least_seconds", "least ms", itemgetter(1), milliseconds),
    Column("median_seconds", "median ms", itemgetter(2), milliseconds),
    Column("most_seconds", "most ms", itemgetter(3), milliseconds),
    Column("slowest_rank", "most on rank", itemgetter(4)),
]
