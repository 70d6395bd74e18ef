"""Prints lines and reports, which no other module does. Control characters in third-party text are escaped.

After ``keep_stdout``, whatever plugins and libraries print to stdout appears on stderr.
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
from mamf.text import visible, visible_lines, wrapped

if TYPE_CHECKING:
    from mamf.report.document import Document

#: Text to color on a terminal: answers and verdicts. The name of a group ends with the color's number (ECMA-48).
_JUDGED = re.compile(
    r"^(?P<b1>best .*)$"
    r"|\b(?:(?P<b31>CRITICAL|SLOWER|FAIL|wrong_result|implausible)|(?P<b33>WARN|UNDECIDED)|(?P<b32>OK|FASTER))\b",
    re.MULTILINE,
)
# The width of a terminal that does not report it.
_USUAL_COLUMNS = 80
#: The original stdout, after keep_stdout; a stream that replaces it comes first.
_KEPT: list[TextIO] = []


def stdout() -> TextIO:
    """Return the stream for reports."""
    return _KEPT[0] if _KEPT else sys.stdout


def keep_stdout() -> None:
    """Reserve stdout for reports: from now on, what plugins print, also from C and child processes, goes to stderr."""
    _KEPT.append(open(os.dup(sys.stdout.fileno()), "w", 1, sys.stdout.encoding))  # noqa: PTH123, SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextlib.contextmanager
def reports_to(stream: TextIO) -> Iterator[None]:
    """Print reports to another stream within the context, for a command that another command runs."""
    _KEPT.insert(0, stream)
    try:
        yield
    finally:
        _KEPT.pop(0)


def say(line: str, to: TextIO | None = None) -> None:
    """Print a line, by default to the stream for reports."""
    _write(f"{visible(line)}\n", to or stdout())


def say_lines(text: str) -> None:
    """Print a text that consists of whole lines, such as a report."""
    _write(visible_lines(text), stdout())


def warn(line: str) -> None:
    """Print an error or a warning to stderr. A closed stderr is ignored."""
    with contextlib.suppress(OSError):
        say_wrapped(f"mamf: {line}", sys.stderr)


def say_wrapped(line: str, to: TextIO) -> None:
    """Print a line, broken at blanks where it is wider than the terminal."""
    _write(f"{wrapped(visible(line), terminal_columns(to))}\n", to)


def _write(text: str, stream: TextIO) -> None:
    text = _JUDGED.sub(_colored, text) if _has_colors(stream) else text
    encoding = stream.encoding or "utf-8"
    # Characters that the terminal's encoding lacks are printed as escapes.
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)


def terminal_columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal behind a stream, by default the one for reports; None if it is a pipe or a file,
    which take any width.
    """
    stream = stream or stdout()
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError):
        columns = columns or str(os.get_terminal_size(stream.fileno()).columns)
    return int(columns) if columns.isdecimal() and int(columns) else _USUAL_COLUMNS


def _has_colors(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with colors and the user has not disabled them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _colored(found: re.Match[str]) -> str:
    return f"\x1b[{(found.lastgroup or 'b0')[1:]}m{found[0]}\x1b[0m"


def print_document(options: argparse.Namespace, document: Document) -> None:
    """Print a report in the format of --format."""
    from mamf.report.formats import FORMATS

    say_lines(FORMATS[options.format](document, table_columns(options)))


def table_columns(options: argparse.Namespace) -> int | None:
    """Return the width of tables in characters; None, for --wide, pipes and files, shows all columns."""
    return None if getattr(options, "wide", True) else terminal_columns()


def is_for_people(options: argparse.Namespace) -> bool:
    """Return whether the report's format is for people, not for programs."""
    from mamf.report.formats import FOR_PEOPLE

    return options.format in FOR_PEOPLE


def note_stream(options: argparse.Namespace) -> TextIO:
    """Return the stream for lines that accompany a report: stderr if a program reads the report."""
    return stdout() if is_for_people(options) else sys.stderr


def say_memory(needed: int, of: str, backend: Backend) -> None:
    """Print the memory that a run needs, for --dry-run. ``needed``: bytes. ``of``: what needs them."""
    free = backend.free_memory()
    say(f"memory: {needed / 1e9:.3g} GB for {of}" + (f", {free / 1e9:.1f} GB free" if free else ""))
    if free and needed > free:
        say("        this will give out_of_memory; smaller shapes are measured")
