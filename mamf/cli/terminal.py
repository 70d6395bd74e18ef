"""Everything that the command line says: the one place that prints, and where foreign text is made harmless."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from mamf.text import visible, visible_lines


def say(line: str, to: TextIO | None = None) -> None:
    """A line, by default on stdout."""
    _write(f"{visible(line)}\n", to or sys.stdout)


def say_lines(text: str) -> None:
    """A text of whole lines, such as a report."""
    _write(visible_lines(text), sys.stdout)


def warn(line: str) -> None:
    """A line on stderr that is no part of the answer: an error, a warning. Where nobody can hear it, nothing ends."""
    with contextlib.suppress(OSError):
        say(f"mamf: {line}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "utf-8"
    # A terminal of another encoding shows what it lacks by its number.
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)
