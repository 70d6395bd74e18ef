"""Runs one child process per device and watches them. If one hangs, dies or fails, the others continue."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mamf.errors import CRASH_SIGNALS

#: Keys of a child's message: its current phase, why its device failed, the device's bus address.
PHASE, FAILURE, ADDRESS = "phase", "failure", "address"
#: Key of a message with a line that the child printed to stderr.
WARNING = "warning"
#: The phases of a child that waits for the others, and of one that measures together with them.
WAITING, TOGETHER = "waits for the others", "together"
_TICK_SECONDS = 0.5
_MAX_END_SECONDS = 15.0
#: Exit codes that are not failures: success, and an interrupted run.
SUCCESS_CODES = (0, 130)


class ChildEvent(NamedTuple):
    """A message from a child or, if ``message`` is None, its end. ``last_line``: the last line of its stderr."""

    rank: int
    message: Mapping[str, Any] | None
    code: int = 0
    last_line: str = ""


@dataclass
class ChildWatch:
    """The state of all children, by rank.

    ``ranks``: all children that were started. ``patience``: seconds without a message after which a child counts as
    hanging. ``now``: a clock in seconds. ``success_codes``: exit codes that are not failures.
    """

    ranks: Sequence[int]
    patience: float
    now: Callable[[], float] = time.monotonic
    success_codes: Sequence[int] = SUCCESS_CODES
    codes: dict[int, int] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    phases: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = set(self.ranks)
        self._last_heard = dict.fromkeys(self.ranks, self.now())

    def update(self, event: ChildEvent) -> None:
        """Update the state with a message or the end of a child."""
        rank = event.rank
        self._last_heard[rank] = self.now()
        if event.message is not None:
            if PHASE in event.message:
                self.phases[rank] = str(event.message[PHASE])
            if ADDRESS in event.message:
                self.addresses[rank] = event.message[ADDRESS]
            if event.message.get(FAILURE) and rank in self.running:
                self.failures.setdefault(rank, str(event.message[FAILURE]))
        elif rank in self.running:
            self.running.discard(rank)
            self.codes[rank] = event.code
            if event.code not in self.success_codes and rank not in self.failures:
                signal = CRASH_SIGNALS.get(event.code, f"signal {-event.code}")
                reason = f"killed by {signal}" if event.code < 0 else f"exit code {event.code}"
                words = event.last_line.removeprefix("mamf: ") or reason
                self.failures[rank] = f"its process ended early (phase: {self.phases.get(rank, 'start')}): {words}"

    def all_wait(self) -> bool:
        """Return whether every running child waits for the others."""
        return all(self.phases.get(rank) == WAITING for rank in self.running)

    def resume_all(self) -> None:
        """Mark all running children as measuring at the same time, and restart their timeouts."""
        for rank in self.running:
            self.phases[rank], self._last_heard[rank] = TOGETHER, self.now()

    def mark_hanging(self) -> list[int]:
        """Mark children that sent nothing for too long as failed, unless they wait for others. Return their ranks."""
        late = self.now() - self.patience
        hanging = [
            rank for rank in sorted(self.running) if self._last_heard[rank] < late and self.phases.get(rank) != WAITING
        ]
        for rank in hanging:
            reason = f"it hangs: no message for {self.patience:.0f} s (phase: {self.phases.get(rank, 'start')})"
            self.failures.setdefault(rank, reason)
        return hanging


def parse_message(line: str) -> dict[str, Any]:
    """Parse a line of a child's stdout as a message. Returns an empty dict for any other output."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def watch_until_end(
    watch: ChildWatch,
    processes: Mapping[int, Any],
    events: Callable[[float], ChildEvent | None],
    release: Callable[[], None],
    on_event: Callable[[ChildEvent], None] = lambda event: None,
) -> None:
    """Watch all children until they have ended, and kill those that hang.

    ``events``: returns the next event, or None if none arrives within the given seconds. ``release``: called whenever
    all running children wait for one another; it must let them continue.
    """
    while watch.running:
        event = events(_TICK_SECONDS)
        if event is not None:
            watch.update(event)
            on_event(event)
        for rank in watch.mark_hanging():
            processes[rank].kill()
            watch.running.discard(rank)  # a process blocked in a driver survives the kill
        if watch.running and watch.all_wait():
            watch.resume_all()
            release()


def start_child(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a child in a new session, so that Ctrl-C reaches only the parent, which then stops the child."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def divide_cores(processes: int) -> dict[str, str]:
    """Return environment variables that divide the CPU cores among ``processes`` processes.

    Without them each process starts a torch thread per core, and these threads take the cores from one another.
    """
    if processes < 2:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


class Children(contextlib.AbstractContextManager["Children"]):
    """The child processes and their messages. Use as a context manager, which stops all children on exit."""

    def __init__(self, commands: Mapping[int, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._events: queue.Queue[ChildEvent] = queue.Queue()
        environment = {**divide_cores(len(commands)), **environment}
        self.processes: dict[int, subprocess.Popen[str]] = {}
        try:
            for rank, command in commands.items():
                self.processes[rank] = start_child(command, environment)
        except BaseException:
            self.stop()
            raise
        for rank, process in self.processes.items():
            threading.Thread(target=self._read, args=(rank, process), daemon=True).start()

    def send(self, rank: int, line: str) -> None:
        """Send a line to a child's stdin. If the child has ended, this does nothing: the watch notices its end."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(f"{line}\n")
            stdin.flush()

    def wait_for_event(self, seconds: float) -> ChildEvent | None:
        """Return the next event, or None if none arrives within ``seconds``."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        words: list[str] = []
        complaints = threading.Thread(target=self._forward_stderr, args=(rank, process, words), daemon=True)
        complaints.start()
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put(ChildEvent(rank, parse_message(line)))
        code = process.wait()
        complaints.join(timeout=1.0)
        self._events.put(ChildEvent(rank, None, code, words[-1] if words else ""))

    def _forward_stderr(self, rank: int, process: subprocess.Popen[str], words: list[str]) -> None:
        """Turn each line of a child's stderr into an event, and keep the last line in ``words``."""
        assert process.stderr is not None
        for line in filter(None, map(str.strip, process.stderr)):
            words[:] = [line]
            self._events.put(ChildEvent(rank, {WARNING: line}))

    def stop(self) -> None:
        """Ask all children to close their logs and end (SIGTERM), then kill those that are still running."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + _MAX_END_SECONDS
        for process in self.processes.values():
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def __exit__(self, *raised: object) -> None:
        if any(process.poll() is None for process in self.processes.values()):
            self.stop()
