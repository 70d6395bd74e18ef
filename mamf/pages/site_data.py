"""What the site of results/ shows: every log once, and the best figures by device, dtype, regime and tier."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamf.contribution.collection import AttentionEntry, CeilingEntry, KernelEntry, entries_of, leaders
from mamf.contribution.confirming import Entry, part_confirmed
from mamf.contribution.evidence import TIERS
from mamf.contribution.published import PublishedFigure, read_published
from mamf.contribution.tables import software_versions
from mamf.dtypes import DTYPES
from mamf.kinds.registry import kind_of
from mamf.logs.legacy import TIER, FinderRun, read_legacy_or_none
from mamf.logs.run_log import RunLog, Seen, read_run_log
from mamf.peaks import Peak, find_peak
from mamf.regime_names import NAMES
from mamf.statistics import Interval

#: The tier of figures that no second submitter confirms yet, whatever the tier of their logs.
UNCONFIRMED = "unconfirmed"
COMPLETE, INTERRUPTED, LEGACY = TIERS
ALL_TIERS = (COMPLETE, UNCONFIRMED, INTERRUPTED, LEGACY)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Run:
    """A log at ``place`` in results/. ``what``: kind, operation and dtypes. ``card``: the hash of the device's
    identifier, None if unknown. ``copy_of``: an earlier log with the same samples; then this one counts nowhere.
    """

    place: Path
    tier: str
    device: str
    what: str
    started: str
    software: Mapping[str, str]
    vendor: str = UNKNOWN
    card: str | None = None
    header: Mapping[str, Any] | None = None
    copy_of: Path | None = None


@dataclass(frozen=True)
class CeilingLine:
    """The highest figure of a device for a dtype and a regime, among those of one tier. ``entry``: where it is from,
    None for a legacy figure. ``cards``: the best entry of each card, highest first.
    """

    device: str
    vendor: str
    dtype: str
    regime: str
    tier: str
    tflops: float
    place: Path
    software: Mapping[str, str]
    interval: Interval | None = None
    peak: Peak | None = None
    entry: CeilingEntry | None = None
    cards: Sequence[CeilingEntry] = ()

    @property
    def share(self) -> float | None:
        """Of the datasheet's dense peak."""
        return self.tflops * 1e12 / self.peak.flops if self.peak else None

    @property
    def lowest(self) -> float | None:
        """TFLOPS of the slowest card."""
        return self.cards[-1].tflops if self.cards else None


@dataclass(frozen=True)
class SiteData:
    """``entries``: confirmed ceilings of complete logs. ``attention``, ``kernels``: those that are confirmed, of
    complete logs. ``unconfirmed``: with the reasons.
    """

    runs: Sequence[Run] = ()
    lines: Sequence[CeilingLine] = ()
    entries: Sequence[CeilingEntry] = ()
    attention: Sequence[AttentionEntry] = ()
    kernels: Sequence[KernelEntry] = ()
    unconfirmed: Sequence[tuple[Entry, str]] = ()
    published: Sequence[PublishedFigure] = ()

    @property
    def dtypes(self) -> list[str]:
        """Those with ceilings, the one of most cards first."""
        cards: dict[str, int] = {}
        for line in self.lines:
            cards[line.dtype] = cards.get(line.dtype, 0) + max(len(line.cards), 1)
        return sorted(cards, key=lambda dtype: (-cards[dtype], dtype))

    def by_device(self) -> dict[str, SiteData]:
        """The part of each device that has a log, by its name."""
        parts: dict[str, dict[str, list[Any]]] = {}

        def put(device: str, kind: str, item: Any) -> None:
            parts.setdefault(device, {}).setdefault(kind, []).append(item)

        for kind in ("runs", "lines", "entries", "attention", "kernels"):
            for item in getattr(self, kind):
                put(item.device, kind, item)
        for entry, reason in self.unconfirmed:
            put(entry.device, "unconfirmed", (entry, reason))
        return {device: SiteData(**parts[device]) for device in sorted(parts)}


def read_site_data(root: Path, paths: Iterable[Path], seen: Seen | None = None) -> SiteData:
    """The logs at ``paths`` in the folder ``root``, in their order, and what others published. ``seen``: called
    with the bytes of each log.

    Raises RunLogError for a log that cannot be read, UsageError for malformed published figures.
    """
    runs: list[Run] = []
    entries: list[Entry] = []
    finders: list[tuple[Run, FinderRun]] = []
    first: dict[str, Path] = {}
    for path in paths:
        place, log = path.relative_to(root), None
        finder = read_legacy_or_none(path)
        run = _run_of_finder(finder, place) if finder else _run_of_log(log := read_run_log(path), place)
        original = first.setdefault(_digest(finder or log), place)
        if original != place:
            run = replace(run, copy_of=original)
        elif finder:
            finders.append((run, finder))
        elif log:
            entries += entries_of(log, place)
        runs.append(run)
        if seen:
            seen(path.stat().st_size)
    vendors = {run.device: run.vendor for run in runs if run.vendor != UNKNOWN}
    runs = [replace(run, vendor=vendors.get(run.device, UNKNOWN)) for run in runs]
    data = _ranked(entries)
    lines = [*data.lines, *_legacy_lines(finders, vendors)]
    ordered = sorted(lines, key=_order(replace(data, lines=lines).dtypes))
    return replace(data, runs=runs, lines=ordered, published=read_published(root))


def _run_of_log(log: RunLog, place: Path) -> Run:
    header, plan = log.header, log.plan
    dtypes = ", ".join(dict.fromkeys(str(getattr(each, "dtype", "")) for each in plan.problems if each))
    noun = kind_of(plan).noun.split()[-1]
    what = noun if plan.operation == "matmul" else f"{noun} of {plan.operation}"
    device = header["device"]
    return Run(
        *(place, log.tier, device["name"], f"{what}, {dtypes}" if dtypes else what, header["started"]),
        *(software_versions(header), device["vendor"] or UNKNOWN, device["uuid_hash"], header),
    )


def _run_of_finder(finder: FinderRun, place: Path) -> Run:
    what = f"mamf-finder {finder.version or 'of unknown version'}, {finder.dtype or 'dtype unknown'}"
    return Run(place, TIER, finder.device or UNKNOWN, what, finder.started or "", finder.software)


def _digest(log: RunLog | FinderRun | None) -> str:
    """Equal for copies of one run, whatever card they name."""
    if isinstance(log, FinderRun):
        identity: Any = (log.device, log.started, log.rows)
    else:
        assert log is not None, "a log is a run log or a legacy one"
        samples = [row.samples for row in log.every_row if row.samples]
        identity = (log.header["device"]["name"], samples or log.path)
    return hashlib.sha256(repr(identity).encode(errors="replace")).hexdigest()


def _ranked(entries: Iterable[Entry]) -> SiteData:
    """Each kind of figure with its second submitters; those without one stand apart."""
    listed = list(entries)
    ceilings, doubted = part_confirmed(each for each in listed if isinstance(each, CeilingEntry))
    attention, doubted_attention = part_confirmed(each for each in listed if isinstance(each, AttentionEntry))
    kernels, doubted_kernels = part_confirmed(each for each in listed if isinstance(each, KernelEntry))
    complete = [entry for entry in ceilings if entry.tier == COMPLETE]
    tiers = {
        COMPLETE: complete,
        UNCONFIRMED: [entry for entry, _ in doubted],
        INTERRUPTED: [entry for entry in ceilings if entry.tier == INTERRUPTED],
    }
    return SiteData(
        lines=[line for tier, each in tiers.items() for line in ceiling_lines(tier, each)],
        entries=complete,
        attention=[entry for entry in attention if entry.tier == COMPLETE],
        kernels=[entry for entry in kernels if entry.tier == COMPLETE],
        unconfirmed=[*doubted, *doubted_attention, *doubted_kernels],
    )


def ceiling_lines(tier: str, entries: Iterable[CeilingEntry]) -> list[CeilingLine]:
    """A line for each device, dtype and regime."""
    return [
        CeilingLine(
            *(best.device, best.header["device"]["vendor"] or UNKNOWN, best.dtype, best.regime, tier, best.tflops),
            *(best.place, software_versions(best.header), best.interval, best.datasheet, best, best_of_cards(alike)),
        )
        for best, alike in leaders(entries)
    ]


def best_of_cards(entries: Iterable[CeilingEntry]) -> list[CeilingEntry]:
    """The best entry of each card, highest first. Logs without a card's hash count as one card."""
    found: dict[str | None, CeilingEntry] = {}
    for entry in sorted(entries, key=lambda entry: (-entry.tflops, entry.place)):
        found.setdefault(entry.header["device"]["uuid_hash"], entry)
    return list(found.values())


def _legacy_lines(finders: Iterable[tuple[Run, FinderRun]], vendors: Mapping[str, str]) -> list[CeilingLine]:
    """A line for each device, dtype and statistic of mamf-finder, which stands in place of the regime."""
    found: dict[tuple[str, ...], CeilingLine] = {}
    for run, finder in finders:
        dtype = finder.dtype or UNKNOWN
        peak = find_peak(run.device, dtype) if dtype in DTYPES else None
        for name, best in finder.best.items():
            line = CeilingLine(
                *(run.device, vendors.get(run.device, UNKNOWN), dtype, f"mamf-finder's {name}", TIER),
                *(best.tflops[name], run.place, run.software, None, peak),
            )
            key = (line.device, line.dtype, line.regime)
            if key not in found or line.tflops > found[key].tflops:
                found[key] = line
    return list(found.values())


def _order(dtypes: Sequence[str]) -> Any:
    """By tier, dtype and regime, the highest first."""
    regimes = dict(zip(NAMES, range(len(NAMES)), strict=True))
    ranks = {dtype: place for place, dtype in enumerate(dtypes)}

    def key(line: CeilingLine) -> tuple[Any, ...]:
        regime = regimes.get(line.regime, len(regimes))
        return ALL_TIERS.index(line.tier), ranks[line.dtype], regime, line.regime, -line.tflops, line.device

    return key
