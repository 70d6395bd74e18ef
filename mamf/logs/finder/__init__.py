"""Reads the logs of all versions of mamf-finder, the predecessor: one reader for a dozen grammars of one script.

The script has no machine-readable output and no reliable version number: "2" stands for six grammars with two orders
of dimensions, and "8" is older than "4". So console residue is removed first (text.py), the grammar is recognized by
its features (grammars.py), lines are parsed one by one (header.py, rows.py, summary.py) and assembled into
runs (reading.py, runs.py). Facts missing from a log stay unknown.
"""

from __future__ import annotations

from pathlib import Path

from mamf.errors import RunLogError
from mamf.logs.finder.runs import ignore_progress, parse
from mamf.logs.finder.text import MOST_BYTES, decode
from mamf.logs.legacy import FinderRun
from mamf.logs.lines import Seen

__all__ = ["parse", "read_finder_logs"]


def read_finder_logs(path: Path, seen: Seen = ignore_progress) -> list[FinderRun]:
    """All runs in a file, usually one; gzip is supported. ``seen`` is called with the number of characters read. Raises
    RunLogError for a file without a run.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RunLogError(f"{path}: cannot be read ({error.strerror or error})") from None
    is_binary = False
    try:
        text = decode(content)
        is_binary = "\0" in text
        del content  # of a long log a text is enough
        return parse(text, seen)
    except RunLogError as error:
        why = "binary, not a log of mamf-finder; give the file named by its --output_file" if is_binary else error
        raise RunLogError(f"{path}: {why}") from None
