"""Processes that are killed, interrupted and run out of disk while they measure, and two that want one log."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from attacks.counts import Counts
from attacks.honest import BACKEND, BANDWIDTH, MATMUL, Run
from attacks.kills import is_complete, judge, missing, whole_lines

#: Long enough to be met while they measure: a second or so.
RUNS = (
    Run("sweep", ("sweep", *BACKEND, *MATMUL), ("--m-range", "0", "12800", "64", "--n", "1024", "--k", "1024")),
    Run("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), ("--pattern", "copy", "read", "write", "triad")),
    Run("find", ("find", *BACKEND, *MATMUL), ("--regime", "burst", "--budget", "2s"), is_search=True),
)
_HANG_SECONDS = 60.0
_MOST_RESUMPTIONS = 20
_TWO_AT_ONCE = 0.2


def attack(folder: Path, random: Random, count: int) -> Counts:
    counts = Counts("real kills")
    whole, seconds = {}, {}
    for run in RUNS:
        whole[run.name] = folder / f"{run.name}-whole.jsonl"
        began = time.monotonic()
        code, _, err = _finished(_started(run.new(whole[run.name])), counts)
        seconds[run.name] = time.monotonic() - began
        if code != 0:
            raise RuntimeError(f"{run.name} does not end without a kill: {err}")
    path = folder / "killed.jsonl"
    while counts.of["kills"] < count:
        run = random.choice(RUNS)
        path.unlink(missing_ok=True)
        counts.of["inputs"] += 1
        kills = min(random.randint(1, 3), count - counts.of["kills"])
        survive(run, path, kills, seconds[run.name], random, counts)
        # Each process has the simulated device scatter in the same way: equal samples are no copy here.
        judge(run, path, whole[run.name], counts, allowed=("lost-samples",))
    return counts


def survive(run: Run, path: Path, kills: int, seconds: float, random: Random, counts: Counts) -> None:
    """Kill a run some times, at moments within ``seconds``, then let it end. Rows of its log must stay there."""
    done = 0
    for _ in range(_MOST_RESUMPTIONS):
        before = whole_lines(path)
        if not before:
            path.unlink(missing_ok=True)  # killed before its header was whole: there is nothing to resume
        command = run.resumed(path) if before else run.new(path)
        end = random.choice((_kill, _interrupt, _terminate, _fill_disk))
        if done == kills:
            if before and random.random() < _TWO_AT_ONCE:
                two_at_once(command, path, counts)
            code, _, err = _finished(_started(command), counts)
        elif end is _fill_disk:
            room = (path.stat().st_size if before else 0) + random.randrange(200, 60_000)
            code, _, err = _finished(_started(command, lambda room=room: _limit_files(room)), counts)
        else:
            process = _started(command)
            _wait(process, path, random.uniform(0, seconds), begins=random.random() < 0.7)
            end(process)
            code, _, err = _finished(process, counts)
        if done < kills and code != 0:
            done += 1
            counts.of["kills"] += 1
        if gone := missing(before, whole_lines(path)):
            counts.fault("lost", run.name, f"resuming it took {gone} records away", gone)
        if code == 2:
            counts.fault("other", run.name, f"cannot be resumed: {err}")
            return
        if code == 0 and is_complete(path):
            return
    counts.fault("other", run.name, f"is not complete after {_MOST_RESUMPTIONS} attempts: {err}")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def _interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def _terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


def _fill_disk(process: subprocess.Popen[str]) -> None:
    """Stands for a limit that is set before the process begins."""


def _limit_files(room: int) -> None:
    """What is written beyond it is refused, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))


def _started(command: Sequence[str], prepare: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "mamf", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _wait(process: subprocess.Popen[str], path: Path, seconds: float, begins: bool) -> None:
    """Until so long after the start; with ``begins``, after the log grows, when kills find most to destroy."""
    size = path.stat().st_size if path.exists() else 0
    deadline = time.monotonic() + _HANG_SECONDS
    while begins and process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.stat().st_size > size:
            seconds /= 4  # the start of the process was most of it
            break
        time.sleep(0.002)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _finished(process: subprocess.Popen[str], counts: Counts) -> tuple[int, str, str]:
    counts.of["calls"] += 1
    try:
        out, err = process.communicate(timeout=_HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        counts.fault("hangs", " ".join(process.args[3:]), "hung")  # type: ignore[index,arg-type]
    counts.codes[process.returncode] += 1
    if "Traceback" in err:
        lines = [line.strip() for line in err.splitlines() if line.strip()]
        counts.fault("tracebacks", " ".join(map(str, process.args[3:5])), f"{lines[-1]} ({lines[-3]})")  # type: ignore[index]
    return process.returncode, out, err


def two_at_once(command: Sequence[str], path: Path, counts: Counts) -> None:
    """The second is refused while the first one, stopped in the middle, holds the log; then the first one goes on."""
    size = path.stat().st_size
    first = _started(command)
    deadline = time.monotonic() + _HANG_SECONDS
    while first.poll() is None and path.stat().st_size == size and time.monotonic() < deadline:
        time.sleep(0.002)
    if first.poll() is not None:  # it had little left to measure
        _finished(first, counts)
        return
    os.killpg(first.pid, signal.SIGSTOP)  # the process that measures, and the one that watches it
    code, _, err = _finished(_started(command), counts)
    os.killpg(first.pid, signal.SIGCONT)
    if code != 2 or "by process" not in err:
        counts.fault("other", "two at once", f"exit code {code} for the second: {err}")
    _finished(first, counts)
