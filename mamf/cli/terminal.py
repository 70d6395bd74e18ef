"""The only module that prints lines and reports; it escapes control characters in third-party text.

``keep_stdout`` makes whatever plugins and libraries print appear on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from mamf.backend import Backend
from mamf.text import visible, visible_lines

if TYPE_CHECKING:
    from mamf.report.document import Document

#: What stands out on a terminal: answers, and words that judge, by the number of their color (ECMA-48).
_JUDGED = re.compile(
    r"^(?P<b1>best .*)$"
    r"|\b(?:(?P<b31>CRITICAL|SLOWER|FAIL|wrong_result|implausible)|(?P<b33>WARN|UNDECIDED)|(?P<b32>OK|FASTER))\b",
    re.MULTILINE,
)
# Of a terminal that does not say how wide it is.
_USUAL_COLUMNS = 80
#: The stdout that is kept for reports, once it is.
_KEPT: list[TextIO] = []


def stdout() -> TextIO:
    """Where reports go."""
    return _KEPT[0] if _KEPT else sys.stdout


def keep_stdout() -> None:
    """Keep stdout for reports: all that plugins print from now on, in C and in child processes too, goes to stderr."""
    _KEPT.append(open(os.dup(sys.stdout.fileno()), "w", 1, sys.stdout.encoding))  # noqa: PTH123, SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextlib.contextmanager
def reports_to(stream: TextIO) -> Iterator[None]:
    """Print reports to another stream meanwhile: those of commands whose result another command reports."""
    _KEPT.insert(0, stream)
    try:
        yield
    finally:
        _KEPT.pop(0)


def say(line: str, to: TextIO | None = None) -> None:
    """Print a line, by default to stdout."""
    _write(f"{visible(line)}\n", to or stdout())


def say_lines(text: str) -> None:
    """Print a text that consists of whole lines, such as a report."""
    _write(visible_lines(text), stdout())


def warn(line: str) -> None:
    """Print an error or a warning to stderr. A closed stderr is ignored."""
    with contextlib.suppress(OSError):
        say(f"mamf: {line}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    text = _JUDGED.sub(_colored, text) if _has_colors(stream) else text
    encoding = stream.encoding or "utf-8"
    # A terminal with another encoding shows unknown characters as escapes.
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)


def terminal_columns() -> int | None:
    """The columns of the terminal; None if stdout is a pipe or a file, which take any width."""
    if not stdout().isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError):
        columns = columns or str(os.get_terminal_size(stdout().fileno()).columns)
    return int(columns) if columns.isdecimal() and int(columns) else _USUAL_COLUMNS


def _has_colors(stream: TextIO) -> bool:
    """Whether it is a terminal with colors whose user wants them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _colored(found: re.Match[str]) -> str:
    return f"\x1b[{(found.lastgroup or 'b0')[1:]}m{found[0]}\x1b[0m"


def print_document(options: argparse.Namespace, document: Document) -> None:
    """Print a report in the format that the command line asks for."""
    from mamf.report.formats import FORMATS

    say_lines(FORMATS[options.format](document, table_columns(options)))


def table_columns(options: argparse.Namespace) -> int | None:
    """The width for tables in characters; None shows all columns: pipes and files take any width."""
    return None if getattr(options, "wide", True) else terminal_columns()


def is_for_people(options: argparse.Namespace) -> bool:
    """Whether people read the report, not a program."""
    from mamf.report.formats import FOR_PEOPLE

    return options.format in FOR_PEOPLE


def note_stream(options: argparse.Namespace) -> TextIO:
    """The stream for lines beside a report, which must not mix with what a program reads."""
    return stdout() if is_for_people(options) else sys.stderr


def say_memory(needed: int, of: str, backend: Backend) -> None:
    """Print the memory that a run needs, for a dry run. ``needed``: bytes for ``of``."""
    free = backend.free_memory()
    say(f"memory: {needed / 1e9:.3g} GB for {of}" + (f", {free / 1e9:.1f} GB free" if free else ""))
    if free and needed > free:
        say("        it will be out_of_memory; smaller shapes are measured")
