"""Run commands of mamf in this process. Count the exceptions that escape, the hangs and the faults in the output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mamf.cli import main
from mamf.errors import RUN_ENDING_EXCEPTIONS

#: A command hangs if it uses more CPU time than the first limit, or more wall-clock time than the second. The second is
#: longer because the machine may be busy with other work.
HANG_SECONDS, HANG_SECONDS_BY_THE_CLOCK = 10.0, 60.0
EXIT_CODES = (0, 1, 2, 3, 130)
#: A module that damaged logs name as a kernel. mamf must not import it.
FORBIDDEN = "attacks.never_imported"
#: The end of the note that mamf prints about a log with an incomplete last line. The note may come before the one line
#: of an error, so it does not count as a second line.
_INCOMPLETE_LINE_NOTE = "is incomplete, so it is ignored"
_NULL_DESCRIPTOR = os.open(os.devnull, os.O_WRONLY)
_CONTROL_CHARACTERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: The kinds of faults. These columns of the table must be 0.
FAULTS = ("lost", "twice", "tracebacks", "hangs", "other")
_COLUMNS = ("inputs", "calls", "kills", *FAULTS)
_MAX_EXAMPLES, _NAMES_AND_NUMBERS = 40, re.compile(r"'[^']*'|\S*\d\S*|\S+\.jsonl\S*")


@dataclass
class Counts:
    """The counts of one attack.

    - ``totals``: the number of inputs, calls, kills and faults, by column of the table. The column ``other`` counts the
      faults that are not lost or repeated rows, tracebacks or hangs.
    - ``codes``: how often each exit code occurred; None if the command was killed or an exception escaped.
    """

    name: str
    totals: Counter[str] = field(default_factory=Counter)
    codes: Counter[int | None] = field(default_factory=Counter)
    #: One example of each fault. The key is its message without names and numbers, so that many similar faults share
    #: one example and leave room for others.
    examples: dict[str, str] = field(default_factory=dict)

    def add_fault(self, kind: str, where: str, what: str, number: int = 1) -> None:
        self.totals[kind] += number
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.setdefault(_NAMES_AND_NUMBERS.sub("", what), f"{where}: {what}")

    @property
    def is_clean(self) -> bool:
        return not any(self.totals[kind] for kind in FAULTS)


def format_table(all_counts: Iterable[Counts]) -> str:
    """Return a Markdown table with one row for each attack."""
    rows = [("attack", *_COLUMNS), ("-", *["-:"] * len(_COLUMNS))]
    rows += [(counts.name, *(f"{counts.totals[column]:,}" for column in _COLUMNS)) for counts in all_counts]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class Killed(BaseException):
    """An exception that represents the end of a process in virtual time. mamf must not handle it."""


class _Hang(Killed):
    """The exception that ends a command which takes too long."""


class _Captured(io.StringIO):
    """A text buffer with a file descriptor, because mamf redirects the descriptor of stdout after a failed write."""

    def fileno(self) -> int:
        return _NULL_DESCRIPTOR


RUN_ENDING_EXCEPTIONS.append(Killed)


class CommandResult(NamedTuple):
    """The exit code and the output of a command. ``code``: None if it was killed or an exception escaped."""

    code: int | None
    out: str
    err: str


def call(arguments: Sequence[str], counts: Counts) -> CommandResult:
    """Run a command in this process, and add its faults to ``counts``."""
    command = shlex.join(["mamf", *arguments])[:500]
    code: int | None = None
    with contextlib.redirect_stdout(_Captured()) as out, contextlib.redirect_stderr(_Captured()) as err:
        try:
            with _limit_time():
                code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except Killed as end:
            if isinstance(end, _Hang):
                counts.add_fault("hangs", command, "did not end within the time limit")
        except BaseException as error:  # The attacks look for any exception that escapes.
            counts.add_fault("tracebacks", command, _describe_exception(error))
        result = CommandResult(code, out.getvalue(), err.getvalue())
    counts.totals["calls"] += 1
    counts.codes[code] += 1
    if code is not None:
        for fault in _find_faults(result):
            counts.add_fault("other", command, fault)
    return result


def _find_faults(result: CommandResult) -> Iterator[str]:
    """Yield a message for each fault in the exit code and the output of a command that was not killed."""
    if result.code not in EXIT_CODES:
        yield f"unknown exit code {result.code}"
    if control_character := _CONTROL_CHARACTERS.search(result.out + result.err):
        yield f"printed the control character {control_character[0]!r}"
    lines = [line for line in result.err.splitlines() if not line.endswith(_INCOMPLETE_LINE_NOTE)]
    if result.code == 2 and len(lines) != 1:
        yield f"printed {len(lines)} lines instead of one, with exit code 2: {' / '.join(lines)[:300]}"
    if "cannot write the output" in result.err:
        yield result.err.strip()
    if sys.modules.pop(FORBIDDEN, None):
        yield f"imported {FORBIDDEN}, which only the damaged log names"


def _describe_exception(error: BaseException) -> str:
    """Describe an exception. To tell faults apart, name the innermost function of mamf in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    mamf_frames = [frame for frame in frames if f"{os.sep}mamf{os.sep}" in frame.filename] or frames
    return f"{type(error).__name__} in {Path(mamf_frames[-1].filename).stem} {mamf_frames[-1].name}: {str(error)[:300]}"


@contextlib.contextmanager
def _limit_time() -> Iterator[None]:
    """Raise _Hang in the body of the ``with`` statement if it takes too long."""

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise _Hang

    earlier_handlers = {number: signal.signal(number, on_alarm) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS_BY_THE_CLOCK)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)
