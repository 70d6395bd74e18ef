"""Splits a text into runs: cleans it, cuts it where a run begins, and parses it line by line.

Runs that wrote to one console at the same time are separated by their row numbers, which rise by one per row, and by
their best figures, which come from their own rows. Such runs are never complete. Heads and summaries cannot be assigned
to them, so only the fields in which all heads agree are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace

from mamf.errors import RunLogError
from mamf.logs.finder.header import STARTED, Header, Scrubber
from mamf.logs.finder.reading import Reading
from mamf.logs.finder.rows import Row, RowReader
from mamf.logs.finder.summary import TITLE, node_run
from mamf.logs.finder.text import clean, lines_of, split_streams, unquote, unwrap_lines
from mamf.logs.legacy import FinderRun
from mamf.logs.lines import Seen

_PARTED = (
    "its rows were mixed with those of other runs on one console and were separated by their numbers; heads and "
    "summaries cannot be assigned"
)
_NOT_PARTED = "the rows of several runs are mixed and cannot be separated: have each run write its own --output_file"
#: In one file. Each row is compared with all, and each run becomes a log.
MOST_RUNS = 1000


def separate_runs(readings: Sequence[Reading], scrubber: Scrubber) -> list[Reading]:
    """The readings, with mixed runs separated."""
    found: list[Reading] = []
    while (start := _first_mixed(readings)) is not None:
        # Readings without an end before the mixture was noticed are part of it.
        while start and not readings[start - 1].summary.kind:
            start -= 1
        end = _end_of_mixture(readings, start)
        mixed = readings[start:end]
        header = _agreed([each.header for each in mixed if each.has_head])
        rows = [row for each in mixed for row in each.rows]
        runs = _runs_by_count(rows)
        mixture = _NOT_PARTED if runs is None else _PARTED
        found += [*readings[:start], *(_reading(part, header, mixture, scrubber) for part in runs or [rows])]
        readings = readings[end:]
    return [*found, *readings]


def _first_mixed(readings: Sequence[Reading]) -> int | None:
    before: Reading | None = None
    for number, reading in enumerate(readings):
        if reading.goes_back or (before is not None and _continues(before, reading)):
            return number
        if reading.is_measured:
            before = None if reading.summary.kind else reading
    return None


def _end_of_mixture(readings: Sequence[Reading], start: int) -> int:
    """The first head after as many runs have ended as began, and at least two."""
    begun = ended = 0
    for number in range(start, len(readings)):
        if readings[number].has_head and ended >= max(begun, 2):
            return number
        begun += readings[number].has_head
        ended += bool(readings[number].summary.kind)
    return len(readings)


def _continues(before: Reading, reading: Reading) -> bool:
    """Whether rows of an unfinished run continue among those of the next one."""
    due, last = before.last_number + 1, 0
    for row in reading.rows if before.last_number else ():
        if row.number == due and last != due - 1:
            return True
        last = row.number or last
    return False


def _runs_by_count(rows: Sequence[Row]) -> list[list[Row]] | None:
    """Rows by run; None if a row could continue no run, or several, or if there are too many runs."""
    runs: list[list[Row]] = []
    for row in rows:
        before = [run for run in runs if _follows(run[-1], row)]
        if row.number == 1 and len(runs) < MOST_RUNS:
            runs.append([row])
        elif len(before) == 1:
            before[0].append(row)
        else:
            return None
    return runs


def _follows(before: Row, row: Row) -> bool:
    if before.number is None or row.number != before.number + 1:
        return False
    return all(
        best in (held, own) for best, held, own in zip(row.best, before.best, row.figures.values(), strict=False)
    )


def _agreed(headers: Sequence[Header]) -> Header:
    """The fields in which all heads agree."""
    agreed = Header()
    for name in (field.name for field in fields(Header)):
        values = [getattr(header, name) for header in headers]
        if values and isinstance(values[0], dict):
            said = values[0].items()
            setattr(agreed, name, {key: text for key, text in said if all(each.get(key) == text for each in values)})
        elif values and all(value == values[0] for value in values):
            setattr(agreed, name, values[0])
    return agreed


def _reading(rows: Sequence[Row], header: Header, mixture: str, scrubber: Scrubber) -> Reading:
    reading = Reading(scrubber, header, mixture)
    for row in rows:
        reading.add(row)
    return reading


# -- from a text to its runs -------------------------------------------------------------------------------------------


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
            tables = [node_run(lines) for lines in parts if isinstance(lines, list)]
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
        elif row is None and TITLE.match(line):
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
