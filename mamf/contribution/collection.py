"""What results/ holds, as the entries of its tables: ceilings by accelerator, attention by MAMFU, legacy figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mamf.ceilings.ceiling import CONFIRM, Ceiling
from mamf.ceilings.share import mamfu
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Conditions, Measurement
from mamf.operations.attention.rows import is_attention
from mamf.plans import FindPlan, KernelsPlan
from mamf.regimes.names import NAMES
from mamf.report import bests
from mamf.report.kernels import title
from mamf.statistics import Interval


@dataclass(frozen=True)
class CeilingEntry:
    """A device's best for a dtype and regime: confirmed by a find, or the best row of a sweep.

    ``tflops`` and ``low`` to ``high`` by the statistic of the regime (classic: the fastest launch, without interval).
    """

    header: dict[str, Any]
    place: Path
    tier: str
    dtype: str
    regime: str
    shape: str
    kernel: str
    tflops: float
    low: float | None
    high: float | None
    conditions: Conditions
    is_confirmed: bool

    @property
    def device(self) -> str:
        return str(self.header["device"]["name"])

    @property
    def joules_per_tflop(self) -> float | None:
        watts = self.conditions.watts
        return watts / self.tflops if self.regime == "sustained" and watts else None


@dataclass(frozen=True)
class AttentionEntry:
    header: dict[str, Any]
    place: Path
    tier: str
    row: Measurement
    share: float

    @property
    def device(self) -> str:
        return str(self.header["device"]["name"])


@dataclass(frozen=True)
class KernelEntry:
    """A row of an operation that has no table of its own; ``ceiling``: what a find confirmed of that shape and kernel
    in fresh rounds, which then counts in the row's place.
    """

    header: dict[str, Any]
    place: Path
    tier: str
    row: Measurement
    ceiling: Ceiling | None = None

    @property
    def rate(self) -> float:
        return self.row.best_rate if self.ceiling is None else self.ceiling.rate

    @property
    def interval(self) -> Interval:
        return self.row.rate_interval if self.ceiling is None else self.ceiling.interval

    @property
    def device(self) -> str:
        return str(self.header["device"]["name"])


@dataclass(frozen=True)
class LegacyEntry:
    run: FinderRun
    place: Path


@dataclass(frozen=True)
class Collection:
    ceilings: tuple[CeilingEntry, ...] = ()
    attention: tuple[AttentionEntry, ...] = ()
    kernels: tuple[KernelEntry, ...] = ()
    legacy: tuple[LegacyEntry, ...] = ()


def collect(root: Path, paths: Iterable[Path]) -> Collection:
    """Entries of all logs. Raises RunLogError for one that cannot be read."""
    ceilings: list[CeilingEntry] = []
    attention: list[AttentionEntry] = []
    kernels: list[KernelEntry] = []
    legacy: list[LegacyEntry] = []
    for path in paths:
        place = path.relative_to(root)
        if (run := read_legacy_or_none(path)) is not None:
            legacy.append(LegacyEntry(run, place))
            continue
        log = read_run_log(path)
        plan = log.plan
        if isinstance(plan, KernelsPlan) and plan.operation == "attention":
            attention += _attention_entries(log, place)
        elif isinstance(plan, KernelsPlan):
            kernels += _kernel_entries(log, place)
        elif isinstance(plan, FindPlan):
            ceilings += [_of_ceiling(log, place, ceiling) for ceiling in log.all_ceilings.values()]
        else:
            ceilings += [_of_row(log, place, best.row) for best in bests(log.measurements).values()]
    return Collection(tuple(ceilings), tuple(attention), tuple(kernels), tuple(legacy))


def named_dtype(problem: Any) -> str:
    """``float8_e4m3fn, fast accumulation``: products that round otherwise are not ranked with one another."""
    return str(problem.dtype) + (", fast accumulation" if getattr(problem, "fast_accumulation", False) else "")


def _of_ceiling(log: RunLog, place: Path, ceiling: Ceiling) -> CeilingEntry:
    return CeilingEntry(
        header=log.header,
        place=place,
        tier=log.tier,
        dtype=named_dtype(ceiling.problem),
        regime=ceiling.regime,
        shape=str(ceiling.shape),
        kernel=ceiling.kernel,
        tflops=ceiling.tflops,
        low=ceiling.interval.low,
        high=ceiling.interval.high,
        conditions=ceiling.conditions,
        is_confirmed=True,
    )


def _of_row(log: RunLog, place: Path, row: Measurement) -> CeilingEntry:
    interval = row.rate_interval if row.best_by == row.figure else None
    return CeilingEntry(
        header=log.header,
        place=place,
        tier=log.tier,
        dtype=named_dtype(row.problem),
        regime=row.regime,
        shape=str(row.shape),
        kernel=row.kernel,
        tflops=row.best_rate,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
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
    groups: dict[tuple[str, str, str], list[CeilingEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.dtype, entry.regime, entry.device), []).append(entry)
    found = []
    for group in groups.values():
        kind = [entry for entry in group if entry.is_confirmed] or group
        found.append((max(kind, key=lambda entry: entry.tflops), kind))
    order = list(NAMES)
    return sorted(found, key=lambda pair: (pair[0].dtype, order.index(pair[0].regime), -pair[0].tflops))


def best_attention(entries: Iterable[AttentionEntry]) -> list[AttentionEntry]:
    """For each accelerator, dtype, regime, direction, head dimension and mask the kernel with the highest MAMFU."""
    found: dict[tuple[Any, ...], AttentionEntry] = {}
    for entry in entries:
        row = entry.row
        mask = (row.shape.causal, row.shape.window or 0)
        key = (entry.device, row.problem.dtype, row.regime, row.problem.direction, row.shape.head_dim, *mask)
        is_counted_alike = not row.problem.has_backward or row.problem.backward_count == "hardware"
        if is_counted_alike and (key not in found or entry.share > found[key].share):
            found[key] = entry
    order = {"fwd": 0, "bwd": 1}
    return [found[key] for key in sorted(found, key=lambda key: (*key[:3], order.get(key[3], 2), *key[4:]))]


def best_kernels(entries: Iterable[KernelEntry]) -> list[KernelEntry]:
    """For each operation, regime, problem and accelerator the highest confirmed rate, else that of the best row."""
    found: dict[tuple[str, ...], KernelEntry] = {}
    for entry in entries:
        key = (entry.row.operation, title(entry.row), entry.device)
        rank = entry.ceiling is not None, entry.rate
        if key not in found or rank > (found[key].ceiling is not None, found[key].rate):
            found[key] = entry
    return [found[key] for key in sorted(found)]
