"""Attack runs that measure: end them at any point, fill their disk, or change their logs from another program.

Each run is resumed until it is complete. It must not lose a row or measure it twice, and no exception may escape.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

from attacks.calls import Counts, Ended, Killed, call
from attacks.honest import BACKEND, BANDWIDTH, MATMUL, RUNS, Run
from mamf.contribution.review import review_log
from mamf.logs.run_log import TRANSIENT_STATUSES
from mamf.testing import SimulatedBackend

_MOST_FAULTS_OF_A_RUN, _MOST_RESUMPTIONS, _HANG_SECONDS = 6, 30, 60.0

# -- logs --------------------------------------------------------------------------------------------------------------


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a log, which are the lines that mamf reads. A missing log has no lines."""
    data = path.read_bytes() if path.is_file() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]


def is_complete(path: Path) -> bool:
    last = (records(path) or [{}])[-1]
    return last.get("record") == "summary" and last["status"] == "complete"


def _count_missing(before: list[bytes], after: list[bytes]) -> int:
    """Count the lines of ``before`` that are missing from ``after`` or have moved."""
    return sum(1 for number, line in enumerate(before) if after[number : number + 1] != [line])


def judge(run: Run, path: Path, whole: Path, counts: Counts) -> None:
    """Compare the log of a run that was disturbed and resumed with ``whole``, the log of the same run without faults.
    Add each difference to ``counts``.
    """
    expected, found = Counter(_steps(whole)), Counter(_steps(path))
    if twice := sum((found - expected).values()) if not run.is_search else sum(found.values()) - len(found):
        counts.fault("twice", run.name, f"{twice} rows too many, such as {(found - expected).most_common(1)}", twice)
    if lost := 0 if run.is_search else sum((expected - found).values()):
        counts.fault("lost", run.name, f"{lost} rows were never measured", lost)
    if _ceilings(path) != _ceilings(whole):
        counts.fault("other", run.name, f"ceilings of {_ceilings(path)}, not of {_ceilings(whole)}")
    # In real logs, equal samples are a sign of copied rows. But the simulated device repeats the same noise in each
    # process, so a resumed run may contain equal samples.
    usual = {"equal-samples", *(finding.rule for finding in review_log(whole).findings)}
    for finding in review_log(path).findings:
        if not finding.is_warning and finding.rule not in usual:
            message = f"'results check' says {finding.rule} in line {finding.line}: {finding.message}"
            counts.fault("other", run.name, message)


def _steps(path: Path) -> Iterator[str]:
    """Yield a key for each row that a resumed run must not measure again: all rows except references, which it measures
    again on purpose, and rows that failed or ran out of memory.
    """
    for row in records(path):
        if row["record"] == "measurement" and not row["is_reference"] and row["status"] not in TRANSIENT_STATUSES:
            names = ("operation", "problem", "shape", "kernel", "regime", "phase", "round")
            yield json.dumps({name: row.get(name) for name in names}, sort_keys=True)


def _ceilings(path: Path) -> set[str]:
    """Return the problem and the regime of each ceiling in a log. If the log was resumed, return only those after the
    last resumption.
    """
    last = b"".join(whole_lines(path)).rpartition(b'{"record": "resume"')[2].splitlines()
    found = (json.loads(line) for line in last if line.startswith(b'{"record": "ceiling"'))
    return {json.dumps([ceiling.get("problem"), ceiling["regime"]]) for ceiling in found}


# -- faults ------------------------------------------------------------------------------------------------------------

Fault = Callable[[Path, Random], object]


def _raise(error: BaseException) -> Fault:
    def fault(path: Path, random: Random) -> None:
        raise error.with_traceback(None)

    return fault


def _signal(number: int) -> Fault:
    return lambda path, random: signal.raise_signal(number)


def _replace(path: Path, random: Random) -> None:
    other = path.with_name("other")
    other.write_bytes(random.choice((b"not a record\n", path.read_bytes())))
    other.replace(path)


def _resize(path: Path, random: Random) -> None:
    """Cut a log short, or extend it with zero bytes."""
    os.truncate(path, int(random.choice((0.0, random.random(), 1.1)) * path.stat().st_size))


_kill, _fill_disk = _raise(Killed()), _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
#: The faults that end a run.
ENDS = (_kill, _fill_disk, *map(_signal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
#: The changes that another program makes to the log. After them, the run continues and writes a new log.
CHANGES: tuple[Fault, ...] = (
    *(_replace, _resize),
    lambda path, random: path.unlink(),
    lambda path, random: path.rename(path.with_name("renamed")),
    lambda path, random: shutil.rmtree(path.parent),
)


class Met(NamedTuple):
    """The end of a command, and the fault that occurred while it ran; None if no fault occurred."""

    ended: Ended
    fault: Fault | None = None


#: A function that runs a command and causes a fault in it. Its parameters are the command, the path of the log that the
#: command writes, the log of the same run without faults (None: cause no fault), a random generator, and the counts.
Execute = Callable[[Sequence[str], Path, Path | None, Random, Counts], Met]


def _attack(counts: Counts, runs: Sequence[Run], execute: Execute, folder: Path, random: Random, count: int) -> Counts:
    """Disturb randomly chosen runs until ``count`` faults have occurred, and judge the log of each run."""
    whole = {run.name: folder / f"{run.name}-whole.jsonl" for run in runs}
    while counts.of["kills"] < count:
        run, own = random.choice(runs), folder / str(counts.of["inputs"])
        if not whole[run.name].exists():
            ended = execute(run.new(whole[run.name]), whole[run.name], None, random, counts).ended
            if ended.code != 0:
                raise RuntimeError(f"{run.name} does not end without a fault: {ended.err}")
        counts.of["inputs"] += 1
        if path := survive(run, own, whole[run.name], execute, random, counts):
            judge(run, path, whole[run.name], counts)
        for path in folder.glob(f"{own.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return counts


def survive(run: Run, folder: Path, whole: Path, execute: Execute, random: Random, counts: Counts) -> Path | None:
    """Disturb and resume a run several times, then let it finish. Return the path of its log, or None if the run lost
    its log or could not be completed.
    """
    faults, path = random.randint(1, _MOST_FAULTS_OF_A_RUN), folder / "log.jsonl"
    for attempt in range(_MOST_RESUMPTIONS):
        before = whole_lines(path)
        if not before:  # There is no complete header yet, so start a new run.
            path = folder.with_name(f"{folder.name}-{attempt}") / "log.jsonl"
            path.parent.mkdir()
        command = run.resumed(path) if before else run.new(path)
        ended, fault = execute(command, path, whole if attempt < faults else None, random, counts)
        counts.of["kills"] += fault is not None
        if fault in CHANGES:
            if ended.code != 1:
                counts.fault("other", run.name, f"ended with {ended.code} after its log was changed: {ended.err}")
            if "before the first measurement" in ended.err:  # The log has no rows, so none can be lost.
                path = Path()
                continue
            path = Path((re.findall(r"^log: (.*)$", ended.out + ended.err, re.MULTILINE) or [""])[-1])
            if not path.is_file():
                counts.fault("lost", run.name, f"names no log: {ended.out[-200:]} {ended.err}")
                return None
        elif gone := _count_missing(before, whole_lines(path)):
            counts.fault("lost", run.name, f"resuming it took {gone} records away", gone)
        # After half of the kills, simulate a power failure: cut off a random part of what this command wrote.
        if fault is _kill and path.is_file() and random.random() < 0.5:
            size = path.stat().st_size
            os.truncate(path, random.randint(min(len(b"".join(before)), size), size))
        if ended.code == 2:
            counts.fault("other", run.name, f"cannot be resumed: {ended.err}")
            return None
        if ended.code == 0 and is_complete(path):
            return path
    counts.fault("other", run.name, f"is not complete after {_MOST_RESUMPTIONS} attempts: {ended}")
    return None


# -- faults in virtual time --------------------------------------------------------------------------------------------


def attack_runs(folder: Path, random: Random, count: int) -> Counts:
    """Disturb runs in virtual time. Each fault occurs at a random launch or at a random write to the log."""
    launches: dict[Path, int] = {}

    def execute(command: Sequence[str], path: Path, whole: Path | None, random: Random, counts: Counts) -> Met:
        if whole is None:
            numbers = [0]
            with mock.patch.object(SimulatedBackend, "on_launch", numbers.append):
                ended = call(command, counts)
            launches[path] = max(numbers)
            return Met(ended)
        fault, met = random.choice((*ENDS, *CHANGES)), list[Fault]()

        def meet() -> None:
            if not met and (path.is_file() or fault in ENDS):
                met.append(fault)
                fault(path, random)

        due = random.randint(1, launches[whole])
        on_launch = mock.patch.object(SimulatedBackend, "on_launch", lambda number: number == due and meet())
        on_write = at_a_write(random.randrange(len(whole_lines(whole)) - (fault in CHANGES)), random, meet)
        with on_write if fault is _fill_disk else random.choice((on_write, on_launch)):
            ended = call(command, counts)
        return Met(ended, *met)

    return _attack(Counts("faults in virtual time"), RUNS, execute, folder, random, count)


@contextlib.contextmanager
def at_a_write(due: int, random: Random, meet: Callable[[], None]) -> Iterator[None]:
    """Call ``meet`` before, during or after the write number ``due``, counted from 0."""
    share = random.choice((0.0, random.random(), 1.0))
    numbers, real = itertools.count(), os.write

    def write(descriptor: int, data: bytes) -> int:
        if next(numbers) != due:
            return real(descriptor, data)
        part = real(descriptor, data[: int(share * len(data))])
        meet()
        return part

    with mock.patch("os.write", write):
        yield


# -- real processes ----------------------------------------------------------------------------------------------------

#: The runs for the attack on real processes. Each takes about a second.
PROCESSES = (
    Run("sweep", ("sweep", *BACKEND, *MATMUL), "--m-range 0 12800 64 --n 1024 --k 1024"),
    Run("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), "--pattern copy read write triad"),
    Run("find", ("find", *BACKEND, *MATMUL), "--regime burst --budget 2s", is_search=True),
)
#: The signals that end processes, each with the fault that represents it in ``Met``.
ENDS_OF_PROCESSES = {signal.SIGKILL: _kill, **{each: _signal(each) for each in (signal.SIGINT, signal.SIGTERM)}}


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    whole, environment = [sys.executable, "-m", "mamf", *command], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(whole, **pipes, errors="replace", start_new_session=True, env=environment)


def attack_processes(folder: Path, random: Random, count: int) -> Counts:
    """Disturb real processes with SIGKILL, SIGINT and SIGTERM."""
    return _attack(Counts("killed processes"), PROCESSES, _execute_process, folder, random, count)


def _execute_process(command: Sequence[str], path: Path, whole: Path | None, random: Random, counts: Counts) -> Met:
    """Run a command in a real process, and count hangs and tracebacks. If ``whole`` is not None, send a random signal
    up to 0.3 s after the log has grown.
    """
    size, process, fault = path.stat().st_size if path.exists() else 0, start(command), None
    if whole:
        deadline = time.monotonic() + _HANG_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > size:
                break
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0, 0.3))
        number, fault = random.choice(list(ENDS_OF_PROCESSES.items()))
        process.send_signal(number)
    counts.of["calls"] += 1
    try:
        out, err = process.communicate(timeout=_HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        counts.fault("hangs", command[0], "hung")
    counts.codes[process.returncode] += 1
    if "Traceback" in out + err:
        counts.fault("tracebacks", command[0], err.strip().splitlines()[-1][:300])
    return Met(Ended(process.returncode, out, err), fault)
