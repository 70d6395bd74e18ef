"""Run a command of mamf in this process, and count exceptions that escape, hangs and faults in what it prints."""

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

#: Of the processor; a machine that is busy with other things is given longer by the clock.
HANG_SECONDS, HANG_SECONDS_BY_THE_CLOCK = 10.0, 60.0
EXIT_CODES = (0, 1, 2, 3, 130)
#: A module that logs and options name and that nothing may import.
FORBIDDEN = "attacks.never_imported"
#: Said of every log that a kill cut off, before whatever else there is to say.
_NOTICE = "is incomplete and ignored"
_NULL = os.open(os.devnull, os.O_WRONLY)
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
#: Columns of the table that must be 0.
FAULTS = ("lost", "twice", "tracebacks", "hangs", "other")
_COLUMNS = ("inputs", "calls", "kills", *FAULTS)
_MOST_EXAMPLES, _NAME = 40, re.compile(r"'[^']*'|\S*\d\S*|\S+\.jsonl\S*")


@dataclass
class Counts:
    """Of one attack. ``other``: faults that are no row lost or repeated, no traceback and no hang."""

    name: str
    of: Counter[str] = field(default_factory=Counter)
    codes: Counter[int | None] = field(default_factory=Counter)
    #: By what is wrong, names and numbers left out: one of each says more than many of the first.
    examples: dict[str, str] = field(default_factory=dict)

    def fault(self, kind: str, where: str, what: str, number: int = 1) -> None:
        self.of[kind] += number
        if len(self.examples) < _MOST_EXAMPLES:
            self.examples.setdefault(_NAME.sub("", what), f"{where}: {what}")

    @property
    def is_clean(self) -> bool:
        return not any(self.of[kind] for kind in FAULTS)


def table(attacks: Iterable[Counts]) -> str:
    """A row an attack, as markdown."""
    rows = [("attack", *_COLUMNS), ("-", *["-:"] * len(_COLUMNS))]
    rows += [(counts.name, *(f"{counts.of[column]:,}" for column in _COLUMNS)) for counts in attacks]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class Killed(BaseException):
    """Stands for the end of a process in virtual time: no handler of mamf's may see it."""


class _Hang(Killed):
    """Raised in a command that takes too long."""


class _Captured(io.StringIO):
    """Text output with a descriptor, which mamf redirects when the reader is gone."""

    def fileno(self) -> int:
        return _NULL


RUN_ENDING_EXCEPTIONS.append(Killed)


class Ended(NamedTuple):
    """How a command ended. ``code`` is None where it was killed or an exception escaped it."""

    code: int | None
    out: str
    err: str


def call(arguments: Sequence[str], counts: Counts) -> Ended:
    """Run a command, and count what is wrong with how it ends."""
    command = shlex.join(["mamf", *arguments])[:500]
    code: int | None = None
    with contextlib.redirect_stdout(_Captured()) as out, contextlib.redirect_stderr(_Captured()) as err:
        try:
            with _limited():
                code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except Killed as end:
            if isinstance(end, _Hang):
                counts.fault("hangs", command, "hung")
        except BaseException as error:  # what escapes is what is sought
            counts.fault("tracebacks", command, _where(error))
        ended = Ended(code, out.getvalue(), err.getvalue())
    counts.of["calls"] += 1
    counts.codes[code] += 1
    if code is not None:
        for fault in _faults(ended):
            counts.fault("other", command, fault)
    return ended


def _faults(ended: Ended) -> Iterator[str]:
    """What is wrong with the output of a command that was not killed."""
    if ended.code not in EXIT_CODES:
        yield f"exit code {ended.code}"
    if found := _CONTROL.search(ended.out + ended.err):
        yield f"{found[0]!r} on the terminal"
    lines = [line for line in ended.err.splitlines() if not line.endswith(_NOTICE)]
    if ended.code == 2 and len(lines) != 1:
        yield f"{len(lines)} lines for exit code 2: {' / '.join(lines)[:300]}"
    if "cannot write the output" in ended.err:
        yield ended.err.strip()
    if sys.modules.pop(FORBIDDEN, None):
        yield "code that nobody asked for was imported"


def _where(error: BaseException) -> str:
    """Describe an exception and where it was raised: the function tells one kind from another."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}mamf{os.sep}" in frame.filename] or frames
    return f"{type(error).__name__} in {Path(own[-1].filename).stem} {own[-1].name}: {str(error)[:300]}"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise _Hang in a command that takes too long."""

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = {number: signal.signal(number, on_alarm) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, HANG_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS_BY_THE_CLOCK)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
