"""All errors that mamf raises on purpose.

    MamfError
    ├── UsageError                 the request is wrong; the message says what is allowed. A ValueError too
    │   ├── UnknownNameError       no backend, kernel, dtype ... has that name; suggests the nearest
    │   ├── LogMismatchError       a log does not match this device, software or request and cannot be resumed
    │   └── IncomparableError      figures of different regimes, dtypes or devices have no meaningful ratio
    ├── PluginError                a backend, kernel or operation broke its contract; names it and the error
    ├── UnavailableError           the backend, device or kernel cannot be used here; says what would change it
    ├── UnsupportedError           the kernel does not support this dtype, layout or shape
    ├── RunLogError                a run log cannot be read; names the line
    ├── NothingProfiledError       a script ended before one of its training steps was profiled; says why
    ├── DeviceError                the device failed outside the measurement of a shape
    │   └── DeviceLostError        a launch left the device unusable for this process; holds the row
    └── RunLogWriteError           a run log cannot be written (disk full, no permission)

All other exceptions raised within a measurement become the status of that measurement and never end a run.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Iterable
from typing import Any

#: How the reason of a failed row begins if its launch ended the process or lost the device.
CRASHED, LOST, GIVEN_UP = "crashed the process", "lost the device", "ended the process three times"
_LONGEST_LINE = 1000
#: The names of the signals of a crash, by exit code.
CRASH_SIGNALS = {-each: each.name for each in signal.Signals if each.name in "SIGSEGV SIGBUS SIGABRT SIGILL SIGFPE"}


class MamfError(Exception):
    """Base of all errors raised on purpose. The message is one line that a user can act on."""

    exit_code = 2


class UsageError(MamfError, ValueError):
    """The request is wrong."""


class UnknownNameError(UsageError):
    """No such name; the message lists the known names and the nearest match."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        nearest = difflib.get_close_matches(name, choices, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        super().__init__(f"unknown {what} {name!r}{hint}; known: {', '.join(choices) or 'none'}")


class LogMismatchError(UsageError):
    """A run log belongs to another device, software or request."""


class IncomparableError(UsageError):
    """Figures of different regimes, dtypes or devices: their ratio would be meaningless."""


class PluginError(MamfError):
    """A backend, kernel or operation broke its contract by what it raised or returned."""


class MamfWarning(UserWarning):
    """A problem that does not stop a run. The command line prints each warning once, in one line."""


class PluginWarning(MamfWarning):
    """A registered plugin is broken and is skipped, because it was not requested by name."""


class LogChangedWarning(MamfWarning):
    """Another program changed the log of a run, which was written again. A command then ends with exit code 1."""


class UnavailableError(MamfError):
    """A backend, device or kernel cannot be used on this machine."""


class UnsupportedError(MamfError):
    """A kernel does not support this dtype, layout or shape."""


class DeviceError(MamfError):
    """The device failed outside the measurement of a shape: this run cannot measure anything else."""

    exit_code = 1


class DeviceLostError(DeviceError):
    """A launch left the device unusable for this process. ``row``: its failed measurement, for the log."""

    def __init__(self, message: str, row: Any) -> None:
        super().__init__(message)
        self.row = row


class NothingProfiledError(MamfError):
    """A script ended before one of its training steps was profiled. ``exit_code``: the script's exit code, or 1."""

    def __init__(self, reason: str, script_exit_code: int) -> None:
        super().__init__(f"nothing was profiled: {reason}")
        self.exit_code = script_exit_code or 1


class RunLogError(MamfError):
    """A run log cannot be read. ``whole_lines``: how many lines before the faulty one can be read."""

    def __init__(self, message: str, whole_lines: int = 0) -> None:
        super().__init__(message)
        self.whole_lines = whole_lines


class RunLogWriteError(MamfError):
    """A run log cannot be written."""

    exit_code = 1


class Interrupted(KeyboardInterrupt):
    """The command line received a signal that ends the run. (A plugin may raise KeyboardInterrupt itself.)"""


#: Exceptions that end a run wherever they are raised. While the command line handles signals, the first is Interrupted.
ENDING: list[type[BaseException]] = [KeyboardInterrupt]


def plugin_errors() -> tuple[type[BaseException], ...]:
    """What ``except plugin_errors():`` catches: everything, even SystemExit, except what is in ENDING."""
    return () if isinstance(sys.exc_info()[1], tuple(ENDING)) else (BaseException,)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, shortened, because vendors' messages can fill pages."""
    try:
        lines = str.strip(str(error)).splitlines()
    except plugin_errors():
        lines = ["its message cannot be read"]
    return lines[0].strip()[:_LONGEST_LINE] if lines else type(error).__name__


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line, with its type unless it is a MamfError: ``KeyError: 'x'``."""
    line, kind = first_line(error), " ".join(type(error).__name__[:_LONGEST_LINE].split())
    return line if isinstance(error, MamfError) or line == kind else f"{kind}: {line}"
