"""Watches the process that measures: a kernel that crashes it costs its own row, the rest is measured in a new process.

The parent forks before anything heavy is imported, and waits. The child measures; memory that both share holds the log
and the row of the step in flight. If a signal such as SIGSEGV ends the child, the parent appends that row to the log
and forks again, to resume the log. Linux only; elsewhere a crash ends the run, and --resume continues it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mamf.cli.interruption import EXIT_CODE
from mamf.cli.terminal import say, warn
from mamf.errors import CRASH_SIGNALS, CRASHED, LOST, MamfError

_COMMANDS = {
    *("find", "sweep", "attention", "bandwidth", "model", "roofline", "explain", "guard", "counters", "autoprofile")
}
#: Nothing is launched, or another process of mamf watches.
_UNWATCHED = {"--dry-run", "--help", "-h", "--led"}
_HEARD = {each for each in signal.Signals if each.name in ("SIGINT", "SIGTERM", "SIGCONT", "SIGCHLD")}
_PAGE_BYTES, _LENGTH_BYTES = 1 << 20, 8
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Restart(NamedTuple):
    """A run that a crash ended, for the process that resumes its ``log``.

    ``spent``: seconds since the log was opened. ``finished``: logs of the same command that are complete; ``worst``:
    the highest of their exit codes.
    """

    log: Path
    spent: float
    finished: int
    worst: int


class Page:
    """Text that outlives the process that wrote it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _PAGE_BYTES)

    def write(self, text: str = "") -> None:
        """Replace the text; one that is too long is left out."""
        data = text.encode()
        self._memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
        if len(data) <= _PAGE_BYTES - _LENGTH_BYTES:
            self._memory[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
            self._memory[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "little")

    def read(self) -> str:
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        return self._memory[_LENGTH_BYTES : _LENGTH_BYTES + length].decode()


class Watch:
    """What parent and child share. ``log``: that of the run, as JSON; ``step``: the line in flight and its label."""

    def __init__(self) -> None:
        self.log, self.step = Page(), Page()
        self.begun = time.monotonic()
        self.restart: Restart | None = None
        self.finished = self.worst = 0

    # -- in the child ------------------------------------------------------------------------------------------------

    def open_log(self, path: Path) -> None:
        """Note the log that the run writes from now on."""
        before = self.restart.spent if self.restart and self.restart.log == path else 0.0
        self.log.write(json.dumps([str(path), time.monotonic() - before, self.finished, self.worst]))

    def finish_log(self, code: int) -> None:
        """One of several logs of a command is complete, with this exit code."""
        self.finished, self.worst = self.finished + 1, max(self.worst, code)

    # -- in the parent -----------------------------------------------------------------------------------------------

    def judge(self, code: int) -> bool:
        """Whether a new process can measure the rest, after one ended with this code; logs the row in flight."""
        name = signal.Signals(-code).name if code < 0 else ""
        line, _, label = self.step.read().partition("\n")
        is_open = f'"reason": "{CRASHED}"' in line
        if name not in CRASH_SIGNALS and (code <= 0 or not line or is_open):
            return False
        self.step.write()
        if sys.stderr.isatty():
            say("", sys.stderr)  # below the progress
        what = f"{CRASHED} ({name})" if is_open or not line else LOST
        log, begun, self.finished, self.worst = json.loads(self.log.read() or '["", 0, 0, 0]')
        if not line or not log:
            warn(
                f"{label or 'an error outside of a measurement'} {what}"
                + (f"; --resume {log} continues" if log else "")
            )
            return False
        try:
            append(log, line.replace(f'"{CRASHED}"', f'"{what}"') + "\n")
        except OSError as error:
            warn(f"{label} {what}; {log} cannot be written: {error.strerror}")
            return False
        warn(f"{label} {what}; a new process measures the rest")
        self.restart = Restart(Path(log), time.monotonic() - begun, self.finished, self.worst)
        return True


#: That of this process, if it is a watched child.
WATCH: Watch | None = None


def append(path: str, line: str) -> None:
    """Append a line to a file. Raises OSError."""
    with open(path, "ab", buffering=0) as file:  # noqa: PTH123
        file.write(line.encode())


def watch(typed: Sequence[str]) -> int | None:
    """Return twice: the exit code of the command in the parent, None in the process that is to run the command."""
    if sys.platform != "linux" or not typed or typed[0] not in _COMMANDS or _UNWATCHED.intersection(typed):
        return None
    global WATCH
    shared, parent = Watch(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    while True:
        child = os.fork()
        if not child:
            WATCH = shared
            _end_with(parent)
            return None
        code = _wait(child)
        if not shared.judge(code):
            return code if code >= 0 else _end_by(-code)
        if signal.sigpending() & {signal.SIGINT, signal.SIGTERM}:
            return EXIT_CODE


def listen() -> None:
    """Receive the signals that the parent held back until the command can handle them."""
    if WATCH is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)


def _wait(child: int) -> int:
    """The exit code of the child. A signal to the parent alone is forwarded; the terminal's reach both."""
    while True:
        received = signal.sigwaitinfo(_HEARD)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:  # from a process, not from the terminal
                os.kill(child, received.si_signo)
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _end_by(number: int) -> int:
    """End by the signal that ended the child, without a second core dump."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number  # the first process of a container survives its signals


def _end_with(parent: int) -> None:
    """Have the system kill this process if its parent dies."""
    with contextlib.suppress(ImportError, OSError):
        import ctypes

        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(MamfError.exit_code)
