"""Keep every measured row in the log of a run that is interrupted or that crashes.

The first SIGINT, SIGTERM or SIGHUP raises a KeyboardInterrupt, but never while a record is written. A second SIGINT or
SIGTERM ends the process at once. A repetition shortly after the first signal does not count as a second signal, because
a terminal or batch system and the watching process may both send the same signal.

A second process watches the run, so that a crash of a kernel loses only one row. The watching process forks a child
before it imports anything large. The child measures the rows, and stores in shared memory which row it is measuring. If
a signal such as SIGSEGV ends the child, or a library calls exit(), the watching process appends this row to the log as
a failed row, and forks a new child, which resumes the log. This works on Linux only. On other systems a crash ends the
run, and --resume continues it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mamf.cli.terminal import print_line, warn
from mamf.errors import (
    CRASH_REASON,
    CRASH_SIGNAL_NAMES,
    LOST_DEVICE_REASON,
    RUN_ENDING_EXCEPTIONS,
    RunInterrupted,
    RunLogWriteError,
)

#: Exit codes of commands: 1 if nothing was measured or something failed, 3 if a figure is worse than its baseline or a
#: result is wrong, and 130 after a signal.
FAILURE_EXIT_CODE, REGRESSION_EXIT_CODE, INTERRUPTED_EXIT_CODE = 1, 3, 130
#: The signals that end a run. SIGHUP is not among them if it was ignored when the process started, as under nohup.
ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM} | {
    each for each in signal.Signals if each.name == "SIGHUP" and signal.getsignal(each) != signal.SIG_IGN
}
#: A signal that arrives within this time after the first signal counts as its repetition, not as a second request by
#: the user.
_MAX_REPEATED_SIGNAL_SECONDS = 0.3


class SignalHandler:
    """A handler of signals that is active while its context is open: the first signal raises RunInterrupted, a
    KeyboardInterrupt, in the main thread. In any other thread the context does nothing.

    Python raises the exception between two bytecodes, so a call into a vendor's library returns first. The code within
    ``shield_from_signals`` also finishes before the exception is raised.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        self._is_shielded = False
        self._interrupted_at = 0.0
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalHandler:
        # Python delivers signals to the main thread only, and refuses to set a handler in another thread.
        for signal_number in ENDING_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._previous_handlers[signal_number] = signal.signal(signal_number, self._raise_on_first_signal)
        self._previous_ending_exception, RUN_ENDING_EXCEPTIONS[0] = RUN_ENDING_EXCEPTIONS[0], RunInterrupted
        return self

    def __exit__(self, *exception_info: object) -> None:
        for signal_number, handler in self._previous_handlers.items():
            # After an interrupt, do not restore the default handler, which would kill the process if the signal arrives
            # again while the process ends.
            if self.is_interrupted and handler == signal.SIG_DFL:
                continue
            is_python_default = self.is_interrupted and handler == signal.default_int_handler
            signal.signal(signal_number, self._handle_signal_after_run if is_python_default else handler)
        RUN_ENDING_EXCEPTIONS[0] = self._previous_ending_exception

    def _raise_on_first_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            # Ignore a second SIGHUP: a shell may send it again after its terminal has closed. Only a second Ctrl-C or
            # SIGTERM is a request to end at once.
            if (
                signal_number in (signal.SIGINT, signal.SIGTERM)
                and time.monotonic() > self._interrupted_at + _MAX_REPEATED_SIGNAL_SECONDS
            ):
                os._exit(INTERRUPTED_EXIT_CODE)
            return
        self.is_interrupted, self._interrupted_at = True, time.monotonic()
        if not self._is_shielded:
            raise RunInterrupted

    def _handle_signal_after_run(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-C after the run as Python does by default, but ignore repetitions of the signal that ended the
        run.
        """
        if time.monotonic() > self._interrupted_at + _MAX_REPEATED_SIGNAL_SECONDS:
            signal.default_int_handler(signal_number, frame)

    @contextmanager
    def shield_from_signals(self) -> Iterator[None]:
        """Delay a first signal that arrives while the context is open, and raise RunInterrupted for it when the context
        ends.
        """
        was_raised_before = self.is_interrupted
        self._is_shielded = True
        try:
            yield
        finally:
            self._is_shielded = False
        self.raise_if_interrupted(was_raised_before)

    def raise_if_interrupted(self, was_raised_before: bool = False) -> None:
        """Raise RunInterrupted if a signal has arrived. It may have arrived in a shielded block, or a library may have
        caught an earlier RunInterrupted.

        ``was_raised_before``: if True, do nothing, because the signal arrived and raised RunInterrupted before the
        shielded block.
        """
        if self.is_interrupted and not was_raised_before:
            raise RunInterrupted


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once while the context is open. Use this for imports, because the imports of torch
    and numpy can swallow a KeyboardInterrupt, and only before there is anything to lose.
    """
    previous_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED_EXIT_CODE))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


_WATCHED_COMMANDS = {
    "attention",
    "autoprofile",
    "bandwidth",
    "counters",
    "explain",
    "find",
    "guard",
    "model",
    "roofline",
    "sweep",
    "verify",
}
#: With one of these options, a command needs no watching process: either the command launches nothing, or another mamf
#: process already watches it.
_UNWATCHED_OPTIONS = {"--dry-run", "--help", "-h", "--led"}
_HANDLED_SIGNALS = ENDING_SIGNALS | {each for each in signal.Signals if each.name in ("SIGCONT", "SIGCHLD")}
_SHARED_MEMORY_BYTES, _TEXT_END = 1 << 20, b"\0"
#: A child stores this text as ``row_label`` when its command has ended. If a child exits without storing it, a plugin
#: or a library has called exit().
COMMAND_ENDED_LABEL = "over"
_EMPTY_STATE = b'["", 0, [], "", ""]'
_PR_SET_PDEATHSIG = 1  # the constant of this name in linux/prctl.h


class CrashedRun(NamedTuple):
    """A run whose process crashed, for the new process that resumes it.

    ``log_path``: the log to resume. ``spent_seconds``: seconds since the log was opened. ``exit_codes``: the exit codes
    of the command's earlier runs, if it writes several logs, such as ``mamf find`` with several dtypes.
    """

    log_path: Path
    spent_seconds: float
    exit_codes: list[int]


class SharedCrashState:
    """The memory that the watching process and its child share. It contains the path of the log, and the row to append
    to the log if the child dies.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _SHARED_MEMORY_BYTES)
        self.crashed_run: CrashedRun | None = None

    def store_state(
        self, log_path: Path | str, log_opened_at: float, exit_codes: list[int], row_line: str = "", row_label: str = ""
    ) -> None:
        """Store the line that the watching process appends to the log if the child dies now. If ``row_line`` is empty,
        the watching process appends nothing.

        ``row_line``: the row as a line of the log, without the newline. ``row_label``: the kernel and the shape of the
        row, for a warning. ``log_opened_at``: time.monotonic() when the log was opened. ``exit_codes``: the exit codes
        in CrashedRun.
        """
        data = json.dumps([str(log_path), log_opened_at, exit_codes, row_line, row_label]).encode() + _TEXT_END
        self._page[: len(data)] = data

    def _load_state(self) -> tuple[str, float, list[int], str, str]:
        return json.loads(self._page[: self._page.find(_TEXT_END)] or _EMPTY_STATE)  # type: ignore[no-any-return]

    def mark_command_ended(self) -> None:
        """Store that the command has ended, so that the watching process does not mistake its exit code for a crash."""
        log_path, log_opened_at, exit_codes, *_ = self._load_state()
        self.store_state(log_path, log_opened_at, exit_codes, row_label=COMMAND_ENDED_LABEL)

    def log_crash_or_get_exit_code(self, child_exit_code: int) -> int | None:
        """Return the exit code of the command, or None if its child crashed and a new child must measure the remaining
        rows.

        If the child crashed, first append the row that it was measuring to the log. ``child_exit_code``: the exit code
        of the child, negative if a signal ended it. Raises RunLogWriteError if the log cannot be written.
        """
        log_path, log_opened_at, exit_codes, row_line, row_label = self._load_state()
        is_device_lost = bool(row_line) and f'"reason": "{CRASH_REASON}"' not in row_line
        if child_exit_code not in CRASH_SIGNAL_NAMES and (
            child_exit_code < 0 or child_exit_code == INTERRUPTED_EXIT_CODE or row_label == COMMAND_ENDED_LABEL
        ):
            return child_exit_code
        if sys.stderr.isatty():
            print_line("", sys.stderr)  # end the line of the progress bar before the warning
        failure = (
            LOST_DEVICE_REASON
            if is_device_lost
            else f"{CRASH_REASON} ({CRASH_SIGNAL_NAMES.get(child_exit_code, f'exit code {child_exit_code}')})"
        )
        if not row_line or not log_path:
            warn(
                f"code outside a measurement {failure}; "
                f"{f'finished rows are in {log_path}' if log_path else 'no log was written'}"
            )
            return min(child_exit_code, 1) or 1
        _append_log_line(Path(log_path), row_line.replace(f'"{CRASH_REASON}"', f'"{failure}"'))
        warn(f"{row_label} {failure}; a new process measures the rest")
        self.store_state(log_path, log_opened_at, exit_codes)
        self.crashed_run = CrashedRun(Path(log_path), time.monotonic() - log_opened_at, exit_codes)
        return None


#: The memory that this process shares with the process that watches it, or None if no process watches it.
CRASH_STATE: SharedCrashState | None = None


def fork_watched_child(typed_words: Sequence[str]) -> None:
    """Fork, and return in the child, which runs the command. The parent watches the child and exits with its exit code.

    Return without a fork if the command launches nothing or the system is not Linux. In the parent, raises
    RunLogWriteError if it cannot write the log.
    """
    if (
        sys.platform != "linux"
        or not _WATCHED_COMMANDS.intersection(typed_words[:1])
        or _UNWATCHED_OPTIONS.intersection(typed_words)
    ):
        return
    global CRASH_STATE
    crash_state, parent_pid = SharedCrashState(), os.getpid()
    gc.freeze()  # otherwise garbage collection in the child would write to, and so copy, every shared page
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    while True:
        child_pid = os.fork()
        if not child_pid:
            CRASH_STATE = crash_state
            request_kill_when_parent_ends(parent_pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
            return
        child_exit_code, was_interrupted = _wait_for_child(child_pid)
        if was_interrupted and child_exit_code < 0:  # A library that is interrupted during its import may crash.
            os._exit(INTERRUPTED_EXIT_CODE)
        exit_code = crash_state.log_crash_or_get_exit_code(child_exit_code)
        if exit_code is not None:
            os._exit(exit_code if exit_code >= 0 else 128 - exit_code)
        if signal.sigpending() & ENDING_SIGNALS:
            os._exit(INTERRUPTED_EXIT_CODE)


def _wait_for_child(child_pid: int) -> tuple[int, bool]:
    """Wait until the child ends, and return its exit code and whether a signal asked the run to end. Meanwhile forward
    signals that only the parent received.

    Other processes know only the parent, so they send signals only to the parent. A terminal that closes may also send
    SIGHUP only to the parent, because the parent may be the first process of the terminal's session.
    """
    was_interrupted = False
    while True:
        signal_info = signal.sigwaitinfo(_HANDLED_SIGNALS)
        if signal_info.si_signo != signal.SIGCHLD:
            was_interrupted = was_interrupted or signal_info.si_signo in ENDING_SIGNALS
            # Forward signals that another process sent. Do not forward Ctrl-C, because the terminal sends Ctrl-C to the
            # child too.
            if signal_info.si_code <= 0 or signal_info.si_signo == signal.SIGHUP:
                os.kill(child_pid, signal_info.si_signo)
        elif (ended := os.waitpid(child_pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1]), was_interrupted


def _append_log_line(log_path: Path, line: str) -> None:
    """Append a line to the log of a dead process. Replace the last line if it is incomplete. Raises RunLogWriteError
    if the log cannot be written.
    """
    try:
        with log_path.open("r+b") as file:
            file.seek(file.read().rfind(b"\n") + 1)
            file.truncate()
            file.write(f"{line}\n".encode())
    except OSError as error:
        raise RunLogWriteError(f"cannot write {log_path}: {error.strerror}") from None


def request_kill_when_parent_ends(parent_pid: int) -> None:
    """Ask the operating system to kill this process when its parent process ends. Do nothing on systems that cannot do
    this.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(INTERRUPTED_EXIT_CODE)
