"""Reads every log that mamf-finder, the ancestor, ever wrote: one reader for a dozen grammars of one script.

The script has no machine-readable output and no usable version number: "2" stands over six grammars whose shapes mean
two different things, and "8" is older than "4". So the text is read by what it looks like (grammars.py), a line at a
time (header.py, rows.py, summary.py, node.py), and put together in runs.py. What a log leaves open stays open.
"""

from __future__ import annotations

from pathlib import Path

from mamf.errors import RunLogError
from mamf.finder_logs.runs import parse
from mamf.finder_logs.text import decode
from mamf.logs.legacy import FinderRun

__all__ = ["parse", "read_finder_logs"]


def read_finder_logs(path: Path) -> list[FinderRun]:
    """Every run in the file, usually one. Raises RunLogError for a file that holds none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunLogError(f"{path}: cannot be read ({error.strerror or error})") from None
    try:
        return parse(decode(content))
    except RunLogError as error:
        raise RunLogError(f"{path}: {error}") from None
