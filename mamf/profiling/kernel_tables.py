"""Launches of kernels as other profilers list them in CSV: nsys stats and rocprofv3."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mamf.errors import UsageError
from mamf.profiling.events import Event, Trace
from mamf.profiling.traces import content_of

_NANOSECOND = 1e-9
#: Columns of a table: the kernel's name, when it began, and when it ended or how long it took, all in ns.
_NSYS = "Name", "Start (ns)", "Duration (ns)"
_ROCPROF = "Kernel_Name", "Start_Timestamp", "End_Timestamp"


def read_kernel_table(path: Path) -> Trace:
    """The kernels of a table (cuda_gpu_trace, --kernel-trace), without training steps. Lines before its header (nsys's
    progress) are skipped.

    Raises UsageError for any other file.
    """
    content = content_of(path)
    try:
        events = tuple(_launches(content.decode().splitlines()))
        begun, ended = min(event.begun for event in events), max(event.ended for event in events)
        if not ended > begun:
            raise ValueError("no time")
        return Trace(events, begun, ended)
    except (ValueError, KeyError, AttributeError, csv.Error):
        raise UsageError(
            f"{path} is not a list of launches from 'nsys stats -r cuda_gpu_trace' or 'rocprofv3 --kernel-trace'"
        ) from None


def _launches(lines: Sequence[str]) -> Iterator[Event]:
    for number, line in enumerate(lines):
        names = set(next(csv.reader([line]), []))
        for columns in (_NSYS, _ROCPROF):
            if names.issuperset(columns):
                rows = csv.DictReader(line for line in lines[number:] if line.strip())
                yield from (_launch(row, *columns) for row in rows)
                return


def _launch(row: Mapping[str, str], name: str, begun: str, ended: str) -> Event:
    start, end = (float(row[column].replace(",", "")) * _NANOSECOND for column in (begun, ended))
    return Event(row[name], "kernel", start, start + end if ended == "Duration (ns)" else end)
