"""Several runs that wrote to one console at once: parted where their counts tell them apart, and never complete.

A run's count rises by one from row to row, and its best figures are those of its own rows. Which head and which summary
are whose is not told by anything, so only what all heads agree in is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from mamf.finder_logs.header import Header
from mamf.finder_logs.reading import Reading
from mamf.finder_logs.rows import Row
from mamf.finder_logs.scrubber import Scrubber

_PARTED = (
    "its rows stood among those of other runs on one console, and are told apart by their numbers; whose the heads and "
    "the summaries are is not told"
)
_NOT_PARTED = (
    "the rows of several runs are mixed, and whose is whose cannot be told: have each run write its own --output_file"
)


def parted(readings: Sequence[Reading], scrubber: Scrubber) -> list[Reading]:
    """The readings with those of mixed runs put together anew."""
    start = _first_mixed(readings)
    if start is None:
        return list(readings)
    # All that did not end before the mixture showed is a part of it.
    while start and not readings[start - 1].summary.kind:
        start -= 1
    mixed = readings[start:]
    header = _agreed([each.header for each in mixed if each.has_head])
    rows = [row for each in mixed for row in each.rows]
    runs = _runs_by_count(rows)
    told = _NOT_PARTED if runs is None else _PARTED
    return [*readings[:start], *(_reading(part, header, told, scrubber) for part in runs or [rows])]


def _first_mixed(readings: Sequence[Reading]) -> int | None:
    before: Reading | None = None
    for number, reading in enumerate(readings):
        if reading.goes_back or (before is not None and _goes_on(before, reading)):
            return number
        before = reading if reading.rows and not reading.summary.kind else None
    return None


def _goes_on(before: Reading, reading: Reading) -> bool:
    """Whether rows of a run without an end follow among those of the next one."""
    due, last = before.last_number + 1, 0
    for row in reading.rows if before.last_number else ():
        if row.number == due and last != due - 1:
            return True
        last = row.number or last
    return False


def _runs_by_count(rows: Sequence[Row]) -> list[list[Row]] | None:
    """None where a row could go on from none or from several."""
    runs: list[list[Row]] = []
    for row in rows:
        before = [run for run in runs if _follows(run[-1], row)]
        if row.number == 1:
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
    """What all heads say alike."""
    agreed = Header()
    for each in fields(Header):
        values = [getattr(header, each.name) for header in headers]
        if isinstance(getattr(agreed, each.name), dict):
            common = set.intersection(*(set(value.items()) for value in values)) if values else set()
            setattr(
                agreed, each.name, {name: text for name, text in (values or [{}])[0].items() if (name, text) in common}
            )
        elif values and all(value == values[0] for value in values):
            setattr(agreed, each.name, values[0])
    return agreed


def _reading(rows: Sequence[Row], header: Header, told: str, scrubber: Scrubber) -> Reading:
    reading = Reading(scrubber, header, told)
    for row in rows:
        reading.add(row)
    return reading
