"""The figures of a log in results/: its ceilings, its best rows, or all rows of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.backend import shared_ways
from mamf.ceilings.ceiling import CONFIRM, Ceiling
from mamf.ceilings.share import label_dtype, mamfu
from mamf.logs.run_log import RunLog
from mamf.measurement import Conditions, Measurement
from mamf.operations.attention.operation import is_attention
from mamf.operations.unknown import operation_called
from mamf.peaks import Peak, find_peak
from mamf.plans import MATMUL, SWEEP
from mamf.plugins.discovery import is_own_kernel
from mamf.report.kernels import title
from mamf.report.rows import bests
from mamf.report.text import label_kernel
from mamf.statistics import Interval

ATTENTION, OTHERS = "attention", "other operations"
#: The tables of results/: the best of matmul, shares of attention, rows of other operations.
TABLES = (MATMUL, ATTENTION, OTHERS)


@dataclass(frozen=True)
class Entry:
    """A figure from the log at ``place``: that of a row, or the ``ceiling`` that fresh rows like it confirmed.
    ``share``: of the measured ceiling, in the table of attention.
    """

    header: dict[str, Any]
    place: Path
    tier: str
    table: str
    row: Measurement
    ceiling: Ceiling | None = None
    share: float = 0.0

    @property
    def device(self) -> str:
        return str(self.header["device"]["name"])

    @property
    def dtype(self) -> str:
        return label_dtype(self.row.problem)

    @property
    def regime(self) -> str:
        return self.row.regime

    @property
    def shape(self) -> str:
        return str(self.row.shape)

    @property
    def kernel(self) -> str:
        return self.row.kernel

    @property
    def figure(self) -> float:
        """By the statistic of the regime, in the operation's unit."""
        return self.row.best_rate if self.ceiling is None else self.ceiling.rate

    @property
    def tflops(self) -> float:
        """The same, for operations that count FLOP."""
        return self.figure

    @property
    def interval(self) -> Interval | None:
        """None for the fastest launch."""
        if self.ceiling is not None:
            return self.ceiling.interval
        return self.row.rate_interval if self.row.best_by == self.row.figure else None

    @property
    def conditions(self) -> Conditions:
        return self.row.conditions if self.ceiling is None else self.ceiling.conditions

    @property
    def is_confirmed(self) -> bool:
        """Whether a find confirmed the figure with fresh samples."""
        return self.ceiling is not None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for figures that confirm each other."""
        if self.table == MATMUL:
            return self.device, self.dtype, self.regime
        of = (self.row.operation, title(self.row), self.device)
        return of if self.is_confirmed else (*of, self.row.shape, self.row.kernel)

    @property
    def label(self) -> str:
        """What the figure is of."""
        if self.table == MATMUL:
            return f"{self.dtype}, {self.regime}, {self.shape} by {self.kernel}"
        return f"{self.row.operation} {self.shape} by {self.kernel}, {self.regime}"

    @property
    def datasheet(self) -> Peak | None:
        """The dense peak of the device for the dtype."""
        device = self.header["device"]
        return find_peak(device["name"], self.row.problem.dtype, device["compute_units"])

    @property
    def joules_per_tflop(self) -> float | None:
        watts = self.conditions.watts
        return watts / self.figure if self.regime == "sustained" and watts else None


def kernel_title(entry: Entry) -> str:
    """The name of an entry's kernel for tables, labeled if it was loaded by path or is not one of mamf's."""
    labeled, of = label_kernel(entry.kernel, entry.header), operation_called(entry.row.operation)
    is_known = labeled != entry.kernel or is_own_kernel(of, entry.kernel)
    return labeled if is_known else f"{entry.kernel} (third-party)"


def software(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in software_versions(header).items())


def software_versions(header: Mapping[str, Any]) -> dict[str, str]:
    """torch, the vendor's libraries and the driver."""
    device = header["device"]
    named = {"torch": header["environment"]["packages"].get("torch"), **(device.get("versions") or {})}
    named |= {"driver": device.get("driver")}
    return {name: str(version) for name, version in named.items() if version and version != "True"}


def entries_of(log: RunLog, place: Path) -> list[Entry]:
    """The entries of a log: its ceilings, its best rows, or all rows of kernels; none of a shared card."""
    plan, of_log = log.plan, (log.header, place, log.tier)
    if shared_ways(log.header["device"]["name"]):  # tables rank whole cards
        return []
    if plan.is_search:
        return [Entry(*of_log, MATMUL, *each) for each in _with_rows(log, log.all_ceilings)]
    if (plan.kind, plan.operation) == (SWEEP, MATMUL):
        return [Entry(*of_log, MATMUL, best.row) for best in bests(log.measurements).values()]
    rows = [row for row in log.measurements if row.ok]
    if plan.operation == ATTENTION:
        shares = ((row, mamfu(row, log.all_ceilings)) for row in rows if is_attention(row))
        return [Entry(*of_log, ATTENTION, row, None, share) for row, share in shares if share is not None]
    found = [Entry(*of_log, OTHERS, row) for row in rows if not row.phase]
    return found + [Entry(*of_log, OTHERS, *each) for each in _with_rows(log, log.own_ceilings)]


def _with_rows(log: RunLog, ceilings: Mapping[Any, Ceiling]) -> list[tuple[Measurement, Ceiling]]:
    """Each ceiling behind a row that confirmed it."""
    fresh = (row for row in log.measurements if row.ok and row.phase == CONFIRM)
    rows = {(row.problem, row.regime, row.shape, row.kernel): row for row in fresh}
    keyed = (((each.problem, each.regime, each.shape, each.kernel), each) for each in ceilings.values())
    return [(rows[key], ceiling) for key, ceiling in keyed if key in rows]
