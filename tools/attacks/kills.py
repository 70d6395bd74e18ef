"""Runs in virtual time that are killed, interrupted and run out of disk anywhere, and resumed until they are whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from attacks.calls import Killed, call
from attacks.counts import Counts
from attacks.honest import RUNS, Run
from mamf.contribution.rules import review
from mamf.logs.run_log import TRANSIENT_STATUSES
from mamf.testing import SimulatedBackend

_MOST_KILLS_OF_A_RUN = 6
_MOST_RESUMPTIONS = 30


@dataclass
class Whole:
    """A run that nothing disturbed: its log, and how many launches it took."""

    path: Path
    launches: int = 0


def attack(folder: Path, random: Random, count: int) -> Counts:
    counts = Counts("kills in virtual time")
    whole = {run.name: undisturbed(run, folder / f"{run.name}-whole.jsonl", counts) for run in RUNS}
    while counts.of["kills"] < count:
        run = random.choice(RUNS)
        path = folder / "killed.jsonl"
        path.unlink(missing_ok=True)
        counts.of["inputs"] += 1
        survive(run, path, whole[run.name], random, counts)
        judge(run, path, whole[run.name].path, counts)
    return counts


def undisturbed(run: Run, path: Path, counts: Counts) -> Whole:
    whole = Whole(path)

    def on_launch(number: int) -> None:
        whole.launches = max(whole.launches, number)

    with mock.patch.object(SimulatedBackend, "on_launch", staticmethod(on_launch)):
        ended = call(run.new(path), counts)
    if ended.code != 0:
        raise RuntimeError(f"{run.name} does not end without a kill: {ended.err}")
    return whole


def survive(run: Run, path: Path, whole: Whole, random: Random, counts: Counts) -> None:
    """Begin a run and end it early, again and again, then let it end. Rows that stand in its log must stay there."""
    kills = random.randint(1, _MOST_KILLS_OF_A_RUN)
    for attempt in range(_MOST_RESUMPTIONS):
        before = whole_lines(path)
        if not before:
            path.unlink(missing_ok=True)  # killed before its header was whole: there is nothing to resume
        command = run.resumed(path) if before else run.new(path)
        fate = _fate(whole, random, counts) if attempt < kills else contextlib.nullcontext()
        # A device does not scatter the same way twice: equal samples would be a copy.
        with fate, mock.patch.object(SimulatedBackend.__init__, "__defaults__", (0, None, random.getrandbits(32))):
            ended = call(command, counts)
        if gone := missing(before, whole_lines(path)):
            counts.fault("lost", run.name, f"resuming it took {gone} records away", gone)
        if ended.is_killed:
            _cut(path, len(b"".join(before)), random)
        if ended.code == 2:
            counts.fault("other", run.name, f"cannot be resumed: {ended.err}")
            return
        if ended.code == 0 and attempt >= kills and is_complete(path):
            return
    counts.fault("other", run.name, f"is not complete after {_MOST_RESUMPTIONS} attempts: {ended}")


@contextlib.contextmanager
def _fate(whole: Whole, random: Random, counts: Counts) -> Iterator[None]:
    """One end of a run, at some launch or some record."""
    number = signal.SIGINT if random.random() < 0.5 else signal.SIGTERM

    def interrupt() -> None:
        signal.raise_signal(number)

    def kill() -> None:
        raise Killed

    def fill_disk() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    end = random.choice((interrupt, kill, fill_disk))
    was_met = []

    def met() -> None:
        if not was_met:
            was_met.append(True)
            counts.of["kills"] += 1
            end()

    if end is not fill_disk and random.random() < 0.5:
        with mock.patch.object(SimulatedBackend, "on_launch", _at(random.randint(1, whole.launches), met)):
            yield
    else:
        with at_a_write(random.randrange(len(whole_lines(whole.path))), random, met):
            yield


def _at(due: int, met: Callable[[], None]) -> Any:
    def on_launch(number: int) -> None:
        if number == due:
            met()

    return staticmethod(on_launch)


@contextlib.contextmanager
def at_a_write(due: int, random: Random, met: Callable[[], None]) -> Iterator[None]:
    """Reached before a record, within it or after it."""
    share = random.choice((0.0, random.random(), 1.0))
    written = 0
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal written
        written += 1
        if written - 1 != due:
            return real(descriptor, data)
        part = real(descriptor, data[: int(share * len(data))])
        met()
        return part

    with mock.patch("os.write", write):
        yield


def whole_lines(path: Path) -> list[bytes]:
    """What a reader takes from a log; empty without a log."""
    data = path.read_bytes() if path.exists() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def missing(before: list[bytes], after: list[bytes]) -> int:
    """Lines that are no longer where they were."""
    return sum(1 for number, line in enumerate(before) if after[number : number + 1] != [line])


def _cut(path: Path, written_before: int, random: Random) -> None:
    """What the kill of a machine, not of a process, leaves of a run's last seconds."""
    if path.exists() and random.random() < 0.5:
        os.truncate(path, random.randint(min(written_before, path.stat().st_size), path.stat().st_size))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def is_complete(path: Path) -> bool:
    last = (records(path) or [{}])[-1]
    return last.get("record") == "summary" and last["status"] == "complete"


def judge(run: Run, path: Path, whole: Path, counts: Counts, allowed: Collection[str] = ()) -> None:
    """Hold a log that was ended and resumed to one that was not. ``allowed``: rules that it may break."""
    expected, found = Counter(map(_step, _rows(whole))), Counter(map(_step, _rows(path)))
    if twice := sum((found - expected).values()) if not run.is_search else sum(found.values()) - len(found):
        counts.fault(
            "twice", run.name, f"{twice} rows more than once, such as {(found - expected).most_common(1)}", twice
        )
    if lost := 0 if run.is_search else sum((expected - found).values()):
        counts.fault("lost", run.name, f"{lost} rows were never measured", lost)
    if sorted(_ceilings(path)) != sorted(_ceilings(whole)):
        counts.fault("other", run.name, f"ceilings of {_ceilings(path)}, not of {_ceilings(whole)}")
    usual = {*allowed, *(finding.rule for finding in review(whole).findings)}
    for finding in review(path).findings:
        if not finding.is_warning and finding.rule not in usual:
            counts.fault(
                "other", run.name, f"'results check' says {finding.rule} in line {finding.line}: {finding.message}"
            )


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows that are not measured again when a log is resumed, references apart: these are, on purpose."""
    rows = [record for record in records(path) if record["record"] == "measurement"]
    return [row for row in rows if not row["is_reference"] and row["status"] not in TRANSIENT_STATUSES]


def _step(row: dict[str, Any]) -> str:
    of = {name: row.get(name) for name in ("operation", "problem", "shape", "kernel", "regime", "phase", "round")}
    return json.dumps(of, sort_keys=True)


def _ceilings(path: Path) -> list[str]:
    """What the last run of a log found ceilings of."""
    found = set()
    for record in records(path):
        if record["record"] == "resume":
            found = set()
        elif record["record"] == "ceiling":
            found.add(json.dumps([record.get("problem"), record["regime"]]))
    return list(found)
