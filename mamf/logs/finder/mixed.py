"""Separates runs that wrote to one console at the same time, by their row numbers. Such runs are never complete.

A run's row number rises by one per row, and its best figures come from its own rows. Heads and summaries cannot be
assigned to runs, so only the fields in which all heads agree are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from mamf.logs.finder.header import Header
from mamf.logs.finder.reading import Reading
from mamf.logs.finder.rows import Row
from mamf.logs.finder.scrubber import Scrubber

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
