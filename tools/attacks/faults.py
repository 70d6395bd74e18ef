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

from attacks.calls import CommandResult, Counts, Killed, call
from attacks.honest import BACKEND, BANDWIDTH, MATMUL, RUNS, AttackedRun
from mamf.contribution.review import review_log
from mamf.logs.run_log import TRANSIENT_STATUSES
from mamf.testing import SimulatedBackend

_MAX_FAULTS_PER_RUN, _MAX_ATTEMPTS, _HANG_SECONDS = 6, 30, 60.0

# -- logs --------------------------------------------------------------------------------------------------------------


def read_complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a log, which are the lines that mamf reads. A missing log has no lines."""
    data = path.read_bytes() if path.is_file() else b""
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_complete_lines(path)]


def is_complete(path: Path) -> bool:
    last = (read_records(path) or [{}])[-1]
    return last.get("record") == "summary" and last["status"] == "complete"


def _count_missing_lines(before: list[bytes], after: list[bytes]) -> int:
    """Count the lines of ``before`` that are missing from ``after`` or have moved."""
    return sum(1 for number, line in enumerate(before) if after[number : number + 1] != [line])


def judge_log(run: AttackedRun, path: Path, undisturbed_log: Path, counts: Counts) -> None:
    """Compare the log of a run that was disturbed and resumed with the log of the same run without faults. Add each
    difference to ``counts``.
    """
    expected_rows, measured_rows = Counter(_list_row_keys(undisturbed_log)), Counter(_list_row_keys(path))
    surplus_rows, lost_rows = measured_rows - expected_rows, expected_rows - measured_rows
    if run.is_search:  # A disturbed search may measure other shapes, but it must not measure one of them twice.
        surplus_rows, lost_rows = measured_rows - Counter(set(measured_rows)), Counter()
    if count := surplus_rows.total():
        message = f"{count} rows were measured more than once, such as {surplus_rows.most_common(1)}"
        counts.add_fault("twice", run.name, message, count)
    if count := lost_rows.total():
        counts.add_fault("lost", run.name, f"{count} rows were never measured", count)
    ceilings, expected_ceilings = _read_ceilings(path), _read_ceilings(undisturbed_log)
    if ceilings != expected_ceilings:
        counts.add_fault("other", run.name, f"the log has ceilings of {ceilings} instead of {expected_ceilings}")
    # In real logs, equal samples are a sign of copied rows. But the simulated device repeats the same noise in each
    # process, so a resumed run may contain equal samples.
    expected_rules = {"equal-samples", *(finding.rule for finding in review_log(undisturbed_log).findings)}
    for finding in review_log(path).findings:
        if not finding.is_warning and finding.rule not in expected_rules:
            message = f"'results check' says {finding.rule} in line {finding.line}: {finding.message}"
            counts.add_fault("other", run.name, message)


def _list_row_keys(path: Path) -> Iterator[str]:
    """Yield a key for each row that a resumed run must not measure again: all rows except references, which it measures
    again on purpose, and rows that failed or ran out of memory.
    """
    for row in read_records(path):
        if row["record"] == "measurement" and not row["is_reference"] and row["status"] not in TRANSIENT_STATUSES:
            names = ("operation", "problem", "shape", "kernel", "regime", "phase", "round")
            yield json.dumps({name: row.get(name) for name in names}, sort_keys=True)


def _read_ceilings(path: Path) -> set[str]:
    """Return the problem and the regime of each ceiling in a log. If the log was resumed, return only those after the
    last resumption.
    """
    lines_after_resumption = b"".join(read_complete_lines(path)).rpartition(b'{"record": "resume"')[2].splitlines()
    ceilings = (json.loads(line) for line in lines_after_resumption if line.startswith(b'{"record": "ceiling"'))
    return {json.dumps([ceiling.get("problem"), ceiling["regime"]]) for ceiling in ceilings}


# -- faults ------------------------------------------------------------------------------------------------------------

Fault = Callable[[Path, Random], object]


def _make_raising_fault(error: BaseException) -> Fault:
    def fault(path: Path, random: Random) -> None:
        raise error.with_traceback(None)

    return fault


def _make_signal_fault(number: int) -> Fault:
    return lambda path, random: signal.raise_signal(number)


def _replace_log(path: Path, random: Random) -> None:
    other = path.with_name("other")
    other.write_bytes(random.choice((b"not a record\n", path.read_bytes())))
    other.replace(path)


def _resize_log(path: Path, random: Random) -> None:
    """Cut a log short, or extend it with zero bytes."""
    os.truncate(path, int(random.choice((0.0, random.random(), 1.1)) * path.stat().st_size))


_kill, _fill_disk = _make_raising_fault(Killed()), _make_raising_fault(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
#: The faults that end a run.
ENDING_FAULTS = (_kill, _fill_disk, *map(_make_signal_fault, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
#: The changes that another program makes to the log. After them, the run continues and writes a new log.
LOG_CHANGES: tuple[Fault, ...] = (
    *(_replace_log, _resize_log),
    lambda path, random: path.unlink(),
    lambda path, random: path.rename(path.with_name("renamed")),
    lambda path, random: shutil.rmtree(path.parent),
)


class Outcome(NamedTuple):
    """The end of a command, and the fault that occurred while it ran; None if no fault occurred."""

    result: CommandResult
    fault: Fault | None = None


#: A function that runs a command and causes a fault in it. Its parameters are the command, the path of the log that the
#: command writes, the log of the same run without faults (None: cause no fault), a random generator, and the counts.
Execute = Callable[[Sequence[str], Path, Path | None, Random, Counts], Outcome]


def _disturb_runs(
    counts: Counts, runs: Sequence[AttackedRun], execute: Execute, folder: Path, random: Random, count: int
) -> Counts:
    """Disturb randomly chosen runs until ``count`` faults have occurred, and judge the log of each run."""
    undisturbed_logs = {run.name: folder / f"{run.name}-whole.jsonl" for run in runs}
    while counts.totals["kills"] < count:
        run, run_folder = random.choice(runs), folder / str(counts.totals["inputs"])
        if not undisturbed_logs[run.name].exists():
            result = execute(
                run.make_new_command(undisturbed_logs[run.name]), undisturbed_logs[run.name], None, random, counts
            ).result
            if result.code != 0:
                raise RuntimeError(f"the undisturbed run {run.name} failed: {result.err}")
        counts.totals["inputs"] += 1
        if path := disturb_and_complete(run, run_folder, undisturbed_logs[run.name], execute, random, counts):
            judge_log(run, path, undisturbed_logs[run.name], counts)
        for path in folder.glob(f"{run_folder.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return counts


def disturb_and_complete(
    run: AttackedRun, folder: Path, undisturbed_log: Path, execute: Execute, random: Random, counts: Counts
) -> Path | None:
    """Disturb and resume a run several times, then let it finish. Return the path of its log, or None if the run lost
    its log or could not be completed.
    """
    faults, path = random.randint(1, _MAX_FAULTS_PER_RUN), folder / "log.jsonl"
    for attempt in range(_MAX_ATTEMPTS):
        before = read_complete_lines(path)
        if not before:  # There is no complete header yet, so start a new run.
            path = folder.with_name(f"{folder.name}-{attempt}") / "log.jsonl"
            path.parent.mkdir()
        command = run.make_resume_command(path) if before else run.make_new_command(path)
        result, fault = execute(command, path, undisturbed_log if attempt < faults else None, random, counts)
        counts.totals["kills"] += fault is not None
        if fault in LOG_CHANGES:
            if result.code != 1:
                message = f"exit code {result.code} instead of 1 after its log was changed: {result.err}"
                counts.add_fault("other", run.name, message)
            path = Path((re.findall(r"^log: (.*)$", result.out + result.err, re.MULTILINE) or [""])[-1])
            if not path.is_file():
                counts.add_fault(
                    "lost", run.name, f"printed no path of a log that exists: {result.out[-200:]} {result.err}"
                )
                return None
        elif missing_count := _count_missing_lines(before, read_complete_lines(path)):
            counts.add_fault("lost", run.name, f"{missing_count} records are missing afterwards", missing_count)
        # After half of the kills, simulate a power failure: cut off a random part of what this command wrote.
        if fault is _kill and path.is_file() and random.random() < 0.5:
            size = path.stat().st_size
            os.truncate(path, random.randint(min(len(b"".join(before)), size), size))
        if result.code == 2:
            counts.add_fault("other", run.name, f"cannot be resumed: {result.err}")
            return None
        if result.code == 0 and is_complete(path):
            return path
    counts.add_fault("other", run.name, f"is not complete after {_MAX_ATTEMPTS} attempts: {result}")
    return None


# -- faults in virtual time --------------------------------------------------------------------------------------------


def attack_runs(folder: Path, random: Random, count: int) -> Counts:
    """Disturb runs in virtual time. Each fault occurs at a random launch or at a random write to the log."""
    launches: dict[Path, int] = {}

    def execute(
        command: Sequence[str], path: Path, undisturbed_log: Path | None, random: Random, counts: Counts
    ) -> Outcome:
        if undisturbed_log is None:
            launch_numbers = [0]
            with mock.patch.object(SimulatedBackend, "on_launch", launch_numbers.append):
                result = call(command, counts)
            launches[path] = max(launch_numbers)
            return Outcome(result)
        fault, caused_faults = random.choice((*ENDING_FAULTS, *LOG_CHANGES)), list[Fault]()

        def cause_fault() -> None:
            if not caused_faults and (path.is_file() or fault in ENDING_FAULTS):
                caused_faults.append(fault)
                fault(path, random)

        def cause_fault_at_launch(number: int) -> None:
            if number == due_launch:
                cause_fault()

        due_launch = random.randint(1, launches[undisturbed_log])
        on_launch = mock.patch.object(SimulatedBackend, "on_launch", cause_fault_at_launch)
        due_write = random.randrange(len(read_complete_lines(undisturbed_log)) - (fault in LOG_CHANGES))
        on_write = call_at_write(due_write, random, cause_fault)
        with on_write if fault is _fill_disk else random.choice((on_write, on_launch)):
            result = call(command, counts)
        return Outcome(result, *caused_faults)

    return _disturb_runs(Counts("faults in virtual time"), RUNS, execute, folder, random, count)


@contextlib.contextmanager
def call_at_write(due: int, random: Random, cause_fault: Callable[[], None]) -> Iterator[None]:
    """Call ``cause_fault`` before, during or after the write number ``due``, counted from 0."""
    share = random.choice((0.0, random.random(), 1.0))
    write_numbers, real_write = itertools.count(), os.write

    def write(descriptor: int, data: bytes) -> int:
        if next(write_numbers) != due:
            return real_write(descriptor, data)
        part = real_write(descriptor, data[: int(share * len(data))])
        cause_fault()
        return part

    with mock.patch("os.write", write):
        yield


# -- real processes ----------------------------------------------------------------------------------------------------

#: The runs for the attack on real processes. Each takes about a second.
PROCESSES = (
    AttackedRun("sweep", ("sweep", *BACKEND, *MATMUL), "--m-range 0 12800 64 --n 1024 --k 1024"),
    AttackedRun("bandwidth", ("bandwidth", *BACKEND, *BANDWIDTH), "--pattern copy read write triad"),
    AttackedRun("find", ("find", *BACKEND, *MATMUL), "--regime burst --budget 2s", is_search=True),
)
#: The signals that end processes, each with the fault that represents it in ``Outcome``.
FAULTS_BY_SIGNAL = {
    signal.SIGKILL: _kill,
    signal.SIGINT: _make_signal_fault(signal.SIGINT),
    signal.SIGTERM: _make_signal_fault(signal.SIGTERM),
}


def start_process(command: Sequence[str]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    full_command, environment = [sys.executable, "-m", "mamf", *command], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(full_command, **pipes, errors="replace", start_new_session=True, env=environment)


def attack_processes(folder: Path, random: Random, count: int) -> Counts:
    """Disturb real processes with SIGKILL, SIGINT and SIGTERM."""
    return _disturb_runs(Counts("killed processes"), PROCESSES, _execute_process, folder, random, count)


def _execute_process(
    command: Sequence[str], path: Path, undisturbed_log: Path | None, random: Random, counts: Counts
) -> Outcome:
    """Run a command in a real process, and count hangs and tracebacks.

    If ``undisturbed_log`` is not None, send a random signal up to 0.3 s after the log has grown.
    """
    size, process, fault = path.stat().st_size if path.exists() else 0, start_process(command), None
    if undisturbed_log:
        deadline = time.monotonic() + _HANG_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if path.exists() and path.stat().st_size > size:
                break
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0, 0.3))
        number, fault = random.choice(list(FAULTS_BY_SIGNAL.items()))
        process.send_signal(number)
    counts.totals["calls"] += 1
    try:
        out, err = process.communicate(timeout=_HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        counts.add_fault("hangs", command[0], f"did not end within {_HANG_SECONDS:g} s")
    counts.codes[process.returncode] += 1
    if "Traceback" in out + err:
        counts.add_fault("tracebacks", command[0], err.strip().splitlines()[-1][:300])
    return Outcome(CommandResult(process.returncode, out, err), fault)
