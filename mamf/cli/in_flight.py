"""What a run notes for the process that watches it: its log, and the row that the log gets if this process dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mamf.backend import Backend
from mamf.cli import watching
from mamf.engine.crashes import crashes_of
from mamf.logs.records import measurement_record
from mamf.logs.writer import RunLogWriter, as_line
from mamf.measurement import Measurement


@contextmanager
def noted(log: Path, backend: Backend, before: Iterable[Measurement]) -> Iterator[None]:
    """While a run writes its log. ``before``: the rows that it held; those that ended a process are not launched."""
    watch, crashes = watching.WATCH, crashes_of(backend)
    crashes.fatal = [row for row in before if row.is_fatal]
    if watch:
        watch.open_log(log)
        crashes.keep = lambda row: watch.step.write("" if row is None else _line_and_label(row))
    try:
        yield
    finally:
        if watch:
            watch.log.write()


def log_lost(row: Measurement, writer: RunLogWriter) -> None:
    """Log the row that lost the device. In a watched process the parent does, and has the rest measured in another."""
    if watching.WATCH:
        watching.WATCH.step.write(_line_and_label(row))
        sys.stdout.flush()
        os._exit(1)
    writer.write("measurement", measurement_record(row))


def _line_and_label(row: Measurement) -> str:
    return f"{as_line('measurement', measurement_record(row)).decode()}{row.kernel} at {row.shape}"
