"""The page of a device on the site of results/: its ceilings, cards, software, attention kernels and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.contribution.collection import AttentionEntry, CeilingEntry, best_attention, best_kernels
from mamf.contribution.confirming import Entry, shortened
from mamf.contribution.tables import mask_name
from mamf.measurement import TERA
from mamf.pages.site_charts import attention_charts, attention_problem, card_name, cards_chart, history_chart
from mamf.pages.site_data import COMPLETE, CeilingLine, SiteData, ceiling_lines
from mamf.pages.site_index import (
    INDEX,
    Addresses,
    count_cards,
    device_title,
    fact_of,
    figure_columns,
    joules,
    range_over_cards,
)
from mamf.regime_names import CEILINGS
from mamf.report.document import Column, Lines, Table
from mamf.report.own_ceilings import problem_title, share_of
from mamf.report.page import Page, Part, Section
from mamf.report.text import counted, interval_cell, percent, rate_text, significant, whole

_MOST_FACTS = 4


def device_page(name: str, data: SiteData, addresses: Addresses) -> Page:
    """``data``: the device's part."""
    best = data.lines[:1] and [line for line in data.lines if line.tier == data.lines[0].tier]
    facts = [
        fact_of(line, f"{line.dtype}, {line.regime}", *([f"tier {line.tier}"] if line.tier != COMPLETE else []))
        for line in [each for each in best if each.regime in CEILINGS] or best
    ]
    sections = [
        Section("Ceilings", [_ceilings_table(data, addresses)] if data.lines else []),
        *_card_sections(data, addresses),
        Section("Attention kernels", _attention(data, addresses)),
        Section("Other operations", _kernels(data, addresses)),
        _history(data),
        Section("Unconfirmed figures", _unconfirmed(data, addresses)),
        Section("Logs", [_logs_table(data, addresses)]),
    ]
    return Page(
        device_title(name),
        _lead(data),
        facts[:_MOST_FACTS],
        sections=[section for section in sections if section.parts],
        links=[("All devices", addresses.up + INDEX)],
    )


def _lead(data: SiteData) -> list[str]:
    """Vendor and builds, and how much was measured."""
    devices = [run.header["device"] for run in data.runs if run.header]
    builds = dict.fromkeys(", ".join(_build(device)) for device in devices)
    counts = f"{counted(len(data.runs), 'log')} of {counted(count_cards(data.runs), 'card')}"
    lines = [data.runs[0].vendor, " or ".join(filter(None, builds)), counts]
    return [". ".join(filter(None, lines)) + "."]


def _build(device: Mapping[str, Any]) -> list[str]:
    units, watts, memory = (device.get(name) for name in ("compute_units", "power_limit_watts", "memory_bytes"))
    found = [
        counted(units, "compute unit") if units else "",
        f"{watts:.0f} W limit" if watts else "",
        f"{memory / 2**30:.0f} GiB" if memory else "",
    ]
    return [text for text in found if text]


def _ceilings_table(data: SiteData, addresses: Addresses) -> Table[Any]:
    columns: list[Column[CeilingLine]] = [
        *figure_columns(),
        Column("", "W", lambda line: line.entry and line.entry.conditions.watts, whole),
        Column("", "J/TFLOP", joules),
        Column("", "datasheet", lambda line: line.peak and line.peak.flops / TERA, "{:.4g}".format),
        Column("", "MxNxK", lambda line: line.entry and line.entry.shape),
        Column("", "kernel", lambda line: line.entry and line.entry.kernel, left=True),
        Column("", "by", lambda line: line.entry and ("find" if line.entry.is_confirmed else "sweep"), left=True),
        Column("", "log", lambda line: addresses.log(line.place)),
    ]
    return Table(columns, data.lines)


def _card_sections(data: SiteData, addresses: Addresses) -> list[Section]:
    """Charts where there are several cards, those of the leading dtype at once; a table of all cards."""
    several = [line for line in data.lines if line.tier == COMPLETE and len(line.cards) > 1]
    leading = [line for line in several if line.dtype == several[0].dtype]
    rows = [(line, entry) for line in data.lines if line.tier == COMPLETE for entry in line.cards]
    columns: list[Column[tuple[CeilingLine, CeilingEntry]]] = [
        Column("", "card", lambda row: card_name(row[1]), left=True),
        Column("", "dtype", lambda row: row[0].dtype, left=True),
        Column("", "regime", lambda row: row[0].regime, left=True),
        Column("", "TFLOPS", lambda row: row[1].tflops, significant),
        Column("", "interval", lambda row: row[1].interval, interval_cell),
        Column("", "% of fastest card", lambda row: row[1].tflops / row[0].tflops, percent),
        Column("", "MHz", lambda row: row[1].conditions.clock_hz, lambda clock: f"{clock / 1e6:.0f}"),
        Column("", "W", lambda row: row[1].conditions.watts, whole),
        Column("", "J/TFLOP", lambda row: row[1].joules_per_tflop, "{:#.3g}".format),
        Column("", "log", lambda row: addresses.log(row[1].place)),
    ]
    table: list[Part] = [Table(columns, rows)] if several else []
    return [
        Section("Cards side by side", [cards_chart(line) for line in leading]),
        Section("Cards in other dtypes", [cards_chart(line) for line in several if line not in leading], False),
        Section("The best figures of each card", table, is_open=False),
    ]


def _history(data: SiteData) -> Section:
    """The ceilings by version of torch and driver, oldest first; a chart if there are several versions."""
    groups: dict[str, list[CeilingEntry]] = {}
    for entry in sorted(data.entries, key=lambda entry: str(entry.header["started"])):
        groups.setdefault(_versions(entry.header), []).append(entry)
    dates = {name: [entry.header["started"][:10] for entry in group] for name, group in groups.items()}
    rows = [(name, line) for name, group in groups.items() for line in ceiling_lines(COMPLETE, group)]
    columns: list[Column[tuple[str, CeilingLine]]] = [
        Column("", "software", lambda row: row[0], left=True),
        Column("", "dtype", lambda row: row[1].dtype, left=True),
        Column("", "regime", lambda row: row[1].regime, left=True),
        Column("", "TFLOPS", lambda row: row[1].tflops, significant),
        Column("", "interval", lambda row: row[1].interval, interval_cell),
        Column("", "cards", lambda row: len(row[1].cards)),
        Column("", "over cards", lambda row: range_over_cards(row[1])),
        Column("", "from", lambda row: min(dates[row[0]])),
        Column("", "to", lambda row: max(dates[row[0]])),
    ]
    parts: list[Part] = [history_chart(rows)] if len(groups) > 1 else []
    parts += [Table(columns, rows)] if rows else []
    return Section("By software version", parts, is_open=len(groups) > 1)


def _versions(header: Mapping[str, Any]) -> str:
    """What sets figures apart most: torch and the driver."""
    packages, driver = header["environment"]["packages"], header["device"].get("driver")
    return f"torch {packages.get('torch', 'unknown')}" + (f", driver {driver}" if driver else "")


def _attention(data: SiteData, addresses: Addresses) -> list[Part]:
    best = best_attention(data.attention, per_kernel=True)
    problems = list(dict.fromkeys(map(attention_problem, best)))
    best.sort(key=lambda entry: (problems.index(attention_problem(entry)), -entry.share))
    columns: list[Column[AttentionEntry]] = [
        Column("", "dtype", lambda entry: entry.row.problem.dtype, left=True),
        Column("", "regime", lambda entry: entry.row.regime, left=True),
        Column("", "pass", lambda entry: entry.row.problem.direction, left=True),
        Column("", "d", lambda entry: entry.row.shape.head_dims),
        Column("", "mask", lambda entry: mask_name(entry.row.shape), left=True),
        Column("", "kernel", lambda entry: entry.row.kernel, left=True),
        Column("", "MAMFU %", lambda entry: entry.share, percent),
        Column("", "TFLOPS", lambda entry: entry.row.tflops(entry.row.figure), significant),
        Column("", "shape", lambda entry: entry.row.shape),
        Column("", "log", lambda entry: addresses.log(entry.place)),
    ]
    return [*attention_charts(best), Table(columns, best)] if best else []


def _kernels(data: SiteData, addresses: Addresses) -> list[Part]:
    best = best_kernels(data.kernels)
    columns: list[Column[Any]] = [
        Column("", "operation", lambda entry: entry.row.operation, left=True),
        Column("", "problem", lambda entry: problem_title(entry.row.regime, entry.row.problem), left=True),
        Column("", "rate", lambda entry: rate_text(entry.rate, entry.row.work.unit)),
        Column("", "% of peak", lambda entry: share_of(entry.rate, entry.row.problem, entry.header), percent),
        Column("", "kernel", lambda entry: entry.row.kernel, left=True),
        Column("", "shape", lambda entry: entry.row.shape),
        Column("", "log", lambda entry: addresses.log(entry.place)),
    ]
    return [Table(columns, best)] if best else []


def _unconfirmed(data: SiteData, addresses: Addresses) -> list[Part]:
    """A line for each log with figures that no second submitter confirms."""
    reasons: dict[Path, tuple[Entry, list[str]]] = {}
    for entry, reason in data.unconfirmed:
        reasons.setdefault(entry.place, (entry, []))[1].append(reason)
    columns: list[Column[tuple[Entry, Sequence[str]]]] = [
        Column("", "date", lambda row: row[0].header["started"][:10]),
        Column("", "why it is unconfirmed", lambda row: shortened(row[1]), left=True),
        Column("", "log", lambda row: addresses.log(row[0].place)),
    ]
    text = "These figures are ranked with none until another card confirms them."
    return [Lines([text]), Table(columns, list(reasons.values()))] if reasons else []


def _logs_table(data: SiteData, addresses: Addresses) -> Table[Any]:
    columns: list[Column[Any]] = [
        Column("", "date", lambda run: run.started[:10] or None, left=True),
        Column("", "what", lambda run: run.what, left=True),
        Column("", "card", lambda run: run.card, left=True),
        Column("", "tier", lambda run: run.tier, left=True),
        Column(
            "", "software", lambda run: ", ".join(f"{name} {each}" for name, each in run.software.items()), left=True
        ),
        Column("", "remark", lambda run: run.copy_of and f"a copy of {run.copy_of.as_posix()}: not counted", left=True),
        Column("", "log", lambda run: addresses.log(run.place, run.place.name), left=True),
    ]
    return Table(columns, sorted(data.runs, key=lambda run: (run.started, run.place), reverse=True))
