"""Faults around a run: it is ended anywhere, its disk is full, or another program changes its log.

A run is resumed until it is complete. No row may be lost or measured twice, and nothing escapes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from attacks.calls import Counts, Ended, Killed, call
from attacks.honest import BACKEND, BANDWIDTH, MATMUL, RUNS, Run
from mamf.contribution.rules import review
from mamf.logs.run_log import TRANSIENT_STATUSES
from mamf.testing import SimulatedBackend

_MOST_FAULTS_OF_A_RUN = 6
_MOST_RESUMPTIONS = 30
_HANG_SECONDS = 60.0
_FOREIGN = b"not a record\n"

# -- logs --------------------------------------------------------------------------------------------------------------


def whole_lines(path: Path) -> list[bytes]:
    """Return what a reader takes from a log; nothing without a log."""
    data = path.read_bytes() if path.is_file() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def is_complete(path: Path) -> bool:
    last = (records(path) or [{}])[-1]
    return last.get("record") == "summary" and last["status"] == "complete"


def _count_missing(before: list[bytes], after: list[bytes]) -> int:
    """Count the lines that are no longer where they were."""
    return sum(1 for number, line in enumerate(before) if after[number : number + 1] != [line])


def judge(run: Run, path: Path, whole: Path, counts: Counts, allowed: Collection[str] = ()) -> None:
    """Compare a log that was ended and resumed with an undisturbed one. ``allowed``: rules that it may break."""
    expected, found = Counter(map(_step, _rows(whole))), Counter(map(_step, _rows(path)))
    if twice := sum((found - expected).values()) if not run.is_search else sum(found.values()) - len(found):
        counts.fault("twice", run.name, f"{twice} rows too many, such as {(found - expected).most_common(1)}", twice)
    if lost := 0 if run.is_search else sum((expected - found).values()):
        counts.fault("lost", run.name, f"{lost} rows were never measured", lost)
    if sorted(_ceilings(path)) != sorted(_ceilings(whole)):
        counts.fault("other", run.name, f"ceilings of {_ceilings(path)}, not of {_ceilings(whole)}")
    usual = {*allowed, *(finding.rule for finding in review(whole).findings)}
    for finding in review(path).findings:
        if not finding.is_warning and finding.rule not in usual:
            message = f"'results check' says {finding.rule} in line {finding.line}: {finding.message}"
            counts.fault("other", run.name, message)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows that a resumed run does not measure again; it measures references again on purpose."""
    rows = [record for record in records(path) if record["record"] == "measurement"]
    return [row for row in rows if not row["is_reference"] and row["status"] not in TRANSIENT_STATUSES]


def _step(row: dict[str, Any]) -> str:
    of = {name: row.get(name) for name in ("operation", "problem", "shape", "kernel", "regime", "phase", "round")}
    return json.dumps(of, sort_keys=True)


def _ceilings(path: Path) -> list[str]:
    """Return what the last run of a log found ceilings of."""
    found: set[str] = set()
    for record in records(path):
        if record["record"] == "resume":
            found = set()
        elif record["record"] == "ceiling":
            found.add(json.dumps([record.get("problem"), record["regime"]]))
    return list(found)


# -- faults in virtual time --------------------------------------------------------------------------------------------


def _kill(path: Path, random: Random) -> None:
    raise Killed


def _fill_disk(path: Path, random: Random) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _replace(path: Path, random: Random) -> None:
    other = path.with_name("other")
    other.write_bytes(random.choice((_FOREIGN, path.read_bytes())))
    other.replace(path)


def _replace_by_folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def _truncate(path: Path, random: Random) -> None:
    os.truncate(path, int(random.choice((0.0, random.random())) * path.stat().st_size))


def _extend(path: Path, random: Random) -> None:
    with path.open("ab") as file:
        file.write(_FOREIGN)


def _signal(number: int) -> Callable[[Path, Random], None]:
    return lambda path, random: signal.raise_signal(number)


#: What ends a run.
ENDS = (_kill, _fill_disk, *map(_signal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
#: What another program does to the log of a run, which goes on.
CHANGES: tuple[Callable[[Path, Random], object], ...] = (
    *(_replace, _replace_by_folder, _truncate, _extend),
    lambda path, random: path.unlink(),
    lambda path, random: path.rename(path.with_name("renamed")),
    lambda path, random: shutil.rmtree(path.parent),
    lambda path, random: path.parent.rename(path.parent.with_name(f"{path.parent.name} moved")),
)


@dataclass
class Whole:
    """A run that nothing disturbed: its log, and how many launches it took."""

    path: Path
    launches: int = 0


def undisturbed(run: Run, path: Path, counts: Counts) -> Whole:
    whole = Whole(path)

    def on_launch(number: int) -> None:
        whole.launches = max(whole.launches, number)

    with mock.patch.object(SimulatedBackend, "on_launch", staticmethod(on_launch)):
        ended = call(run.new(path), counts)
    if ended.code != 0:
        raise RuntimeError(f"{run.name} does not end without a fault: {ended.err}")
    return whole


def attack_runs(folder: Path, random: Random, count: int) -> Counts:
    """Disturb runs in virtual time ``count`` times, at a launch or at a write."""
    counts = Counts("faults in virtual time")
    whole = {run.name: undisturbed(run, folder / f"{run.name}-whole.jsonl", counts) for run in RUNS}
    while counts.of["kills"] < count:
        run, own = random.choice(RUNS), folder / str(counts.of["inputs"])
        counts.of["inputs"] += 1
        if path := survive(run, own, whole[run.name], random, counts):
            judge(run, path, whole[run.name].path, counts)
        for path in folder.glob(f"{own.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return counts


def survive(run: Run, folder: Path, whole: Whole, random: Random, counts: Counts) -> Path | None:
    """Disturb a run again and again, then let it end. Return its log; None after a fault."""
    faults, path = random.randint(1, _MOST_FAULTS_OF_A_RUN), folder / "log.jsonl"
    for attempt in range(_MOST_RESUMPTIONS):
        before = whole_lines(path)
        if not before:  # nothing to resume
            path = folder.with_name(f"{folder.name}-{attempt}") / "log.jsonl"
            path.parent.mkdir()
        command = run.resumed(path) if before else run.new(path)
        fault = random.choice((*ENDS, *CHANGES)) if attempt < faults else None
        was_met: list[bool] = []
        # A device does not scatter the same way twice: equal samples would be a copy.
        scattered = mock.patch.object(SimulatedBackend.__init__, "__defaults__", (0, None, random.getrandbits(32)))
        with _met(fault, path, whole, random, was_met) if fault else contextlib.nullcontext(), scattered:
            ended = call(command, counts)
        counts.of["kills"] += len(was_met)
        if fault in CHANGES and was_met:
            if ended.code != 1:
                counts.fault("other", run.name, f"ended with {ended.code} after its log was changed: {ended.err}")
            if "before the first measurement" in ended.err:  # no row to lose
                path = Path()
                continue
            path = Path((re.findall(r"^log: (.*)$", ended.out + ended.err, re.MULTILINE) or [""])[-1])
            if not path.is_file():
                counts.fault("lost", run.name, f"names no log: {ended.out[-200:]} {ended.err}")
                return None
        elif gone := _count_missing(before, whole_lines(path)):
            counts.fault("lost", run.name, f"resuming it took {gone} records away", gone)
        if ended.is_killed and path.is_file() and random.random() < 0.5:  # the machine lost power
            size = path.stat().st_size
            os.truncate(path, random.randint(min(len(b"".join(before)), size), size))
        if ended.code == 2:
            counts.fault("other", run.name, f"cannot be resumed: {ended.err}")
            return None
        if ended.code == 0 and is_complete(path):
            return path
    counts.fault("other", run.name, f"is not complete after {_MOST_RESUMPTIONS} attempts: {ended}")
    return None


@contextlib.contextmanager
def _met(fault: Any, path: Path, whole: Whole, random: Random, was_met: list[bool]) -> Iterator[None]:
    """Have a run meet a fault once, at some launch or some record."""

    def meet() -> None:
        if not was_met and (path.is_file() or fault in ENDS):
            was_met.append(True)
            fault(path, random)

    due = random.randint(1, whole.launches)
    if fault is not _fill_disk and random.random() < 0.5:
        on_launch = staticmethod(lambda number: meet() if number == due else None)
        with mock.patch.object(SimulatedBackend, "on_launch", on_launch):
            yield
    else:
        last = len(whole_lines(whole.path)) - (fault in CHANGES)
        with at_a_write(random.randrange(last), random, meet):
            yield


@contextlib.contextmanager
def at_a_write(due: int, random: Random, meet: Callable[[], None]) -> Iterator[None]:
    """Call ``meet`` before a record, within it or after it."""
    share = random.choice((0.0, random.random(), 1.0))
    written, real = 0, os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal written
        written += 1
        if written - 1 != due:
            return real(descriptor, data)
        part = real(descriptor, data[: int(share * len(data))])
        meet()
        return part

    with mock.patch("os.write", write):
        yield


# -- real processes ----------------------------------------------------------------------------------------------------

#: Runs that take a second or so.
PROCESSES = (
    Run("sweep", ("sweep", *BACKEND, *MATMUL), ("--m-range", "0", "12800", "64", "--n", "1024", "--k", "1024")),
    Run("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), ("--pattern", "copy", "read", "write", "triad")),
    Run("find", ("find", *BACKEND, *MATMUL), ("--regime", "burst", "--budget", "2s"), is_search=True),
)


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mamf", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str], where: str, counts: Counts) -> Ended:
    """Wait for a process, and count what is wrong with its end."""
    counts.of["calls"] += 1
    try:
        out, err = process.communicate(timeout=_HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        counts.fault("hangs", where, "hung")
    counts.codes[process.returncode] += 1
    if "Traceback" in out + err:
        counts.fault("tracebacks", where, err.strip().splitlines()[-1][:300])
    return Ended(process.returncode, out, err)


def attack_processes(folder: Path, random: Random, count: int) -> Counts:
    """Kill, interrupt and terminate real processes ``count`` times."""
    counts = Counts("killed processes")
    path = folder / "killed.jsonl"
    while counts.of["kills"] < count:
        run = random.choice(PROCESSES)
        whole = folder / f"{run.name}-whole.jsonl"
        if not whole.exists() and (ended := finish(start(run.new(whole)), run.name, counts)).code != 0:
            raise RuntimeError(f"{run.name} does not end without a kill: {ended.err}")
        path.unlink(missing_ok=True)
        counts.of["inputs"] += 1
        for is_last in (*[False] * random.randint(1, 3), True):
            before = whole_lines(path)
            if not before:
                path.unlink(missing_ok=True)
            command = run.resumed(path) if before else run.new(path)
            process = start(command)
            if not is_last:
                _wait_for_growth(process, path)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(random.uniform(0, 0.3))
                process.send_signal(random.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)))
                counts.of["kills"] += 1
            ended = finish(process, run.name, counts)
            if gone := _count_missing(before, whole_lines(path)):
                counts.fault("lost", run.name, f"resuming it took {gone} records away", gone)
        if not is_complete(path):
            counts.fault("other", run.name, f"is not complete: {ended}")
        # Each process has the simulated device scatter in the same way: equal samples are no copy here.
        judge(run, path, whole, counts, allowed=("lost-samples", "equal-samples"))
    return counts


def _wait_for_growth(process: subprocess.Popen[str], path: Path) -> None:
    size = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + _HANG_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size > size:
            return
        time.sleep(0.002)
