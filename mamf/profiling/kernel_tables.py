"""Kernels as other profilers list them in CSV: nsys stats and rocprofv3, launch by launch or summed up."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mamf.errors import UsageError
from mamf.operations.tracing.events import Event, Trace
from mamf.operations.tracing.traces import content_of

_NANOSECOND = 1e-9
_SUMMED = "sums over launches: what ran at once counts twice, and idle is not known"


@dataclass(frozen=True)
class _Columns:
    """A table by the names of its columns. ``begun``, then ``ended`` or ``duration``, of a launch; else ``duration`` is
    the sum over ``calls``. All times are in ns.
    """

    name: str
    duration: str = ""
    begun: str = ""
    ended: str = ""
    calls: str = ""
    lane: str = ""

    @property
    def needed(self) -> set[str]:
        return {self.name, self.duration, self.begun, self.ended, self.calls} - {""}


_TABLES = (
    _Columns("Name", duration="Duration (ns)", begun="Start (ns)", lane="Strm"),  # nsys, cuda_gpu_trace
    _Columns("Name", duration="Total Time (ns)", calls="Instances"),  # nsys, cuda_gpu_kern_sum
    _Columns("Kernel_Name", begun="Start_Timestamp", ended="End_Timestamp", lane="Queue_Id"),  # rocprofv3
    _Columns("Name", duration="TotalDurationNs", calls="Calls"),  # rocprofv3 --stats
)


def read_kernel_table(path: Path) -> Trace:
    """The kernels of a table, without training steps. Lines before its header (nsys's progress) are skipped.

    Raises UsageError for any other file.
    """
    content = content_of(path)
    try:
        columns, rows = _table(content.decode().splitlines())
        events = tuple(_launches(columns, rows) if columns.begun else _sums(columns, rows))
        return _trace(events, () if columns.begun else (_SUMMED,))
    except (ValueError, KeyError, AttributeError, csv.Error):
        raise UsageError(f"{path} is not a table of kernels from nsys stats or rocprofv3") from None


def _trace(events: tuple[Event, ...], notes: tuple[str, ...]) -> Trace:
    begun, ended = min(event.begun for event in events), max(event.ended for event in events)
    if not ended > begun:
        raise ValueError("no time")
    return Trace(events, begun, ended, notes=notes)


def _table(lines: Sequence[str]) -> tuple[_Columns, Iterable[Mapping[str, str]]]:
    """The first line that names all columns of a known table is its head."""
    for number, line in enumerate(lines):
        names = set(next(csv.reader([line]), []))
        for columns in _TABLES:
            if columns.needed <= names:
                return columns, csv.DictReader(line for line in lines[number:] if line.strip())
    raise ValueError("no known head")


def _launches(columns: _Columns, rows: Iterable[Mapping[str, str]]) -> Iterable[Event]:
    for row in rows:
        begun = _seconds(row[columns.begun])
        ended = _seconds(row[columns.ended]) if columns.ended else begun + _seconds(row[columns.duration])
        yield Event(row[columns.name], "kernel", begun, ended, lane=row.get(columns.lane) or "")


def _sums(columns: _Columns, rows: Iterable[Mapping[str, str]]) -> Iterable[Event]:
    """Kernels one after another: their real order is unknown."""
    begun = 0.0
    for row in rows:
        ended = begun + _seconds(row[columns.duration])
        yield Event(row[columns.name], "kernel", begun, ended, calls=int(_plain(row[columns.calls])))
        begun = ended


def _seconds(nanoseconds: str) -> float:
    return float(_plain(nanoseconds)) * _NANOSECOND


def _plain(number: str) -> str:
    return number.replace(",", "")
