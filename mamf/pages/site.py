"""Build the static site of the contributed logs in results/: pages for people, and index.json and ceilings.csv for
programs.

docs/site.md describes the fields of index.json and ceilings.csv. The same logs always give the same bytes. A file in
the folder of the site lists the files of the build, so that the next build replaces or deletes only these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.collection import (
    ResultRate,
    format_kernel_title,
    select_attention_rates,
    select_best_rate_per_problem,
)
from mamf.contribution.review import make_folder_name
from mamf.contribution.tables import make_attention_columns, make_kernel_columns, make_rate_columns, make_text_column
from mamf.errors import UsageError
from mamf.files import make_folder, write_file_atomically
from mamf.logs.records import round_to_six_digits
from mamf.measurement import ItemT, group_pairs
from mamf.pages.site_data import COMPLETE_TIER, SiteCeiling, SiteData, SiteLog, read_site_data
from mamf.plans import CEILING_REGIMES
from mamf.report.charts.bars import RangeChart, RangePoint, RangeRow
from mamf.report.document import (
    Column,
    Lines,
    Table,
    format_count,
    format_csv,
    format_four_digits,
    format_interval,
    format_percent,
    format_whole_number,
    shorten_line,
)
from mamf.report.page import CopyableCommand, Fact, Page, PagePart, Section, render_page
from mamf.text import Link

#: Name of the file that lists the files of the site, one per line. It is in the folder of the site.
FILE_LIST_NAME = ".mamf-site"
_DEVICES_FOLDER = "devices"
_MAX_NAME_CHARACTERS = 80
INDEX_PAGE_NAME, CSV_FILE_NAME, INDEX_JSON_NAME = "index.html", "ceilings.csv", "index.json"


def build_site(root: Path, output: Path, logs_address: str | None = None) -> SiteData:
    """Write the site of the results folder ``root`` to the folder ``output``, and return the data of the site. Delete
    files of an earlier build that the new site does not have.

    ``logs_address``: the address of the folder with the logs, for links; by default the relative path from ``output``
    to ``root``.

    Raises UsageError if ``output`` is inside ``root`` or contains files that no build wrote, RunLogError for an
    unreadable log, and RunLogWriteError if the disk is full.
    """
    if root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UsageError(f"{output} is inside {root}, which is only for logs: choose another folder")
    address, old_files = _make_logs_address(logs_address, root, output), _list_built_files(output)
    data = read_site_data(root)
    _write_files(output, dict(_render_files(data, address)), old_files)
    return data


def _make_logs_address(address: str | None, root: Path, output: Path) -> str:
    """Return the address of the folder with the logs, with a slash at the end: ``address``, or the relative path from
    ``output`` to ``root`` if ``address`` is None.
    """
    if address is None:
        try:
            return quote(Path(os.path.relpath(root.resolve(), output.resolve())).as_posix()) + "/"
        except ValueError:  # Windows has no relative path to another drive
            raise UsageError(
                f"{output} and {root} are on different drives: give the URL of the logs with --logs"
            ) from None
    if not address.lower().startswith(("https://", "http://")):
        raise UsageError(f"--logs {address} must begin with https:// or http://")
    return address.rstrip("/") + "/"


def _list_built_files(output: Path) -> set[str]:
    """Return the files in the folder ``output`` that an earlier build wrote. Raises UsageError if the folder contains
    files that no build wrote. Ignore files and folders whose name begins with a dot, such as .git.
    """
    listed = (
        (output / FILE_LIST_NAME).read_text(errors="replace").splitlines()
        if (output / FILE_LIST_NAME).is_file()
        else []
    )
    names = {path.relative_to(output) for path in output.rglob("*") if path.is_symlink() or not path.is_dir()}
    present = {name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)}
    foreign = sorted(name for name in present if name not in listed or (output / name).is_symlink())
    if foreign:
        raise UsageError(
            f"{output} has files that 'mamf results site' did not write, such as {foreign[0]}: choose an empty folder"
        )
    return present


def _render_files(data: SiteData, logs_address: str) -> Iterator[tuple[str, str]]:
    pages = {
        name: f"{_DEVICES_FOLDER}/{file}"
        for name, file in choose_page_names(site_log.device for site_log in data.logs).items()
    }
    device_page_logs_address = logs_address if "://" in logs_address else f"../{logs_address}"
    for name, part in data.split_by_device().items():
        yield pages[name], render_page(make_device_page(name, part, device_page_logs_address))
    rows = [make_index_entry(ceiling) for ceiling in data.ceilings]
    texts = (", ".join(map(" ".join, ceiling.software.items())) for ceiling in data.ceilings)
    yield CSV_FILE_NAME, format_csv([row | {"software": text} for row, text in zip(rows, texts, strict=True)])
    listed = ",".join(f"\n{json.dumps(row, allow_nan=False)}" for row in rows)
    title = "Measured matmul ceilings by device, dtype and regime"
    yield INDEX_JSON_NAME, f'{{"schema": {INDEX_SCHEMA_VERSION}, "title": "{title}", "ceilings": [{listed}\n]}}\n'
    yield INDEX_PAGE_NAME, render_page(make_index_page(data, logs_address, pages))


def choose_page_names(devices: Iterable[str]) -> dict[str, str]:
    """Return a file name for the page of each device. Every file system accepts these names.

    Replace special characters in the name of the device. If the result is long, or the same for two devices, append a
    hash of the name of the device.
    """
    slugs = {name: make_folder_name(name) for name in sorted(set(devices))}
    unique = {
        slug for slug in slugs.values() if list(slugs.values()).count(slug) == 1 and len(slug) < _MAX_NAME_CHARACTERS
    }

    digests = {name: hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8] for name in slugs}
    return {
        name: f"{slug}.html" if slug in unique else f"{slug[:_MAX_NAME_CHARACTERS]}-{digests[name]}.html"
        for name, slug in slugs.items()
    }


def _write_files(output: Path, texts_by_file: Mapping[str, str], old_files: set[str]) -> None:
    make_folder(output / _DEVICES_FOLDER)
    # Write the list of files first. If this build is interrupted, the next build can delete the files of this build.
    write_file_atomically(output / FILE_LIST_NAME, "\n".join(sorted(old_files | set(texts_by_file))))
    for name, text in texts_by_file.items():
        write_file_atomically(output / name, text)
    for name in old_files - set(texts_by_file):
        (output / name).unlink()
    write_file_atomically(output / FILE_LIST_NAME, "\n".join(sorted(texts_by_file)))


# -- entries of index.json, for programs -------------------------------------------------------------------------------


#: Version of the format of index.json. Increase it to remove, rename or redefine a field, but not to add one.
INDEX_SCHEMA_VERSION = 1


def make_index_entry(ceiling: SiteCeiling) -> dict[str, Any]:
    """Return the entry of a ceiling in index.json."""
    device = ceiling.best_rate.header["device"] if ceiling.best_rate else {}
    low, high = (ceiling.interval.low, ceiling.interval.high) if ceiling.interval else (None, None)
    return {
        "device": ceiling.device,
        "vendor": ceiling.vendor,
        "dtype": ceiling.dtype,
        "regime": ceiling.regime,
        "tflops": round_to_six_digits(ceiling.tflops),
        "low": low and round_to_six_digits(low),
        "high": high and round_to_six_digits(high),
        "datasheet_tflops": ceiling.datasheet_rate and round_to_six_digits(ceiling.datasheet_rate.rate),
        "tier": ceiling.tier,
        "cards": len(ceiling.card_rates),
        "lowest_tflops": round_to_six_digits(ceiling.card_rates[-1].tflops) if ceiling.card_rates else None,
        "compute_units": device.get("compute_units"),
        "power_limit_watts": device.get("power_limit_watts"),
        "source": ceiling.log_path.as_posix(),
        "software": dict(ceiling.software),
    }


_MAX_HEADLINE_FIGURES = 4
#: The maximum number of devices per picture, of points per row, and of points per picture, to keep pages small.
MAX_CHART_ROWS, _MAX_ROW_POINTS, _MAX_PICTURE_POINTS = 30, 30, 600
#: Explanations of the terms that the tables of the site use.
_WORD_EXPLANATIONS = (
    "burst: the rate of a rested card in short bursts (MAMF). sustained: the rate at the power limit, as in training "
    "(MSMF). classic: the rate in the loop of mamf-finder.",
    "% of peak: share of the datasheet's dense peak. interval: 95 % of repeated measurements are inside it. cards: "
    "number of cards of the model that were measured. over cards: range of the best rates of these cards. It can be "
    "wide if some cards were measured without the best kernel.",
    "tier complete: a maintainer or two contributors measured it, and every result was checked.",
    "tier unconfirmed: one contributor measured it.",
    "tier interrupted: the run ended early and may have missed the best shape.",
    "tier legacy: figures that mamf-finder printed. It did not check its results.",
    "Figures of different tiers cannot be compared.",
)
#: Parts of the section that asks readers for a log of their device.
_CONTRIBUTION_PARTS: Sequence[PagePart] = (
    Lines(["Measure both ceilings, which takes a minute, then open a pull request with the log:"]),
    CopyableCommand("mamf find --dtype bfloat16"),
    CopyableCommand("mamf results submit LOG"),
)


def make_index_page(data: SiteData, logs_address: str, pages: Mapping[str, str]) -> Page:
    """Return the front page of the site. ``logs_address``: the address of the folder with the logs. ``pages``: the
    address of the page of each device.
    """
    charts = [_make_ceilings_chart(dtype, ceilings) for dtype, ceilings in data.ceilings_by_dtype.items()]
    leading = next(iter(data.ceilings_by_dtype.values()), [])
    fastest = [ceiling for ceiling in leading if ceiling.regime == "sustained"] or leading
    logs_by_device = group_pairs((site_log.device, site_log) for site_log in data.logs)
    cards = sum(map(count_cards, logs_by_device.values()))
    counts = (
        f"{format_count(len(logs_by_device), 'device')}, {format_count(cards, 'card')}, "
        f"{format_count(len(data.logs), 'log')}."
    )
    columns: list[Column[SiteCeiling]] = [
        Column(
            "",
            "device",
            lambda ceiling: Link(format_device_name(ceiling.device), pages[ceiling.device]),
            is_left_aligned=True,
        ),
        *_make_shared_ceiling_columns(),
        make_text_column("vendor", lambda ceiling: ceiling.vendor),
        _make_log_column(logs_address),
    ]
    device_columns: list[Column[str]] = [
        Column("", "device", lambda name: Link(format_device_name(name), pages[name]), is_left_aligned=True),
        Column("", "cards", lambda name: count_cards(logs_by_device[name])),
        Column("", "logs", lambda name: len(logs_by_device[name])),
        Column(
            "",
            "last log",
            lambda name: max(site_log.start_time[:10] for site_log in logs_by_device[name]),
            is_left_aligned=True,
        ),
    ]
    return Page(
        "Measured matmul ceilings of accelerators",
        ["The highest matmul rates that devices reach, each with its 95 % repeat interval and its log.", counts]
        if logs_by_device
        else ["Nobody has contributed a log yet. Yours can be the first: see below."],
        [
            _make_ceiling_fact(each, format_device_name(each.device), f"{each.dtype}, {each.regime}")
            for each in fastest[:_MAX_HEADLINE_FIGURES]
        ],
        sections=[
            Section("Ceilings", charts[:1]),
            Section(f"Ceilings of {format_count(len(charts) - 1, 'more dtype')}", charts[1:], is_open=False),
            Section("All ceilings", _make_table_unless_empty(columns, data.ceilings)),
            Section("What the words mean", [Lines(_WORD_EXPLANATIONS)] if data.ceilings else []),
            Section("Devices", _make_table_unless_empty(device_columns, sorted(logs_by_device))),
            Section("Add your accelerator", _CONTRIBUTION_PARTS),
        ],
        links=[("As CSV", CSV_FILE_NAME), ("As JSON", INDEX_JSON_NAME)],
    )


def make_device_page(name: str, data: SiteData, logs_address: str) -> Page:
    """Return the page of one device. ``data``: the data of this device. ``logs_address``: the address of the folder
    with the logs, as seen from the folder of the device pages.
    """
    best = [ceiling for ceiling in data.ceilings if ceiling.tier == data.ceilings[0].tier]
    best = [ceiling for ceiling in best if ceiling.regime in CEILING_REGIMES] or best
    several = [ceiling for ceiling in data.ceilings if ceiling.tier == COMPLETE_TIER and len(ceiling.card_rates) > 1]
    leading = [ceiling for ceiling in several if ceiling.dtype == several[0].dtype]
    others = [ceiling for ceiling in several if ceiling not in leading]
    log, attention = _make_log_column(logs_address), select_attention_rates(data.attention_rates, per_kernel=True)
    operation_column: Column[ResultRate] = make_text_column("operation", lambda rate: rate.row.operation)
    kernels = _make_table_unless_empty(
        [operation_column, *make_kernel_columns(), log], select_best_rate_per_problem(data.kernel_rates)
    )
    ceiling_columns: list[Column[SiteCeiling]] = [
        *_make_shared_ceiling_columns(),
        Column("", "W", lambda ceiling: ceiling.best_rate and ceiling.best_rate.conditions.watts, format_whole_number),
        Column("", "J/TFLOP", _format_joules_per_tflop),
        Column(
            "", "datasheet", lambda ceiling: ceiling.datasheet_rate and ceiling.datasheet_rate.rate, "{:.4g}".format
        ),
        Column("", "MxNxK", lambda ceiling: ceiling.best_rate and ceiling.best_rate.row.shape),
        make_text_column("kernel", lambda ceiling: ceiling.best_rate and format_kernel_title(ceiling.best_rate)),
        make_text_column(
            "by", lambda ceiling: ceiling.best_rate and ("find" if ceiling.best_rate.ceiling else "sweep")
        ),
        log,
    ]
    log_columns: list[Column[SiteLog]] = [
        make_text_column("date", lambda site_log: site_log.start_time[:10] or None),
        make_text_column("what", lambda site_log: site_log.description),
        make_text_column("card", lambda site_log: site_log.card_hash),
        make_text_column("tier", lambda site_log: site_log.tier),
        make_text_column("software", lambda site_log: ", ".join(map(" ".join, site_log.software.items()))),
        Column(
            "",
            "log",
            lambda site_log: _make_log_link(logs_address, site_log.path, site_log.path.name),
            is_left_aligned=True,
        ),
    ]
    newest_first = sorted(data.logs, key=lambda site_log: (site_log.start_time, site_log.path), reverse=True)
    unconfirmed = "Not ranked until a second contributor measures the same"
    return Page(
        format_device_name(name),
        [_describe_device(data)],
        [_make_ceiling_fact(ceiling, f"{ceiling.dtype}, {ceiling.regime}") for ceiling in best[:_MAX_HEADLINE_FIGURES]],
        sections=[
            Section("Ceilings", _make_table_unless_empty(ceiling_columns, data.ceilings)),
            Section("Cards side by side", [_make_cards_chart(ceiling) for ceiling in leading]),
            Section("Cards in other dtypes", [_make_cards_chart(ceiling) for ceiling in others], is_open=False),
            Section("Attention kernels", _make_table_unless_empty([*make_attention_columns(), log], attention)),
            Section("Other operations", kernels, is_open=False),
            Section(
                "Unconfirmed figures",
                _make_table_unless_empty([*make_rate_columns(), log], data.unconfirmed_rates, unconfirmed),
                False,
            ),
            Section("Logs", _make_table_unless_empty(log_columns, newest_first)),
        ],
        links=[("All devices", f"../{INDEX_PAGE_NAME}")],
    )


def format_device_name(name: str) -> str:
    return name.strip() or "unnamed device"


def count_cards(logs: Iterable[SiteLog]) -> int:
    """Return the number of different cards in the logs of one device. Logs that do not identify their card are ignored,
    but if no log identifies its card, the result is 1.
    """
    return len({each.card_hash for each in logs if each.card_hash}) or 1


def _describe_device(data: SiteData) -> str:
    units_and_watts = {
        (site_log.device_info["compute_units"], site_log.device_info["power_limit_watts"]): 1
        for site_log in data.logs
        if site_log.device_info
    }
    builds = [
        f"{units} compute units" + (f", {watts:.0f} W limit" if watts else "")
        for units, watts in units_and_watts
        if units
    ]
    parts = [data.logs[0].vendor, " or ".join(builds), format_count(len(data.logs), "log")]
    return f"{'. '.join(filter(None, parts))} of {format_count(count_cards(data.logs), 'card')}."


def _make_ceiling_fact(ceiling: SiteCeiling, label: str, *notes: str) -> Fact:
    """Return a ceiling as a headline figure, with notes on its interval, its share of the datasheet peak, the range of
    rates across cards, and the energy per FLOP.
    """
    all_notes = [
        *notes,
        f"tier {ceiling.tier}" if ceiling.tier != COMPLETE_TIER else "",
        f"{format_interval(ceiling.interval)} (95 % repeat interval)" if ceiling.interval else "",
        f"{format_percent(ceiling.peak_share)} % of the datasheet's {ceiling.datasheet_rate.rate:.4g}"
        if ceiling.datasheet_rate and ceiling.peak_share
        else "",
        f"{len(ceiling.card_rates)} cards: {_format_rate_range(ceiling)}" if len(ceiling.card_rates) > 1 else "",
        f"{_format_joules_per_tflop(ceiling)} J/TFLOP" if _format_joules_per_tflop(ceiling) else "",
    ]
    return Fact(label, format_four_digits(ceiling.tflops), "TFLOPS", [note for note in all_notes if note])


def _format_joules_per_tflop(ceiling: SiteCeiling) -> str | None:
    """Format the joules per 1e12 FLOP of a ceiling. Return None for a rate that is not sustained, or if the power is
    unknown.
    """
    return f"{joules:#.3g}" if ceiling.best_rate and (joules := ceiling.best_rate.joules_per_tflop) else None


def _format_rate_range(ceiling: SiteCeiling) -> str | None:
    rates = [format_four_digits(rate.tflops) for rate in ceiling.card_rates]
    return f"{rates[-1]} to {rates[0]}" if len(rates) > 1 else None


# -- tables of the site ------------------------------------------------------------------------------------------------


def _make_table_unless_empty(columns: Sequence[Column[Any]], rows: Sequence[Any], title: str = "") -> list[Table[Any]]:
    """Return a list with one table, or an empty list if there are no rows, so that the page omits an empty section."""
    return [Table(columns, rows, title)] if rows else []


def _make_log_column(logs_address: str) -> Column[Any]:
    """Return a column with links to the log of each row. ``logs_address``: the address of the folder with the logs,
    which ends with a slash.
    """
    return Column("", "log", lambda row: _make_log_link(logs_address, row.log_path))


def _make_log_link(logs_address: str, path: Path, text: str = "log") -> Link:
    return Link(text, logs_address + quote(path.as_posix()))


def _make_shared_ceiling_columns() -> list[Column[SiteCeiling]]:
    """Return the columns that every table of ceilings has, such as the rate and its interval."""
    return [
        Column("", "TFLOPS", lambda ceiling: ceiling.tflops, format_four_digits),
        make_text_column("dtype", lambda ceiling: ceiling.dtype),
        make_text_column("regime", lambda ceiling: ceiling.regime),
        Column("", "% of peak", lambda ceiling: ceiling.peak_share, format_percent),
        Column("", "interval", lambda ceiling: ceiling.interval, format_interval),
        Column("", "cards", lambda ceiling: len(ceiling.card_rates) or None),
        Column("", "over cards", _format_rate_range),
        make_text_column("tier", lambda ceiling: ceiling.tier),
    ]


# -- pictures of the site ----------------------------------------------------------------------------------------------


def _make_ceilings_chart(dtype: str, ceilings: Sequence[SiteCeiling]) -> RangeChart:
    devices = list(group_pairs((ceiling.device, ceiling) for ceiling in ceilings).values())
    shown = [ceiling for of_device in devices[:MAX_CHART_ROWS] for ceiling in of_device]
    max_points = max(3, min(_MAX_ROW_POINTS, _MAX_PICTURE_POINTS // len(shown)))
    rows = [
        RangeRow(
            shorten_line(format_device_name(ceiling.device)),
            ceiling.regime if ceiling.tier == COMPLETE_TIER else f"{ceiling.regime}, {ceiling.tier}",
            tuple(_make_card_point(rate) for rate in choose_evenly_spaced_items(ceiling.card_rates, max_points)),
            ceiling.datasheet_rate.rate if ceiling.datasheet_rate else None,
        )
        for ceiling in shown
    ]
    subtitle = "One point per card, with its 95 % repeat interval. The dashed tick is the datasheet's dense peak."
    more = f"{format_count(len(devices) - MAX_CHART_ROWS, 'more device')} in the table"
    return RangeChart(dtype, subtitle, "TFLOPS", tuple(rows), notes=(more,) if len(devices) > MAX_CHART_ROWS else ())


def _make_cards_chart(ceiling: SiteCeiling) -> RangeChart:
    rows = [
        RangeRow("", _format_card_name(each), (_make_card_point(each),), None, ceiling.regime)
        for each in choose_evenly_spaced_items(ceiling.card_rates, MAX_CHART_ROWS)
    ]
    gain = format_percent(ceiling.card_rates[0].tflops / ceiling.card_rates[-1].tflops - 1)
    return RangeChart(
        f"{ceiling.dtype}, {ceiling.regime}",
        f"The fastest of {len(ceiling.card_rates)} cards is {gain} % above the slowest.",
        "TFLOPS",
        tuple(rows),
    )


def _format_card_name(rate: ResultRate) -> str:
    return f"card {rate.uuid_hash or 'unknown'}"


def _make_card_point(rate: ResultRate) -> RangePoint:
    interval = rate.interval if rate.interval and rate.interval.is_known else None
    low, high = (interval.low, interval.high) if interval else (rate.tflops, rate.tflops)
    return RangePoint(rate.tflops, low, high, f"{_format_card_name(rate)}, {rate.date[:10]}")


def choose_evenly_spaced_items(items: Sequence[ItemT], count: int) -> list[ItemT]:
    """Return at most ``count`` of the items, evenly spaced, including the first and the last. ``count``: at least 2."""
    step = (len(items) - 1) / (count - 1)
    return list(items) if len(items) <= count else [items[round(place * step)] for place in range(count)]
