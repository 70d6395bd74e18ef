"""Define all errors that mamf raises on purpose, the functions that check values and raise these errors, and the
values that some options accept.

    MamfError
    ├── UsageError                 a request is wrong; the message says what is allowed; also a ValueError
    │   ├── UnknownNameError       no backend, kernel, dtype ... has that name; the message suggests the nearest
    │   ├── LogMismatchError       a log does not match this device, software or request and cannot be resumed
    │   └── IncomparableError      figures of different regimes, dtypes or devices have no meaningful ratio
    ├── PluginError                a backend, kernel or operation broke its contract; the message names it
    ├── UnavailableError           the backend, device or kernel cannot be used here; the message says why
    ├── UnsupportedError           the kernel does not support this dtype, layout or shape
    ├── RunLogError                a run log cannot be read; the message names the line
    ├── NothingProfiledError       a script ended before one of its training steps was profiled
    ├── DeviceError                the device failed outside the measurement of a shape
    │   └── DeviceLostError        a launch left the device unusable for this process; contains the failed row
    └── RunLogWriteError           a run log cannot be written (disk full, no permission)

All other exceptions raised within a measurement become the status of that measurement and never end a run.

Shapes, problems and plans use the same checks, so bad input gives the same one-line error whether it comes from the
command line, Python or a log.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
import signal
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

#: The field ``reason`` of a failed row begins with one of these texts if the launch crashed the process (CRASH_REASON),
#: if the launch made the device unusable (LOST_DEVICE_REASON), or if mamf skipped the launch because the kernel had
#: already ended the process three times (REPEATED_CRASH_REASON).
CRASH_REASON, LOST_DEVICE_REASON, REPEATED_CRASH_REASON = (
    "crashed the process",
    "lost the device",
    "ended the process three times",
)
_MAX_MESSAGE_CHARACTERS = 1000
#: The names of the signals that end a crashed process, by the exit code that Python gives for them. Linux sends SIGKILL
#: to a process if the machine has no memory left.
CRASH_SIGNAL_NAMES = {
    -number: f"{number.name}, perhaps because memory ran out" if number.name == "SIGKILL" else number.name
    for number in signal.Signals
    if number.name in "SIGSEGV SIGBUS SIGABRT SIGILL SIGFPE SIGKILL"
}


class MamfError(Exception):
    """The base class of all errors that mamf raises on purpose. The message of such an error is one line that tells a
    user what to do.
    """

    exit_code = 2


class UsageError(MamfError, ValueError):
    """The error for a request that is wrong, such as an option with a value that is not allowed."""


class UnknownNameError(UsageError):
    """The error for a name that does not exist. Its message lists the known names and suggests the nearest."""

    def __init__(self, label: str, name: object, known_names: Iterable[str]) -> None:
        name, choices = str(name), sorted(known_names)
        nearest = [each for each in choices if name and each.startswith(name)] or difflib.get_close_matches(
            name, choices, n=1
        )
        hint = advise_against_commas(name) or (f" (did you mean {nearest[0]!r}?)" if nearest else "")
        super().__init__(f"unknown {label} {name!r}{hint}; known: {', '.join(choices) or 'none'}")


class LogMismatchError(UsageError):
    """The error for a run log that belongs to another device, software or request, and so cannot be resumed."""


class IncomparableError(UsageError):
    """The error for comparing figures of different regimes, dtypes or devices, whose ratio would be meaningless."""


class PluginError(MamfError):
    """The error for a backend, kernel or operation that broke its contract by what it raised or returned."""


class MamfWarning(UserWarning):
    """A warning about a problem that does not stop a run. The command line prints each warning once, in one line."""


class LogChangedWarning(MamfWarning):
    """The warning that another program changed the log of a run, and that mamf wrote the log again.

    A command that printed this warning ends with exit code 1.
    """


class UnavailableError(MamfError):
    """The error for a backend, device or kernel that cannot be used on this machine."""


class UnsupportedError(MamfError):
    """The error for a dtype, layout or shape that a kernel does not support."""


class DeviceError(MamfError):
    """The error for a device that failed outside the measurement of a row. The run ends, because it cannot measure
    anything else.
    """

    exit_code = 1


class DeviceLostError(DeviceError):
    """The error for a launch that left the device unusable for this process. ``row``: the launch's failed row, for the
    log.
    """

    def __init__(self, message: str, row: Any) -> None:
        super().__init__(message)
        self.row = row


class NothingProfiledError(MamfError):
    """The error for a script that ended before any of its training steps was profiled.

    ``exit_code``: the script's exit code, or 1 if that is 0.
    """

    def __init__(self, reason: str, script_exit_code: int) -> None:
        super().__init__(f"nothing was profiled: {reason}")
        self.exit_code = script_exit_code or 1


class RunLogError(MamfError):
    """The error for a run log that cannot be read. ``readable_line_count``: the number of lines before the first line
    that cannot be read.
    """

    def __init__(self, message: str, readable_line_count: int = 0) -> None:
        super().__init__(message)
        self.readable_line_count = readable_line_count


class RunLogWriteError(MamfError):
    """The error for a run log that cannot be written, for example because the disk is full."""

    exit_code = 1


class RunInterrupted(KeyboardInterrupt):
    """The exception that the command line raises if a signal ends the run.

    It is a separate class because a plugin may raise KeyboardInterrupt itself.
    """


#: The exceptions that end a run wherever they are raised. While the command line handles signals, this list contains
#: RunInterrupted instead of KeyboardInterrupt.
RUN_ENDING_EXCEPTIONS: list[type[BaseException]] = [KeyboardInterrupt]


def get_catchable_plugin_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions to catch in an ``except`` clause around a plugin's code: all exceptions, even SystemExit.
    If the exception that was raised is one of RUN_ENDING_EXCEPTIONS, return an empty tuple, so that the clause does not
    catch it.
    """
    return () if isinstance(sys.exc_info()[1], tuple(RUN_ENDING_EXCEPTIONS)) else (BaseException,)


def get_first_message_line(error: BaseException) -> str:
    """Return the first line of an exception's message, shortened because the messages of vendors can fill pages."""
    try:
        lines = str.strip(str(error)).splitlines()
    except get_catchable_plugin_errors():
        lines = ["its message cannot be read"]
    return lines[0].strip()[:_MAX_MESSAGE_CHARACTERS] if lines else type(error).__name__


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line, with its type unless it is a MamfError: ``KeyError: 'x'``."""
    line, kind = get_first_message_line(error), " ".join(type(error).__name__[:_MAX_MESSAGE_CHARACTERS].split())
    return line if isinstance(error, MamfError) or line == kind else f"{kind}: {line}"


#: The largest size that a shape may have, because it is the largest 64-bit index.
MAX_SIZE = 2**63 - 1
#: The largest seed of a problem. For each operand, mamf adds a 32-bit number to the seed. The sum must stay below
#: 2**64, the limit of random number generators.
MAX_SEED = 2**63 - 1
#: The largest run log that mamf reads, in bytes, and the longest line in such a log, in bytes. A line can contain half
#: a million samples. To decode a line, mamf needs several times the line's size in memory.
MAX_LOG_BYTES, MAX_LOG_LINE_BYTES = 512 << 20, 16 << 20
LOG_TOO_LARGE_MESSAGE = f"has more than {MAX_LOG_BYTES >> 20} MiB, the maximum of a run log: choose another file"
_MAX_NUMBER_DIGITS = len(str(MAX_SEED))
#: The largest number of rows of a run. A row is a combination of kernel, problem, shape and regime.
MAX_RUN_ROWS = 1_000_000
#: Error messages show at most this many characters of a value.
_MAX_SHOWN_CHARACTERS = 24


def require_whole_number(label: str, value: object, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
    """Return ``value``, a Python or numpy integer, as a Python int. Raises UsageError if ``value`` has another type or
    is not within the bounds.
    """
    if type(value) is not int:
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"{label} must be a whole number, not {shorten_value(value)}") from None
    if not minimum <= value <= maximum:
        bounds = f"at least {minimum}" if value < minimum else f"at most {maximum}"
        raise UsageError(f"{label} must be {bounds}, not {shorten_value(value)}")
    return value


def parse_digits(digits: str) -> int:
    """Parse a whole number from its digits. Raises UsageError if it has too many digits for a size."""
    if len(digits) > _MAX_NUMBER_DIGITS and len(digits.lstrip("0")) > _MAX_NUMBER_DIGITS:
        raise UsageError(f"{shorten_value(digits)} is too large: the maximum is {MAX_SIZE}")
    return int(digits)


def parse_size(text: str) -> int:
    """Parse a size or a count. Raises UsageError unless it is a whole number of at least 1."""
    number = parse_digits(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise UsageError(f"{shorten_value(text)!r} is not a whole number of at least 1")
    return number


def parse_share(text: str) -> float:
    """Parse a share between 0 and 1, such as ``0.3%`` or ``0.003``. Raises UsageError for any other text."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"{text!r} is not a share between 0 and 1, such as 0.3% or 0.003")
    return value


def require_known_names(*triples: tuple[str, str, Collection[str]]) -> None:
    """Raise UnknownNameError for the first triple whose value is not among its known values.

    A triple consists of the label of the value in the error message, the value, and the known values.
    """
    for label, value, known_values in triples:
        if value not in known_values:
            raise UnknownNameError(label, value, known_values)


def require_share(label: str, value: object) -> None:
    """Raise UsageError unless ``value`` is a number between 0 and 1."""
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(f"{label} must be a share between 0 and 1 (such as 0.003), not {shorten_value(value)}")


def require_seconds(label: str, value: object) -> None:
    """Raise UsageError unless ``value`` is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{label} must be a number of seconds above 0, not {shorten_value(value)}")


def require_nonempty_list(label: str, values: object, item_type: type) -> None:
    """Raise UsageError unless ``values`` is a nonempty list whose items are all of ``item_type``. A string is not a
    list.
    """
    if isinstance(values, str) or not isinstance(values, Collection):
        raise UsageError(f"{label} must be a list, not {shorten_value(values)}")
    if not values:
        raise UsageError(f"no {label} are given: name at least one")
    text = ", or its text form" if hasattr(item_type, "parse") else ""
    for value in values:
        if not isinstance(value, item_type) or value == "":
            raise UsageError(
                f"every value of {label} must be a {item_type.__name__}{text}, not "
                f"{shorten_value(repr(value) if isinstance(value, str) else value)}"
            )


def require_rows_within_limit(*counts: int) -> None:
    """Raise UsageError if the product of ``counts`` exceeds MAX_RUN_ROWS, the number of rows that a run may measure."""
    row_count = math.prod(counts)
    if row_count > MAX_RUN_ROWS:
        raise UsageError(
            f"the run has {shorten_value(row_count)} rows, but at most {MAX_RUN_ROWS} can be measured: choose fewer "
            "sizes or a larger STEP"
        )


def count_values(values: Collection[object]) -> int:
    """Count the values. Unlike ``len``, this works for a range of more values than a 64-bit number can count."""
    return max(0, -((values.start - values.stop) // values.step)) if isinstance(values, range) else len(values)


def is_number(value: object) -> bool:
    """Return whether ``value`` is a finite or infinite int or float. NaN and bools do not count as numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def shorten_value(value: object) -> str:
    """Return the text of a value, shortened so that it fits in a one-line error."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python does not convert an int of more than 4300 digits to text.
        return "a number with more than 4300 digits"
    return (
        text
        if len(text) <= 2 * _MAX_SHOWN_CHARACTERS
        else f"{text[:_MAX_SHOWN_CHARACTERS]}... ({len(text)} characters)"
    )


def advise_against_commas(text: str) -> str:
    """Return the end of an error message about a wrong value: advice if the value looks like several values with commas
    between them, otherwise an empty string.
    """
    return "; separate several values with spaces, not commas" if "," in text else ""


class BaseShape:
    """The base class of shapes, which are frozen dataclasses of whole numbers. ``str`` writes a shape as text, and
    ``parse`` reads this text.

    - ``text_pattern``: the regular expression of the text, with one group per field.
    - ``text_description``: what the text must be, for error messages.
    """

    __slots__ = ()
    text_pattern: ClassVar[re.Pattern[str]]
    text_description: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # all derived classes are dataclasses
            object.__setattr__(self, field.name, require_whole_number(field.name, getattr(self, field.name)))

    @classmethod
    def parse(cls: type[BaseShapeT], text: str) -> BaseShapeT:
        """Read the text that ``str`` writes. Raises UsageError for any other text."""
        match = cls.text_pattern.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not {cls.text_description}{advise_against_commas(text)}")
        return cls(*map(parse_digits, match.groups()))


BaseShapeT = TypeVar("BaseShapeT", bound=BaseShape)


#: The formats of reports; mamf.report.formats has a renderer for each.
REPORT_FORMATS = ("table", "csv", "json", "markdown", "html")
#: The sources from which ``mamf peak`` takes the rate of a device, from the most to the least reliable.
PeakSource = Literal["measured", "contributed", "published", "datasheet"]
PEAK_SOURCES: tuple[PeakSource, ...] = get_args(PeakSource)
#: The file formats of other tools in which mamf can write measured roofs (the highest rates of a device).
ROOF_EXPORT_FORMATS = ("tracelens",)
#: The share by which a row must be slower than its baseline to count as a regression.
DEFAULT_COMPARISON_TOLERANCE = 0.01
#: If several devices share a run and one of them reports nothing for this many seconds, it counts as hung. The time is
#: long because compiling a kernel can take minutes.
MAX_SECONDS_WITHOUT_REPORT = 300.0
OK, WARN, CRITICAL, UNKNOWN = "OK", "WARN", "CRITICAL", "UNKNOWN"
#: The exit code of ``mamf node``, by its verdict on the machine.
VERDICT_EXIT_CODES = {OK: 0, WARN: 1, CRITICAL: 2, UNKNOWN: 3}
