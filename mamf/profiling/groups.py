"""Rows of a log that can be compared with one another: of one regime, problem and shape. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.report.groups import shape_title


@dataclass(frozen=True)
class Group:
    """Rows that can be compared with one another, the best first. ``failed``: without a figure."""

    title: str
    rows: tuple[Measurement, ...]
    failed: tuple[Measurement, ...]

    @property
    def leanest(self) -> Measurement | None:
        """The row of the least memory, if that is known for all."""
        if any(row.peak_memory_bytes is None for row in self.rows):
            return None
        return min(self.rows, key=lambda row: row.peak_memory_bytes or 0, default=None)


def groups_of(log: RunLog | None) -> list[Group]:
    """The rows of a log by regime, problem and shape."""
    found: dict[tuple[object, ...], list[Measurement]] = {}
    operation = log.header["plan"].get("operation") if log else None
    for row in log.measurements if log else ():
        if row.operation == operation and not row.is_reference and not row.phase:
            found.setdefault((row.regime, row.problem, row.shape), []).append(row)
    return [_group(rows) for rows in found.values()]


def _group(rows: Sequence[Measurement]) -> Group:
    measured = sorted((row for row in rows if row.ok), key=lambda row: -row.best_rate)
    return Group(shape_title(rows[0]), tuple(measured), tuple(row for row in rows if not row.ok))
