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
    split_by_confirmation,
)
from mamf.contribution.rules import LOG_TIERS
from mamf.dtypes import DTYPES
from mamf.kinds.registry import make_run_title
from mamf.logs.legacy import FinderRun, read_legacy_log_or_none
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Rate, group_pairs
from mamf.peaks import DatasheetRate, find_datasheet_rate
from mamf.plans import REGIME_NAMES

COMPLETE_TIER, INTERRUPTED_TIER, LEGACY_TIER = LOG_TIERS
#: The tier of rates from complete runs that only one contributor, and no maintainer, has measured.
UNCONFIRMED_TIER = "unconfirmed"
ALL_TIERS = (COMPLETE_TIER, UNCONFIRMED_TIER, INTERRUPTED_TIER, LEGACY_TIER)
UNKNOWN_NAME = "unknown"


@dataclass(frozen=True)
class SiteLog:
    """A contributed log.

    - ``path``: the path of the log in results/.
    - ``description``: the kind of run, the operation and the dtypes, in words.
    - ``card_hash``: the hash of the identifier of the card, None if the log does not identify it.
    - ``device_info``: the device in the header of the log; empty for a log of mamf-finder.
    """

    path: Path
    tier: str
    device: str
    description: str
    start_time: str
    software: Mapping[str, str]
    vendor: str
    card_hash: str | None
    device_info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SiteCeiling(Rate):
    """The highest rate of a device for a dtype and a regime, among the logs of one tier.

    - ``log_path``: the path of the log in results/.
    - ``datasheet_rate``: the dense peak that the datasheet states, None if it is unknown.
    - ``best_rate``: the rate with the row that it comes from and the header of the log; None for a figure of
      mamf-finder.
    - ``card_rates``: the highest rate of each card of the device, the fastest card first.
    """

    regime: str
    vendor: str
    log_path: Path
    software: Mapping[str, str]
    datasheet_rate: DatasheetRate | None
    best_rate: ResultRate | None = None
    card_rates: Sequence[ResultRate] = ()

    @property
    def peak_share(self) -> float | None:
        """The rate as a share of the dense peak of the datasheet, or None if that peak is unknown."""
        return self.rate / self.datasheet_rate.rate if self.datasheet_rate else None


@dataclass(frozen=True)
class SiteData:
    """The data that the site, or the page of one device, shows.

    - ``logs``: all logs.
    - ``ceilings``: the ceilings.
    - ``attention_rates``: confirmed rates of attention from complete logs.
    - ``kernel_rates``: confirmed rates of all operations except matmul and attention, from complete logs.
    - ``unconfirmed_rates``: rates of all operations that only one contributor measured.
    """

    logs: Sequence[SiteLog] = ()
    ceilings: Sequence[SiteCeiling] = ()
    attention_rates: Sequence[ResultRate] = ()
    kernel_rates: Sequence[ResultRate] = ()
    unconfirmed_rates: Sequence[ResultRate] = ()

    @property
    def ceilings_by_dtype(self) -> dict[str, list[SiteCeiling]]:
        """The ceilings by dtype. Dtypes that were measured on more cards come first. If a dtype has ceilings of the
        tier ``complete``, its ceilings of other tiers are left out.
        """
        groups = group_pairs((ceiling.dtype, ceiling) for ceiling in self.ceilings if ceiling.best_rate)
        by_dtype = [
            (dtype, [each for each in group if each.tier == COMPLETE_TIER] or group) for dtype, group in groups.items()
        ]
        return dict(sorted(by_dtype, key=lambda pair: (-sum(len(each.card_rates) for each in pair[1]), pair[0])))

    def split_by_device(self) -> dict[str, SiteData]:
        """Return a SiteData for each device that has a log, by the name of the device."""
        names = ("logs", "ceilings", "attention_rates", "kernel_rates", "unconfirmed_rates")
        by_field = {name: group_pairs((item.device, item) for item in getattr(self, name)) for name in names}
        return {
            device: SiteData(**{name: by_device.get(device, ()) for name, by_device in by_field.items()})
            for device in sorted(by_field["logs"])
        }


def read_site_data(root: Path) -> SiteData:
    """Read all logs in the folder ``root``, which has a folder for each accelerator. Raises RunLogError for an
    unreadable log.
    """
    site_logs: list[SiteLog] = []
    rates: list[ResultRate] = []
    finder_logs: list[tuple[SiteLog, FinderRun]] = []
    for file in sorted(root.glob("*/*.jsonl")):
        path, log = file.relative_to(root), read_legacy_log_or_none(file) or read_run_log(file)
        if isinstance(log, FinderRun):
            description = f"mamf-finder {log.version or 'of unknown version'}, {log.dtype or 'dtype unknown'}"
            values = (log.device or UNKNOWN_NAME, description, log.started or "", log.software, UNKNOWN_NAME)
            site_log = SiteLog(path, LEGACY_TIER, *values, card_hash=None, device_info={})
            finder_logs.append((site_log, log))
        else:
            site_log = _make_site_log(log, path)
            rates += collect_rates(log, path)
        site_logs.append(site_log)
    vendors = {each.device: each.vendor for each in site_logs if each.device_info}
    site_logs = [replace(each, vendor=vendors.get(each.device, UNKNOWN_NAME)) for each in site_logs]
    data = _make_site_data(rates, read_submitters(root))
    ceilings = [*data.ceilings, *_make_legacy_ceilings(finder_logs, vendors)]
    order = {
        name: position
        for names in (ALL_TIERS, data.ceilings_by_dtype, REGIME_NAMES)
        for position, name in enumerate(names)
    }
    ceilings.sort(
        key=lambda each: (*(order.get(name, 99) for name in (each.tier, each.dtype, each.regime)), -each.tflops)
    )
    return replace(data, logs=site_logs, ceilings=ceilings)


def _make_site_log(log: RunLog, path: Path) -> SiteLog:
    header, plan, device = log.header, log.plan, log.header["device"]
    dtypes = dict.fromkeys(str(getattr(each, "dtype", "")) for each in plan.problems if each)
    description = ", ".join([make_run_title(plan).partition(" ")[2].removesuffix(" of matmul"), *filter(None, dtypes)])
    return SiteLog(
        *(path, log.tier, device["name"], description, header["started"], list_software_versions(header)),
        *(device["vendor"] or UNKNOWN_NAME, device["uuid_hash"], device),
    )


def _make_site_data(rates: Sequence[ResultRate], submitters: Submitters) -> SiteData:
    parts = [split_by_confirmation((rate for rate in rates if rate.table_name == name), submitters) for name in TABLES]
    complete = [[rate for rate in confirmed if rate.tier == COMPLETE_TIER] for confirmed, _ in parts]
    matmuls_by_tier = {
        COMPLETE_TIER: complete[0],
        UNCONFIRMED_TIER: parts[0][1],
        INTERRUPTED_TIER: [rate for rate in parts[0][0] if rate.tier == INTERRUPTED_TIER],
    }
    return SiteData(
        ceilings=[
            _make_site_ceiling(tier, *best_and_all)
            for tier, matmuls in matmuls_by_tier.items()
            for best_and_all in find_best_rates(matmuls)
        ],
        attention_rates=complete[1],
        kernel_rates=complete[2],
        unconfirmed_rates=[rate for _, unconfirmed in parts for rate in unconfirmed],
    )


def _make_site_ceiling(tier: str, best: ResultRate, rates: Sequence[ResultRate]) -> SiteCeiling:
    """Return the ceiling of a device, dtype and regime, with the highest rate of each card. All logs that do not
    identify their card count as one card.

    - ``best``: the highest rate of this device, dtype and regime.
    - ``rates``: all rates of this device, dtype and regime.
    """
    rates_by_card = group_pairs(
        (str(rate.uuid_hash), rate) for rate in sorted(rates, key=lambda rate: (-rate.tflops, rate.log_path))
    )
    return SiteCeiling(
        rate=best.rate,
        interval=best.interval,
        dtype=best.dtype,
        regime=best.regime,
        device=best.device,
        source=best.source,
        tier=tier,
        log_path=best.log_path,
        vendor=best.header["device"]["vendor"] or UNKNOWN_NAME,
        software=list_software_versions(best.header),
        datasheet_rate=best.datasheet_peak,
        best_rate=best,
        card_rates=[of_card[0] for of_card in rates_by_card.values()],
    )


def _make_legacy_ceilings(
    finder_logs: Iterable[tuple[SiteLog, FinderRun]], vendors: Mapping[str, str]
) -> list[SiteCeiling]:
    """Return the highest figure that mamf-finder printed for each device, dtype and statistic, such as the median.

    The field ``regime`` of such a ceiling contains the name of the statistic.
    """
    best_ceilings: dict[tuple[str, str, str], SiteCeiling] = {}
    figures = (
        (site_log, log, name, best.tflops[name]) for site_log, log in finder_logs for name, best in log.best.items()
    )
    for site_log, log, name, tflops in sorted(figures, key=lambda each: -each[3]):
        ceiling = SiteCeiling(
            rate=tflops,
            dtype=log.dtype or UNKNOWN_NAME,
            regime=f"mamf-finder's {name}",
            device=site_log.device,
            source="contributed",
            tier=LEGACY_TIER,
            log_path=site_log.path,
            vendor=vendors.get(site_log.device, UNKNOWN_NAME),
            software=site_log.software,
            datasheet_rate=find_datasheet_rate(site_log.device, log.dtype) if log.dtype in DTYPES else None,
        )
        best_ceilings.setdefault((ceiling.device, ceiling.dtype, ceiling.regime), ceiling)
    return list(best_ceilings.values())
