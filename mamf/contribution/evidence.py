"""A run log under review: its records as written, with line numbers, and the log that mamf reads from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mamf.backend import DeviceInfo
from mamf.dtypes import DTYPES
from mamf.logs.lines import Seen, lines_of, parse_records
from mamf.logs.run_log import RunLog
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.plans import Plan

TIERS = ("complete", "interrupted", "legacy")
# What only kernels say that approximate: they skip work, or multiply in another dtype.
_OF_APPROXIMATION = ("product_dtypes", "sparsity", "cosine_similarity", "relative_l1")


@dataclass(frozen=True)
class Finding:
    """What a rule found. ``line``: of the log, counted from 1. A warning does not keep a log out."""

    rule: str
    message: str
    line: int | None = None
    is_warning: bool = False


@dataclass(frozen=True)
class Evidence:
    """``records``: every line with its number, the header first."""

    records: tuple[tuple[int, dict[str, Any]], ...]
    log: RunLog

    @property
    def header(self) -> dict[str, Any]:
        """As written, without defaults for missing fields."""
        return self.records[0][1]

    @property
    def plan(self) -> Plan:
        return self.log.plan

    @property
    def has_sensors(self) -> bool:
        """Whether clock and power should be in each row. CPUs have no vendor's sensors."""
        return self.log.header["device"]["is_accelerator"] and self.header.get("sensors") == "available"

    def of_kind(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((line, record) for line, record in self.records if record["record"] == kind)

    @cached_property
    def rows(self) -> tuple[tuple[int, dict[str, Any], Measurement], ...]:
        """Every measurement as written, failed and repeated ones too: line, record, and what mamf reads from it."""
        written = zip(self.of_kind("measurement"), self.log.every_row, strict=True)
        return tuple((line, record, row) for (line, record), row in written)

    @property
    def good_rows(self) -> Iterator[tuple[int, Measurement]]:
        return ((line, row) for line, _, row in self.rows if row.ok and row.problem.dtype in DTYPES)

    def device_of(self, row: Measurement) -> DeviceInfo:
        """The device that measured a row."""
        return self.log.device(row.device)


def records_of(path: Path, seen: Seen | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record with its line, one at a time. Raises RunLogError that names a line which is not a record."""
    return parse_records(path, lines_of(path, seen))


def is_exact(row: Measurement) -> bool:
    """Whether all FLOP were computed in the row's dtype. Only a kernel that its operation lists may approximate,
    whatever a row says; no kernel is imported for it.
    """
    if not any(name in row.details for name in _OF_APPROXIMATION):
        return True
    return row.kernel.partition("[")[0] not in operation_called(row.operation).approximate_kernels
