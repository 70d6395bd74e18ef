"""The contents of results/: entries of all logs, the best of them, and legacy figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mamf.contribution.confirming import Submitters, read_submitters
from mamf.contribution.entries import Entry, entries_of
from mamf.contribution.row_rules import is_exact
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.run_log import read_run_log
from mamf.measurement import group_pairs
from mamf.regime_names import NAMES
from mamf.report.kernels import title

#: The best entry, with those that it leads.
Leader = tuple[Entry, Sequence[Entry]]


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

    entries: Sequence[Entry] = ()
    legacy: Sequence[LegacyEntry] = ()
    submitters: Submitters = field(default_factory=lambda: Submitters({}))

    def of(self, table: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.table == table]


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
    return Collection(entries, legacy, read_submitters(root))


def leaders(entries: Iterable[Entry]) -> list[Leader]:
    """For each accelerator, dtype and regime the highest ceiling, with all of its kind.

    A sweep's best was chosen by the samples that it is reported with; where a find confirmed a ceiling, sweeps do not
    count.
    """
    groups = group_pairs(((entry.dtype, entry.regime, entry.device), entry) for entry in entries)
    found = []
    for group in groups.values():
        kind = [entry for entry in group if entry.is_confirmed] or group
        found.append((max(kind, key=lambda entry: entry.figure), kind))
    order = list(NAMES)
    return sorted(found, key=lambda pair: (pair[0].dtype, order.index(pair[0].regime), -pair[0].figure))


def best_attention(entries: Iterable[Entry], *, per_kernel: bool = False) -> list[Entry]:
    """For each accelerator, dtype, regime, direction, head dimension and mask the kernel with the highest MAMFU, of
    those that approximate only if no other was measured; ``per_kernel``: the best row of each kernel.
    """
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        row, problem = entry.row, entry.row.problem
        what = (entry.device, problem.dtype, row.regime, problem.direction, row.shape.head_dims)
        # FLOP of a backward pass are counted in two ways.
        if not problem.has_backward or problem.backward_count == "hardware":
            key = (*what, row.shape.causal, row.shape.window or 0, row.kernel if per_kernel else "")
            groups.setdefault(key, []).append(entry)
    best = {key: max(each, key=lambda entry: (is_exact(entry.row), entry.share)) for key, each in groups.items()}
    order = {"fwd": 0, "bwd": 1}
    keys = sorted(best, key=lambda key: (*key[:3], order.get(key[3], 2), *key[4:7], -best[key].share))
    return [best[key] for key in keys]


def best_kernels(entries: Iterable[Entry]) -> list[Entry]:
    """For each operation, regime, problem and accelerator the highest confirmed rate, else that of the best row."""
    groups = group_pairs(((entry.row.operation, title(entry.row), entry.device), entry) for entry in entries)
    return [max(groups[key], key=lambda entry: (entry.is_confirmed, entry.figure)) for key in sorted(groups)]
