"""Start one child process per device and watch all of them, for ``mamf node`` and ``--devices``.

If one child hangs, dies or fails, the other children continue. Each child has a number, its rank. It sends messages as
lines of JSON on stdout, and receives lines of text on stdin.
"""

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

from mamf.errors import CRASH_SIGNAL_NAMES

#: Keys in the JSON messages of a child process. Their values are its current activity (phase), the reason why its
#: device failed, and the bus address of its device.
PHASE_KEY, FAILURE_KEY, ADDRESS_KEY = "phase", "failure", "address"
#: Key in messages that this module creates. Its value is a line that a child process printed to stderr.
WARNING_KEY = "warning"
#: Two phases of a child process. In the first, it waits until all other children are ready. In the second, all children
#: measure at the same time.
WAITING_PHASE, MEASURING_TOGETHER_PHASE = "waits for the others", "together"
# Maximum time to wait for a message before this module checks whether a child hangs.
_POLL_SECONDS = 0.5
# Maximum time between SIGTERM and SIGKILL, in which a child can close its log.
_MAX_CLOSING_SECONDS = 15.0
#: Exit codes of a child process that are not failures: 0 (success) and 130 (interrupted by Ctrl-C).
SUCCESS_EXIT_CODES = (0, 130)


class ChildEvent(NamedTuple):
    """A message from a child process, or a notice that the process has ended.

    - ``rank``: the number of the child.
    - ``message``: the JSON object that the child sent, or None if the child has ended.
    - ``exit_code``: the exit code of a child that has ended, negative if a signal killed it.
    - ``last_stderr_line``: the last line that the child printed to stderr before it ended.
    """

    rank: int
    message: Mapping[str, Any] | None
    exit_code: int = 0
    last_stderr_line: str = ""


@dataclass
class ChildWatch:
    """The state of all child processes, updated from their messages. This class starts and kills no processes.

    - ``ranks``: the numbers of all children that were started.
    - ``timeout_seconds``: a child that sends no message for longer than this counts as hanging.
    - ``read_clock``: returns the current time in seconds.
    - ``success_exit_codes``: exit codes of a child that are not failures.
    - ``exit_codes``: the exit code of each child that has ended, by rank.
    - ``failure_reasons``: why a child or its device failed, by rank.
    - ``phases``: the last activity that each child reported, by rank.
    - ``bus_addresses``: the bus address of each child's device, by rank; None if it is unknown.
    """

    ranks: Sequence[int]
    timeout_seconds: float
    read_clock: Callable[[], float] = time.monotonic
    success_exit_codes: Sequence[int] = SUCCESS_EXIT_CODES
    exit_codes: dict[int, int] = field(default_factory=dict)
    failure_reasons: dict[int, str] = field(default_factory=dict)
    phases: dict[int, str] = field(default_factory=dict)
    bus_addresses: dict[int, str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running_ranks = set(self.ranks)
        self._last_message_times = dict.fromkeys(self.ranks, self.read_clock())

    def record_event(self, event: ChildEvent) -> None:
        """Record a message from a child, or its exit code if the child has ended."""
        rank = event.rank
        self._last_message_times[rank] = self.read_clock()
        if event.message is not None:
            if PHASE_KEY in event.message:
                self.phases[rank] = str(event.message[PHASE_KEY])
            if ADDRESS_KEY in event.message:
                self.bus_addresses[rank] = event.message[ADDRESS_KEY]
            if event.message.get(FAILURE_KEY) and rank in self.running_ranks:
                self.failure_reasons.setdefault(rank, str(event.message[FAILURE_KEY]))
        elif rank in self.running_ranks:
            self.running_ranks.discard(rank)
            self.exit_codes[rank] = event.exit_code
            if event.exit_code not in self.success_exit_codes and rank not in self.failure_reasons:
                signal = CRASH_SIGNAL_NAMES.get(event.exit_code, f"signal {-event.exit_code}")
                reason = f"killed by {signal}" if event.exit_code < 0 else f"exit code {event.exit_code}"
                explanation = event.last_stderr_line.removeprefix("mamf: ") or reason
                self.failure_reasons[rank] = (
                    f"its process ended early (phase: {self.phases.get(rank, 'start')}): {explanation}"
                )

    def mark_hanging_children_as_failed(self) -> list[int]:
        """Record a failure for each child that sent no message for longer than the timeout, and return the ranks of
        these children. A child that waits for other children does not count as hanging.
        """
        earliest_time = self.read_clock() - self.timeout_seconds
        hanging = [
            rank
            for rank in sorted(self.running_ranks)
            if self._last_message_times[rank] < earliest_time and self.phases.get(rank) != WAITING_PHASE
        ]
        for rank in hanging:
            self.failure_reasons.setdefault(
                rank,
                f"its process hangs: it sent no message for {self.timeout_seconds:.0f} s "
                f"(phase: {self.phases.get(rank, 'start')})",
            )
        return hanging


def parse_message(line: str) -> dict[str, Any]:
    """Parse the JSON object in a line of a child's stdout. Returns an empty dict if the line is anything else, such as
    text that a library printed.
    """
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def watch_children_until_end(
    watch: ChildWatch,
    processes: Mapping[int, Any],
    wait_for_event: Callable[[float], ChildEvent | None],
    resume_children: Callable[[], None],
    on_event: Callable[[ChildEvent], None] = lambda event: None,
) -> None:
    """Watch all child processes until every one has ended, and kill each child that hangs.

    - ``watch``: the state of the children, which this function updates.
    - ``processes``: the process of each child, by rank.
    - ``wait_for_event``: returns the next event, or None if no event arrives within the given seconds.
    - ``resume_children``: lets all running children continue. Called when all of them wait at a barrier.
    - ``on_event``: called with each event, after ``watch`` has recorded it.
    """
    while watch.running_ranks:
        if (event := wait_for_event(_POLL_SECONDS)) is not None:
            watch.record_event(event)
            on_event(event)
        for rank in watch.mark_hanging_children_as_failed():
            processes[rank].kill()
            # Do not wait until this process ends, because a process that is blocked in a driver survives SIGKILL.
            watch.running_ranks.discard(rank)
        if watch.running_ranks and all(watch.phases.get(rank) == WAITING_PHASE for rank in watch.running_ranks):
            for rank in watch.running_ranks:
                watch.record_event(ChildEvent(rank, {PHASE_KEY: MEASURING_TOGETHER_PHASE}))
            resume_children()


def start_child(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a child process in a new session, so that Ctrl-C in the terminal interrupts only the parent process, which
    then stops the child.
    """
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


class ChildProcesses(contextlib.AbstractContextManager["ChildProcesses"]):
    """The child processes of a run, with a queue of their messages. As a context manager, it stops them on exit.

    - ``processes``: the process of each child, by rank.
    """

    def __init__(self, commands: Mapping[int, Sequence[str]], environment: Mapping[str, str]) -> None:
        self._event_queue: queue.Queue[ChildEvent] = queue.Queue()
        if len(commands) > 1:
            # Without this limit torch starts one thread per core in each process, and the threads of different
            # processes compete for the same cores.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            environment = {"OMP_NUM_THREADS": str(max(1, cores // len(commands))), **environment}
        self.processes: dict[int, Any] = {}
        try:
            for rank, command in commands.items():
                self.processes[rank] = start_child(command, environment)
        except BaseException:
            self.stop_all()
            raise
        for rank, process in self.processes.items():
            threading.Thread(target=self._read_messages, args=(rank, process), daemon=True).start()

    def send_line(self, rank: int, line: str) -> None:
        """Send a line to a child's stdin. If the child has ended, do nothing: ``wait_for_event`` reports its end."""
        with contextlib.suppress(OSError):
            self.processes[rank].stdin.write(f"{line}\n")
            self.processes[rank].stdin.flush()

    def wait_for_event(self, seconds: float) -> ChildEvent | None:
        """Return the next event of any child (a message or its end), or None if no event arrives within ``seconds``."""
        try:
            return self._event_queue.get(timeout=seconds)
        except queue.Empty:
            return None

    def _read_messages(self, rank: int, process: Any) -> None:
        # Put an event into the queue for each line of the child's stdout, and one with the exit code when the child
        # has ended. This method runs in a thread.
        last_lines: list[str] = []
        stderr_reader = threading.Thread(target=self._forward_stderr, args=(rank, process, last_lines), daemon=True)
        stderr_reader.start()
        for line in process.stdout:
            self._event_queue.put(ChildEvent(rank, parse_message(line)))
        exit_code = process.wait()
        stderr_reader.join(timeout=1.0)
        self._event_queue.put(ChildEvent(rank, None, exit_code, last_lines[-1] if last_lines else ""))

    def _forward_stderr(self, rank: int, process: Any, last_lines: list[str]) -> None:
        """Put each line of a child's stderr into the queue as an event. Runs in a thread.

        ``last_lines``: a list that this method updates to contain only the most recent line.
        """
        for line in filter(None, map(str.strip, process.stderr)):
            last_lines[:] = [line]
            self._event_queue.put(ChildEvent(rank, {WARNING_KEY: line}))

    def stop_all(self) -> None:
        """Send SIGTERM to all children, so that they close their logs. After 15 s, kill those that still run."""
        for process in self.processes.values():
            process.terminate()
        deadline = time.monotonic() + _MAX_CLOSING_SECONDS
        for process in self.processes.values():
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def __exit__(self, *raised: object) -> None:
        if any(process.poll() is None for process in self.processes.values()):
            self.stop_all()
