"""The contents of results/ as table entries: ceilings by accelerator, attention by MAMFU, legacy figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamf.backend import shared_ways
from mamf.ceilings.ceiling import CONFIRM, Ceiling
from mamf.ceilings.share import label_dtype, mamfu
from mamf.contribution.confirming import Entry, Submitters, read_submitters
from mamf.contribution.row_rules import is_exact
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Conditions, Measurement, group_pairs
from mamf.operations.attention.operation import is_attention
from mamf.operations.unknown import Unknown, operation_called
from mamf.peaks import Peak, find_peak
from mamf.plans import MATMUL, SWEEP
from mamf.plugins.discovery import is_own_kernel
from mamf.regime_names import NAMES
from mamf.report.kernels import title
from mamf.report.rows import bests
from mamf.report.text import label_kernel
from mamf.statistics import Interval


@dataclass(frozen=True)
class CeilingEntry(Entry):
    """A device's best for a dtype and regime: confirmed by a find, or the best row of a sweep.

    ``tflops`` and ``interval`` by the statistic of the regime (classic: the fastest launch, without interval).
    """

    dtype: str
    regime: str
    shape: str
    kernel: str
    tflops: float
    interval: Interval | None
    conditions: Conditions
    is_confirmed: bool
    #: Of the kernel over the default one on the same shape, minus 1; 0 if it is the default or unknown.
    gain: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        return self.device, self.dtype, self.regime

    @property
    def figure(self) -> float:
        return self.tflops

    @property
    def label(self) -> str:
        return f"{self.dtype}, {self.regime}, {self.shape} by {self.kernel}"

    @property
    def datasheet(self) -> Peak | None:
        """The dense peak of the device for the dtype."""
        device = self.header["device"]
        return find_peak(device["name"], self.dtype.partition(",")[0], device["compute_units"])

    @property
    def joules_per_tflop(self) -> float | None:
        watts = self.conditions.watts
        return watts / self.tflops if self.regime == "sustained" and watts else None


@dataclass(frozen=True)
class RowEntry(Entry):
    """A row of an operation other than matmul."""

    row: Measurement

    @property
    def key(self) -> tuple[Any, ...]:
        return self.row.operation, title(self.row), self.device, self.row.shape, self.row.kernel

    @property
    def figure(self) -> float:
        return self.row.best_rate

    @property
    def label(self) -> str:
        return f"{self.row.operation} {self.row.shape} by {self.row.kernel}, {self.row.regime}"


@dataclass(frozen=True)
class AttentionEntry(RowEntry):
    share: float


@dataclass(frozen=True)
class KernelEntry(RowEntry):
    """A row of an operation without a separate table. ``ceiling``: what a find confirmed for that shape and kernel
    in fresh rounds; it then replaces the row's rate.
    """

    ceiling: Ceiling | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return super().key if self.ceiling is None else (self.row.operation, title(self.row), self.device)

    @property
    def figure(self) -> float:
        return self.row.best_rate if self.ceiling is None else self.ceiling.rate

    @property
    def interval(self) -> Interval:
        return self.row.rate_interval if self.ceiling is None else self.ceiling.interval


def kernel_title(entry: CeilingEntry | AttentionEntry | KernelEntry) -> str:
    """The name of an entry's kernel for tables, labeled if it was loaded by path or is not one of mamf's."""
    if isinstance(entry, CeilingEntry):
        operation, name = MATMUL, entry.kernel
    else:
        operation, name = entry.row.operation, entry.row.kernel
    labeled, of = label_kernel(name, entry.header), operation_called(operation)
    is_known = labeled != name or isinstance(of, Unknown) or is_own_kernel(of, name)
    return labeled if is_known else f"{name} (third-party)"


@dataclass(frozen=True)
class LegacyEntry:
    run: FinderRun
    place: Path

    @property
    def device(self) -> str:
        return self.run.device or ""


@dataclass(frozen=True)
class Collection:
    """All entries of a results folder, and who submitted them."""

    ceilings: tuple[CeilingEntry, ...] = ()
    attention: tuple[AttentionEntry, ...] = ()
    kernels: tuple[KernelEntry, ...] = ()
    legacy: tuple[LegacyEntry, ...] = ()
    submitters: Submitters = field(default_factory=lambda: Submitters({}))


def collect(root: Path, paths: Iterable[Path]) -> Collection:
    """Entries of all logs. Raises RunLogError for one that cannot be read."""
    entries: list[Entry] = []
    legacy: list[LegacyEntry] = []
    for path in paths:
        place = path.relative_to(root)
        if (run := read_legacy_or_none(path)) is not None:
            legacy.append(LegacyEntry(run, place))
        else:
            entries += entries_of(read_run_log(path), place)
    return Collection(
        tuple(entry for entry in entries if isinstance(entry, CeilingEntry)),
        tuple(entry for entry in entries if isinstance(entry, AttentionEntry)),
        tuple(entry for entry in entries if isinstance(entry, KernelEntry)),
        tuple(legacy),
        read_submitters(root),
    )


def entries_of(log: RunLog, place: Path) -> Sequence[Entry]:
    """The entries of a log: its ceilings, its best rows, or all rows of kernels; none of a shared card."""
    plan = log.plan
    if shared_ways(log.header["device"]["name"]):  # tables rank whole cards
        return []
    if plan.is_search:
        return [_of_ceiling(log, place, ceiling) for ceiling in log.all_ceilings.values()]
    if (plan.kind, plan.operation) == (SWEEP, MATMUL):
        return [_of_row(log, place, best.row) for best in bests(log.measurements).values()]
    return (_attention_entries if plan.operation == "attention" else _kernel_entries)(log, place)


def _of_ceiling(log: RunLog, place: Path, ceiling: Ceiling) -> CeilingEntry:
    return CeilingEntry(
        header=log.header,
        place=place,
        tier=log.tier,
        dtype=label_dtype(ceiling.problem),
        regime=ceiling.regime,
        shape=str(ceiling.shape),
        kernel=ceiling.kernel,
        tflops=ceiling.tflops,
        interval=ceiling.interval,
        conditions=ceiling.conditions,
        is_confirmed=True,
        gain=ceiling.gain_over_default or 0.0,
    )


def _of_row(log: RunLog, place: Path, row: Measurement) -> CeilingEntry:
    return CeilingEntry(
        header=log.header,
        place=place,
        tier=log.tier,
        dtype=label_dtype(row.problem),
        regime=row.regime,
        shape=str(row.shape),
        kernel=row.kernel,
        tflops=row.best_rate,
        interval=row.rate_interval if row.best_by == row.figure else None,
        conditions=row.conditions,
        is_confirmed=False,
    )


def _kernel_entries(log: RunLog, place: Path) -> list[KernelEntry]:
    """Rows, and ceilings with a row that confirmed them."""
    rows = [row for row in log.measurements if row.ok and not row.phase]
    found = [KernelEntry(log.header, place, log.tier, row) for row in rows]
    for (problem, regime), ceiling in log.own_ceilings.items():
        fresh = (problem, regime, ceiling.shape, ceiling.kernel, CONFIRM)
        row = next(
            each
            for each in log.measurements
            if (each.problem, each.regime, each.shape, each.kernel, each.phase) == fresh
        )
        found.append(KernelEntry(log.header, place, log.tier, row, ceiling))
    return found


def _attention_entries(log: RunLog, place: Path) -> list[AttentionEntry]:
    shares = ((row, mamfu(row, log.all_ceilings)) for row in log.measurements if row.ok and is_attention(row))
    return [AttentionEntry(log.header, place, log.tier, row, share) for row, share in shares if share is not None]


def leaders(entries: Iterable[CeilingEntry]) -> list[tuple[CeilingEntry, Sequence[CeilingEntry]]]:
    """For each accelerator, dtype and regime the highest ceiling, with all of its kind.

    A sweep's best was chosen by the samples that it is reported with; where a find confirmed a ceiling, sweeps do not
    count.
    """
    groups = group_pairs(((entry.dtype, entry.regime, entry.device), entry) for entry in entries)
    found = []
    for group in groups.values():
        kind = [entry for entry in group if entry.is_confirmed] or group
        found.append((max(kind, key=lambda entry: entry.tflops), kind))
    order = list(NAMES)
    return sorted(found, key=lambda pair: (pair[0].dtype, order.index(pair[0].regime), -pair[0].tflops))


def best_attention(entries: Iterable[AttentionEntry], *, per_kernel: bool = False) -> list[AttentionEntry]:
    """For each accelerator, dtype, regime, direction, head dimension and mask the kernel with the highest MAMFU, of
    those that approximate only if no other was measured; ``per_kernel``: the best row of each kernel.
    """
    found: dict[tuple[Any, ...], AttentionEntry] = {}

    def rank(entry: AttentionEntry) -> tuple[bool, float]:
        return is_exact(entry.row), entry.share

    for entry in entries:
        row = entry.row
        mask = (row.shape.causal, row.shape.window or 0)
        problem = (row.problem.dtype, row.regime, row.problem.direction)
        key = (entry.device, *problem, row.shape.head_dims, *mask, row.kernel if per_kernel else "")
        is_counted_alike = not row.problem.has_backward or row.problem.backward_count == "hardware"
        if is_counted_alike and (key not in found or rank(entry) > rank(found[key])):
            found[key] = entry
    order = {"fwd": 0, "bwd": 1}
    return [found[key] for key in sorted(found, key=lambda key: (*key[:3], order.get(key[3], 2), *key[4:]))]


def best_kernels(entries: Iterable[KernelEntry]) -> list[KernelEntry]:
    """For each operation, regime, problem and accelerator the highest confirmed rate, else that of the best row."""
    found: dict[tuple[str, ...], KernelEntry] = {}
    for entry in entries:
        key = (entry.row.operation, title(entry.row), entry.device)
        rank = entry.ceiling is not None, entry.figure
        if key not in found or rank > (found[key].ceiling is not None, found[key].figure):
            found[key] = entry
    return [found[key] for key in sorted(found)]


def software(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in software_versions(header).items())


def software_versions(header: Mapping[str, Any]) -> dict[str, str]:
    """torch, the vendor's libraries and the driver."""
    device = header["device"]
    named = {"torch": header["environment"]["packages"].get("torch"), **(device.get("versions") or {})}
    named |= {"driver": device.get("driver")}
    return {name: str(version) for name, version in named.items() if version and version != "True"}
