"""Every error mamf raises on purpose.

    MamfError
    ├── UsageError                 the request is wrong; the message says what is allowed. A ValueError too
    │   ├── UnknownNameError       no backend, kernel, dtype ... of that name; suggests the nearest
    │   ├── LogMismatchError       a log cannot be resumed by this device, software or request
    │   └── IncomparableError      two figures of different regimes, dtypes or devices make no ratio
    ├── PluginError                a backend, kernel or operation broke its contract; names it and its fault
    ├── UnavailableError           the backend, device or kernel cannot be used here; says what would change it
    ├── UnsupportedError           this kernel cannot do this dtype, layout or shape
    ├── RunLogError                a run log cannot be read; says the line
    ├── NothingProfiledError       a script ended before a step of it was profiled; says why
    ├── DeviceError                the device failed outside the measurement of a shape
    └── RunLogWriteError           a run log cannot be written (disk full, no permission)

Everything else that surfaces from a measurement becomes the status of that measurement and never ends a run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MamfError(Exception):
    """Base of all errors raised on purpose. Its text is one line that a user can act on."""

    exit_code = 2


class UsageError(MamfError, ValueError):
    """The request is wrong."""


class UnknownNameError(UsageError):
    """No such name; the message lists the known ones and the nearest match."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        choices = sorted(known)
        nearest = difflib.get_close_matches(name, choices, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        super().__init__(f"unknown {what} {name!r}{hint}; known: {', '.join(choices) or 'none'}")


class LogMismatchError(UsageError):
    """A run log belongs to another device, software or request."""


class IncomparableError(UsageError):
    """Two figures of different regimes, dtypes or devices: their ratio would mean nothing."""


class PluginError(MamfError):
    """A backend, kernel or operation broke its contract: what it threw or returned is its own fault."""


class MamfWarning(UserWarning):
    """What a run goes on without. The command line says it in a line, once."""


class PluginWarning(MamfWarning):
    """A registered plugin is broken and left out, because it was not asked for by name."""


class UnavailableError(MamfError):
    """A backend, device or kernel cannot be used on this machine."""


class UnsupportedError(MamfError):
    """A kernel cannot do this dtype, layout or shape."""


class DeviceError(MamfError):
    """The device failed outside the measurement of a shape: nothing more can be measured in this run."""

    exit_code = 1


class NothingProfiledError(MamfError):
    """A script ended before a step of it was profiled. ``exit_code``: the script's own, or 1."""

    def __init__(self, reason: str, script_exit_code: int) -> None:
        super().__init__(f"nothing was profiled: {reason}")
        self.exit_code = script_exit_code or 1


class RunLogError(MamfError):
    """A run log cannot be read."""


class RunLogWriteError(MamfError):
    """A run log cannot be written."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """An exception in one line: vendors' messages run over pages."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def describe_error(error: BaseException) -> str:
    """An exception in one line, with what it is: ``KeyError: 'x'`` says more than ``'x'``. mamf's own say it all."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, MamfError) or line == kind else f"{kind}: {line}"
