"""The page of a device on the site of results/: its ceilings, cards, software, attention kernels and logs."""

from __future__ import annotations

from typing import Any

from mamf.contribution.collection import ResultRate, best_attention, best_kernels, kernel_title
from mamf.measurement import group_pairs
from mamf.pages.site_data import COMPLETE, CeilingLine, Run, SiteData
from mamf.pages.site_index import (
    INDEX,
    MOST_FACTS,
    MOST_ROWS,
    card_name,
    count_cards,
    device_title,
    fact_of,
    figure_columns,
    joules,
    log_link,
    point_of,
    spread,
)
from mamf.regime_names import CEILINGS
from mamf.report.charts.ranges import RangeChart, RangePoint, RangeRow
from mamf.report.document import Column, Table
from mamf.report.own_ceilings import described_title, share_of
from mamf.report.page import Page, Part, Section
from mamf.report.text import counted, percent, rate_text, significant, whole


def device_page(name: str, data: SiteData, logs: str) -> Page:
    """``data``: the device's part. ``logs``: the base address of logs, from this page."""
    best = [line for line in data.lines if line.tier == data.lines[0].tier]
    facts = [
        fact_of(line, f"{line.dtype}, {line.regime}")
        for line in [each for each in best if each.regime in CEILINGS] or best
    ]
    sections = [
        Section("Ceilings", [_ceilings_table(data, logs)] if data.lines else []),
        *_card_sections(data, logs),
        Section("Attention kernels", _attention(data, logs)),
        Section("Other operations", [_kernels_table(data, logs)] if data.kernels else [], is_open=False),
        Section("Unconfirmed figures", [_unconfirmed_table(data, logs)] if data.unconfirmed else [], is_open=False),
        Section("Logs", [_logs_table(data, logs)]),
    ]
    return Page(
        device_title(name),
        [_summary(data)],
        facts[:MOST_FACTS],
        sections=[section for section in sections if section.parts],
        links=[("All devices", f"../{INDEX}")],
    )


def _summary(data: SiteData) -> str:
    found = {(run.info["compute_units"], run.info["power_limit_watts"]): 1 for run in data.runs if run.info}
    builds = [f"{units} compute units" + (f", {watts:.0f} W limit" if watts else "") for units, watts in found if units]
    parts = [data.runs[0].vendor, " or ".join(builds), counted(len(data.runs), "log")]
    return f"{'. '.join(filter(None, parts))} of {counted(count_cards(data.runs), 'card')}."


def _ceilings_table(data: SiteData, logs: str) -> Table[Any]:
    columns: list[Column[CeilingLine]] = [
        *figure_columns(),
        Column("", "W", lambda line: line.entry and line.entry.conditions.watts, whole),
        Column("", "J/TFLOP", joules),
        Column("", "datasheet", lambda line: line.peak and line.peak.rate, "{:.4g}".format),
        Column("", "MxNxK", lambda line: line.entry and line.entry.row.shape),
        Column("", "kernel", lambda line: line.entry and kernel_title(line.entry), left=True),
        Column("", "by", lambda line: line.entry and ("find" if line.entry.is_confirmed else "sweep"), left=True),
        Column("", "log", lambda line: log_link(logs, line.place)),
    ]
    return Table(columns, data.lines)


def _card_sections(data: SiteData, logs: str) -> list[Section]:
    """Charts where there are several cards, those of the leading dtype at once."""
    complete = [line for line in data.lines if line.tier == COMPLETE]
    several = [line for line in complete if len(line.cards) > 1]
    leading = [line for line in several if line.dtype == several[0].dtype]
    return [
        Section("Cards side by side", [_cards_chart(line) for line in leading]),
        Section("Cards in other dtypes", [_cards_chart(line) for line in several if line not in leading], False),
    ]


def _cards_chart(line: CeilingLine) -> RangeChart:
    rows = [
        RangeRow("", card_name(each), (point_of(each),), None, line.regime) for each in spread(line.cards, MOST_ROWS)
    ]
    gain = percent(line.cards[0].tflops / line.cards[-1].tflops - 1)
    return RangeChart(
        f"{line.dtype}, {line.regime}",
        f"The fastest of {len(line.cards)} cards is {gain} % above the slowest.",
        *("TFLOPS", tuple(rows)),
    )


def _attention(data: SiteData, logs: str) -> list[Part]:
    """The best row of each kernel and problem, the highest share first."""
    best = best_attention(data.attention, per_kernel=True)
    problems = list(dict.fromkeys(map(_problem, best)))
    best.sort(key=lambda entry: (problems.index(_problem(entry)), -entry.share))
    columns: list[Column[ResultRate]] = [
        Column("", "kernel", kernel_title, left=True),
        Column("", "MAMFU %", lambda entry: entry.share, percent),
        Column("", "TFLOPS", lambda entry: entry.row.rate(entry.row.figure), significant),
        Column("", "pass", lambda entry: entry.row.problem.direction, left=True),
        Column("", "d", lambda entry: entry.row.shape.head_dims),
        Column("", "mask", lambda entry: entry.row.shape.mask, left=True),
        Column("", "regime", lambda entry: entry.row.regime, left=True),
        Column("", "dtype", lambda entry: entry.row.problem.dtype, left=True),
        Column("", "shape", lambda entry: entry.row.shape),
        Column("", "log", lambda entry: log_link(logs, entry.place)),
    ]
    text = "Each kernel's best shape, as a share of the device's measured matmul ceiling (MAMFU)"
    charts = [
        RangeChart(name, text, "% of the measured ceiling", tuple(rows))
        for name, rows in group_pairs((_problem(entry)[0], _attention_row(entry)) for entry in best).items()
    ]
    return [*charts, Table(columns, best)] if best else []


def _problem(entry: ResultRate) -> tuple[str, str]:
    """Dtype and regime; direction, head dimension and mask."""
    row = entry.row
    problem = f"{row.problem.direction}, d {row.shape.head_dims}, {row.shape.mask}"
    return f"{row.problem.dtype}, {row.regime}", problem


def _attention_row(entry: ResultRate) -> RangeRow:
    row, share, interval = entry.row, 100 * entry.share, entry.row.rate_interval
    has_interval = row.best_by == row.figure and interval.is_known
    ends = [share * end / row.best_rate for end in (interval.low, interval.high)] if has_interval else [share, share]
    return RangeRow(_problem(entry)[1], row.kernel, (RangePoint(share, ends[0], ends[1], f"at {row.shape}"),))


def _kernels_table(data: SiteData, logs: str) -> Table[Any]:
    columns: list[Column[Any]] = [
        Column("", "operation", lambda entry: entry.row.operation, left=True),
        Column("", "rate", lambda entry: rate_text(entry.rate, entry.row.work.unit)),
        Column("", "problem", lambda entry: described_title(entry.row.regime, entry.row.problem), left=True),
        Column("", "% of peak", lambda entry: share_of(entry.rate, entry.row.problem, entry.header), percent),
        Column("", "kernel", kernel_title, left=True),
        Column("", "shape", lambda entry: entry.row.shape),
        Column("", "log", lambda entry: log_link(logs, entry.place)),
    ]
    return Table(columns, best_kernels(data.kernels))


def _unconfirmed_table(data: SiteData, logs: str) -> Table[Any]:
    columns: list[Column[ResultRate]] = [
        Column("", "what", lambda entry: entry.label, left=True),
        Column("", "rate", lambda entry: entry.rate, significant),
        Column("", "date", lambda entry: entry.header["started"][:10]),
        Column("", "log", lambda entry: log_link(logs, entry.place)),
    ]
    return Table(columns, data.unconfirmed, "Not ranked until a second contributor measures the same")


def _logs_table(data: SiteData, logs: str) -> Table[Any]:
    columns: list[Column[Run]] = [
        Column("", "date", lambda run: run.started[:10] or None, left=True),
        Column("", "what", lambda run: run.what, left=True),
        Column("", "card", lambda run: run.card, left=True),
        Column("", "tier", lambda run: run.tier, left=True),
        Column("", "software", lambda run: ", ".join(map(" ".join, run.software.items())), left=True),
        Column("", "remark", lambda run: run.copy_of and f"a copy of {run.copy_of.as_posix()}: not counted", left=True),
        Column("", "log", lambda run: log_link(logs, run.place, run.place.name), left=True),
    ]
    return Table(columns, sorted(data.runs, key=lambda run: (run.started, run.place), reverse=True))
