"""Reads every log that mamf-finder, the ancestor, ever wrote: one reader for a dozen grammars of one script.

The script has no machine-readable output and no usable version number: "2" stands over six grammars whose shapes mean
two different things, and "8" is older than "4". So the text is cleaned of what consoles add (text.py,
consoles.py), read by what it looks like (grammars.py), a line at a time (header.py, rows.py, summary.py, node.py), and
put together in reading.py and runs.py; runs that wrote at once are parted in mixed.py. What a log leaves open stays
open.
"""

from __future__ import annotations

from pathlib import Path

from mamf.errors import RunLogError
from mamf.logs.finder.runs import ignore_progress, parse
from mamf.logs.finder.text import decode
from mamf.logs.legacy import FinderRun
from mamf.logs.run_log import Seen

__all__ = ["parse", "read_finder_logs"]


def read_finder_logs(path: Path, seen: Seen = ignore_progress) -> list[FinderRun]:
    """Every run in the file, usually one; packed by gzip or not. ``seen`` is told how many characters are read. Raises
    RunLogError for a file that holds none.
    """
    try:
        content = path.read_bytes()
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
