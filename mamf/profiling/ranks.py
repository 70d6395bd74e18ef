"""The profiles of all ranks of a job, one log each in a folder: which rank the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError, UsageError
from mamf.measurement import IDLE
from mamf.profiling.classes import COMMUNICATION
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


def ranks_document(ranks: Ranks, count: int = 0) -> Document:
    """``count``: how many ranks there are at least."""
    script = next(script for script, _ in ranks.values())
    missing = sorted(set(range(max(count, max(ranks) + 1))) - ranks.keys())
    devices = [device_of(profile) for _, profile in ranks.values()]
    names = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    own = {rank: _own(profile) for rank, (_, profile) in ranks.items()}
    blocks: list[Block] = [
        Lines([f"{script} on {counted(len(ranks), 'rank')}: {names}"]),
        Lines([f"no profile of rank {rank}: is the folder shared by all machines?" for rank in missing]),
        Table(_columns(min(own.values())), [(rank, profile) for rank, (_, profile) in ranks.items()], key="ranks"),
        Lines(
            [
                "ms are per step; exposed: not hidden by computation, a rank may wait in it; own: the step without it",
                "one rank: mamf show FOLDER/rank-N.jsonl",
            ]
        ),
        Answer([_answer(own)]),
    ]
    return Document(f"Profile of {script} by rank", blocks, {"script": script, "missing": missing})


# The seconds of a step without exposed communication, in which a rank also waits for others.
def _own(profile: Profile) -> float:
    return (profile.whole_seconds - profile.seconds_of(COMMUNICATION)) / (profile.steps or 1)


def _answer(own: Mapping[int, float]) -> str:
    slow, least = max(own, key=lambda rank: own[rank]), min(own.values())
    late = [str(rank) for rank, seconds in own.items() if seconds - least >= _NOTABLE * seconds]
    verdict = f"stragglers: rank {', '.join(late)}" if late else "no straggler"
    by = f"rank {slow} takes {milliseconds(own[slow] - least)} ms more per step for its own work than the fastest rank"
    return f"{verdict}; {by}"


def _columns(least: float) -> list[Column[Any]]:
    def of_step(name: str, title: str, read: Callable[[Profile], float], importance: int = 0) -> Column[Any]:
        return Column(
            f"{name}_seconds",
            f"{title} ms",
            lambda row: read(row[1]) / (row[1].steps or 1),
            milliseconds,
            importance,
        )

    return [
        Column("rank", "rank", itemgetter(0)),
        of_step("step", "step", lambda profile: _exposed(profile) + _own(profile) * (profile.steps or 1)),
        Column("own_seconds", "own ms", lambda row: _own(row[1]), milliseconds),
        Column("behind_seconds", "behind ms", lambda row: _own(row[1]) - least, milliseconds),
        of_step("exposed", "exposed communication", _exposed),
        of_step(
            "hidden",
            "hidden communication",
            lambda profile: sum(row.hidden for row in profile.classes if row.name == COMMUNICATION),
            2,
        ),
        of_step("idle", "idle", lambda profile: profile.seconds_of(IDLE), 1),
        Column("mamfu", "MAMFU", lambda row: row[1].mamfu, "{:.1%}".format, 1),
    ]


def _exposed(profile: Profile) -> float:
    """Visible communication. The profiler slows hosts, so ranks wait longer for one another: the time by which a device
    is busy for longer in the trace than the steps take without the profiler is left out.
    """
    added = profile.whole_seconds - profile.usual_seconds if profile.is_of_device else 0.0
    return max(0.0, profile.seconds_of(COMMUNICATION) - added)
