"""Read the data of the site from all logs in results/: the logs, and the highest ceilings by device, dtype, regime and
tier.

The tier says how far a log can be trusted: complete, unconfirmed, interrupted, or legacy (a log of mamf-finder).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mamf.contribution.collection import (
    TABLES,
    ResultRate,
    Submitters,
    collect_rates,
    find_best_rates,
    list_software_versions,
    read_submitters,
    split_confirmed,
)
from mamf.contribution.rules import TIERS
from mamf.dtypes import DTYPES
from mamf.kinds.registry import make_run_title
from mamf.logs.legacy import FinderRun, read_legacy_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Rate, group_pairs
from mamf.peaks import DatasheetRate, find_peak
from mamf.plans import REGIME_NAMES

COMPLETE, INTERRUPTED, LEGACY = TIERS
#: The tier of figures of complete runs that neither a maintainer nor two contributors measured.
UNCONFIRMED_TIER = "unconfirmed"
ALL_TIERS = (COMPLETE, UNCONFIRMED_TIER, INTERRUPTED, LEGACY)
UNKNOWN_NAME = "unknown"


@dataclass(frozen=True)
class SiteLog:
    """A contributed log.

    - ``place``: the path of the log in results/.
    - ``what``: the kind of run, the operation and the dtypes, in words.
    - ``card``: the hash of the identifier of the card, None if the log does not identify it.
    - ``info``: the device in the header of the log; empty for a log of mamf-finder.
    """

    place: Path
    tier: str
    device: str
    what: str
    started: str
    software: Mapping[str, str]
    vendor: str
    card: str | None
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SiteCeiling(Rate):
    """The highest rate of a device for a dtype and a regime, among the logs of one tier.

    - ``place``: the path of the log in results/.
    - ``peak``: the peak of the datasheet, None if it is unknown.
    - ``entry``: the rate with the header of its log; None for a figure of mamf-finder.
    - ``cards``: the highest rate of each card of the device, the fastest card first.
    """

    regime: str
    vendor: str
    place: Path
    software: Mapping[str, str]
    peak: DatasheetRate | None
    entry: ResultRate | None = None
    cards: Sequence[ResultRate] = ()

    @property
    def share(self) -> float | None:
        """The rate as a share of the dense peak of the datasheet, or None if that peak is unknown."""
        return self.rate / self.peak.rate if self.peak else None


@dataclass(frozen=True)
class SiteData:
    """The data that the site, or the page of one device, shows.

    - ``runs``: all logs.
    - ``lines``: the ceilings.
    - ``attention``, ``kernels``: confirmed rows of complete logs, of attention and of other operations.
    - ``unconfirmed``: rows of all operations that only one contributor measured.
    """

    runs: Sequence[SiteLog] = ()
    lines: Sequence[SiteCeiling] = ()
    attention: Sequence[ResultRate] = ()
    kernels: Sequence[ResultRate] = ()
    unconfirmed: Sequence[ResultRate] = ()

    @property
    def by_dtype(self) -> dict[str, list[SiteCeiling]]:
        """The ceilings by dtype, with the dtypes that most cards measured first. If a dtype has ceilings of tier
        complete, its ceilings of other tiers are left out.
        """
        groups = group_pairs((line.dtype, line) for line in self.lines if line.entry)
        kept = [(dtype, [line for line in each if line.tier == COMPLETE] or each) for dtype, each in groups.items()]
        return dict(sorted(kept, key=lambda pair: (-sum(len(line.cards) for line in pair[1]), pair[0])))

    def split_by_device(self) -> dict[str, SiteData]:
        """Return a SiteData for each device that has a log, by the name of the device."""
        kinds = ("runs", "lines", "attention", "kernels", "unconfirmed")
        parts = {kind: group_pairs((item.device, item) for item in getattr(self, kind)) for kind in kinds}
        return {
            device: SiteData(**{kind: part.get(device, ()) for kind, part in parts.items()})
            for device in sorted(parts["runs"])
        }


def read_site_data(root: Path) -> SiteData:
    """Read all logs in the folder ``root``, which has a folder for each accelerator. Raises RunLogError for an
    unreadable log.
    """
    runs: list[SiteLog] = []
    entries: list[ResultRate] = []
    finders: list[tuple[SiteLog, FinderRun]] = []
    for path in sorted(root.glob("*/*.jsonl")):
        place, log = path.relative_to(root), read_legacy_or_none(path) or read_run_log(path)
        if isinstance(log, FinderRun):
            what = f"mamf-finder {log.version or 'of unknown version'}, {log.dtype or 'dtype unknown'}"
            of = (log.device or UNKNOWN_NAME, what, log.started or "", log.software, UNKNOWN_NAME)
            run = SiteLog(place, LEGACY, *of, card=None, info={})
            finders.append((run, log))
        else:
            run = _describe_log(log, place)
            entries += collect_rates(log, place)
        runs.append(run)
    vendors = {run.device: run.vendor for run in runs if run.info}
    runs = [replace(run, vendor=vendors.get(run.device, UNKNOWN_NAME)) for run in runs]
    data = _make_site_data(entries, read_submitters(root))
    lines = [*data.lines, *_make_legacy_ceilings(finders, vendors)]
    order = {name: place for names in (ALL_TIERS, data.by_dtype, REGIME_NAMES) for place, name in enumerate(names)}
    lines.sort(key=lambda line: (*(order.get(each, 99) for each in (line.tier, line.dtype, line.regime)), -line.tflops))
    return replace(data, runs=runs, lines=lines)


def _describe_log(log: RunLog, place: Path) -> SiteLog:
    header, plan, device = log.header, log.plan, log.header["device"]
    dtypes = dict.fromkeys(str(getattr(each, "dtype", "")) for each in plan.problems if each)
    what = ", ".join([make_run_title(plan).partition(" ")[2].removesuffix(" of matmul"), *filter(None, dtypes)])
    return SiteLog(
        *(place, log.tier, device["name"], what, header["started"], list_software_versions(header)),
        *(device["vendor"] or UNKNOWN_NAME, device["uuid_hash"], device),
    )


def _make_site_data(entries: Sequence[ResultRate], submitters: Submitters) -> SiteData:
    parts = [split_confirmed((each for each in entries if each.table == table), submitters) for table in TABLES]
    complete = [[entry for entry in confirmed if entry.tier == COMPLETE] for confirmed, _ in parts]
    tiers = {
        COMPLETE: complete[0],
        UNCONFIRMED_TIER: parts[0][1],
        INTERRUPTED: [entry for entry in parts[0][0] if entry.tier == INTERRUPTED],
    }
    return SiteData(
        lines=[_make_site_ceiling(tier, *leader) for tier, each in tiers.items() for leader in find_best_rates(each)],
        attention=complete[1],
        kernels=complete[2],
        unconfirmed=[each for _, doubted in parts for each in doubted],
    )


def _make_site_ceiling(tier: str, best: ResultRate, alike: Sequence[ResultRate]) -> SiteCeiling:
    """Return the ceiling of a device, dtype and regime. ``best``: the highest rate. ``alike``: all rates of this
    device, dtype and regime, from which the highest rate of each card is selected.

    All logs that do not identify their card count as one card.
    """
    ordered = sorted(alike, key=lambda entry: (-entry.tflops, entry.place))
    cards = group_pairs((str(entry.uuid_hash), entry) for entry in ordered)
    return SiteCeiling(
        rate=best.rate,
        interval=best.interval,
        dtype=best.dtype,
        regime=best.regime,
        device=best.device,
        source=best.source,
        tier=tier,
        place=best.place,
        vendor=best.header["device"]["vendor"] or UNKNOWN_NAME,
        software=list_software_versions(best.header),
        peak=best.datasheet_peak,
        entry=best,
        cards=[each[0] for each in cards.values()],
    )


def _make_legacy_ceilings(
    finders: Iterable[tuple[SiteLog, FinderRun]], vendors: Mapping[str, str]
) -> list[SiteCeiling]:
    """Return the highest figure that mamf-finder printed for each device, dtype and statistic. The name of the
    statistic takes the place of the regime.
    """
    best_lines: dict[tuple[str, str, str], SiteCeiling] = {}
    figures = ((run, log, name, best.tflops[name]) for run, log in finders for name, best in log.best.items())
    for run, log, name, tflops in sorted(figures, key=lambda each: -each[3]):
        line = SiteCeiling(
            rate=tflops,
            dtype=log.dtype or UNKNOWN_NAME,
            regime=f"mamf-finder's {name}",
            device=run.device,
            source="contributed",
            tier=LEGACY,
            place=run.place,
            vendor=vendors.get(run.device, UNKNOWN_NAME),
            software=run.software,
            peak=find_peak(run.device, log.dtype) if log.dtype in DTYPES else None,
        )
        best_lines.setdefault((line.device, line.dtype, line.regime), line)
    return list(best_lines.values())
