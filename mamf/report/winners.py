"""Kernels of one shape against one another: speed-ups over a baseline, and the best kernel of each shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mamf.measurement import Measurement
from mamf.report.document import Column, Table
from mamf.report.groups import Group, best_first, group_title, grouped
from mamf.report.rows import half_width_percent
from mamf.report.shares import Shares
from mamf.report.text import percent, rate_name, rate_text


def baseline_of(rows: Sequence[Measurement], name: str | None) -> Measurement | None:
    """The row of the named kernel; by default that of eager, else the slowest."""
    measured = [row for row in rows if row.ok]
    named = next((row for row in measured if row.kernel == (name or "eager")), None)
    return named or (None if name or not measured else min(measured, key=lambda row: row.comparable_rate))


def speed_up(row: Measurement, baseline: Measurement | None) -> float | None:
    if baseline is None or baseline.summary is None or row.summary is None:
        return None
    return baseline.comparable_seconds / row.comparable_seconds


def baselines_of(rows: Iterable[Measurement], name: str | None) -> dict[Group, Measurement | None]:
    """The baseline of each shape that several kernels were measured on."""
    return {
        group: baseline_of(each, name)
        for group, each in grouped(rows, by_shape=True).items()
        if len({row.kernel for row in each}) > 1
    }


@dataclass(frozen=True)
class Winner:
    """The best kernel of a shape. ``ahead``: how much faster than the ``second``, as a share."""

    row: Measurement
    second: Measurement | None

    @property
    def ahead(self) -> float | None:
        return None if self.second is None else self.row.comparable_rate / self.second.comparable_rate - 1


def winners(rows: Iterable[Measurement]) -> list[Winner]:
    """The best kernel of each shape that several kernels were tried on."""
    found = []
    for same in grouped(rows, by_shape=True).values():
        best = {row.kernel: row for row in reversed(same) if row.ok}
        if best and len({row.kernel for row in same}) > 1:
            first, *others = best_first(best.values())
            found.append(Winner(first, others[0] if others else None))
    return found


def winner_table(found: Sequence[Winner], shares: Shares, top: int | None) -> Table[Winner]:
    """The best kernels. ``found``: at least one."""
    columns: list[Column[Winner]] = [
        Column("problem", "problem", lambda each: group_title(each.row), left=True),
        Column("shape", "shape", lambda each: str(each.row.shape), left=True),
        Column("kernel", "best kernel", lambda each: each.row.kernel, left=True),
        Column(rate_name("rate", found[0].row.work.unit), "", lambda each: each.row.best_rate),
        Column("", "rate", lambda each: rate_text(each.row.best_rate, each.row.work.unit)),
        Column("half_width_percent", "+-%", lambda each: half_width_percent(each.row), lambda value: f"{value:.2f}", 3),
        Column("mamfu", "MAMFU", lambda each: shares.mamfu(each.row), percent, 2),
        Column("ahead", "ahead %", lambda each: each.ahead, percent, 1),
        Column("second", "second", lambda each: each.second and each.second.kernel, importance=1, left=True),
    ]
    return Table(columns, found, "best kernel per shape", "best_kernels", top=top)
