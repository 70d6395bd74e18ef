"""The only module that prints; it escapes control characters in third-party text."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from mamf.text import visible, visible_lines


def say(line: str, to: TextIO | None = None) -> None:
    """Print a line, by default to stdout."""
    _write(f"{visible(line)}\n", to or sys.stdout)


def say_lines(text: str) -> None:
    """Print a text that consists of whole lines, such as a report."""
    _write(visible_lines(text), sys.stdout)


def warn(line: str) -> None:
    """Print an error or a warning to stderr. A closed stderr is ignored."""
    with contextlib.suppress(OSError):
        say(f"mamf: {line}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "utf-8"
    # A terminal with another encoding shows unknown characters as escapes.
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)
