"""Splits a text into runs: cleans it, cuts it where a run begins, and parses it line by line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mamf.errors import RunLogError
from mamf.logs.finder import node
from mamf.logs.finder.consoles import split_streams, unwrap_lines
from mamf.logs.finder.header import STARTED
from mamf.logs.finder.mixed import MOST_RUNS, separate_runs
from mamf.logs.finder.reading import Reading
from mamf.logs.finder.rows import RowReader
from mamf.logs.finder.scrubber import Scrubber
from mamf.logs.finder.text import clean, lines_of, unquote
from mamf.logs.legacy import FinderRun
from mamf.logs.lines import Seen

_NOTHING = (
    "holds nothing that mamf-finder prints: no row, no summary; give the file named by its --output_file, "
    "or paste its output whole"
)


def ignore_progress(count: int) -> None:
    """The default progress callback: does nothing."""


def parse(text: str, seen: Seen = ignore_progress) -> list[FinderRun]:
    """All runs in a text. ``seen`` is called with the number of characters read. Raises RunLogError without a run."""
    if not text.strip():
        raise RunLogError("empty; mamf-finder writes its log to the file named by its --output_file")
    texts = [unwrap_lines(unquote(stream)) for stream in split_streams(clean(text))]
    scrubber = Scrubber(texts)
    runs = [run for each in texts for run in _runs(each, scrubber, seen)]
    if not any(run.rows or run.best or run.tried is not None for run in runs):
        raise RunLogError(_NOTHING)
    if len(runs) > MOST_RUNS:
        raise RunLogError(f"holds more than {MOST_RUNS} runs: split it")
    return _without_repetition(runs)


def _runs(text: str, scrubber: Scrubber, seen: Seen) -> list[FinderRun]:
    found: list[FinderRun] = []
    for is_table, parts in itertools.groupby(_parts(text, scrubber, seen), lambda part: isinstance(part, list)):
        if is_table:
            tables = [node.node_run(lines) for lines in parts if isinstance(lines, list)]
            found += [_scrubbed(run, scrubber) for run in tables if run]
        else:
            readings = [reading for reading in parts if isinstance(reading, Reading) and reading.is_there]
            found += [reading.run() for reading in separate_runs(readings, scrubber)]
    return found


def _parts(text: str, scrubber: Scrubber, seen: Seen) -> list[Reading | list[str]]:
    """The runs, and the lines of the summaries of nodes. Where heads are cut off, several runs stand between two."""
    parts: list[Reading | list[str]] = [Reading(scrubber)]
    read_row = RowReader()
    for line in lines_of(text, seen):
        current = parts[-1]
        row = None if isinstance(current, list) else read_row(line)
        if row is None and STARTED.search(line):
            current, read_row = Reading(scrubber), RowReader()
            parts.append(current)
        elif row is None and node.TITLE.match(line):
            current = []
            parts.append(current)
        if isinstance(current, list):
            current.append(line)
            continue
        if current.ends_before(line, row):
            current = Reading(scrubber)
            parts.append(current)
        current.feed(line, row)
    return parts


def _without_repetition(runs: Sequence[FinderRun]) -> list[FinderRun]:
    """A second Ctrl-C prints the summary a second time."""
    kept: list[FinderRun] = []
    for run in runs:
        before = kept[-1] if kept else None
        is_summary = not run.rows and run.started is None and bool(run.best or run.tried is not None)
        if before and is_summary and (run.tried, run.best) == (before.tried, before.best):
            kept[-1] = replace(
                before,
                elapsed_seconds=before.elapsed_seconds or run.elapsed_seconds,
                remarks=tuple(dict.fromkeys((*before.remarks, "the summary is printed twice"))),
            )
        else:
            kept.append(run)
    return kept


def _scrubbed(run: FinderRun, scrubber: Scrubber) -> FinderRun:
    return replace(run, notes=tuple(map(scrubber, run.notes)), remarks=tuple(map(scrubber, run.remarks)))
