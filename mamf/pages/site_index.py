"""The front page of the site of results/, and the page of what others published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.collection import ResultRate
from mamf.measurement import ItemT, group_pairs
from mamf.pages.site_data import COMPLETE, CeilingLine, Run, SiteData
from mamf.report.charts.ranges import RangeChart, RangePoint, RangeRow
from mamf.report.columns import text_table
from mamf.report.document import Column, Lines, Table
from mamf.report.page import Command, Fact, Page, Part, Section
from mamf.report.text import counted, interval_cell, percent, shortened, significant, whole
from mamf.text import Link

INDEX, PUBLISHED, NOTICE_COPY = "index.html", "published.html", "published-notice.txt"
CSV, FEED, FEED_SCHEMA = "ceilings.csv", "index.json", "index.schema.json"
_NOT_CHECKED = "Published elsewhere, not checked"
MOST_FACTS = 4
#: Pages stay small: the most devices of a picture, and the most points of a row and of a picture.
MOST_ROWS, _MOST_POINTS, _MOST_IN_PICTURE = 30, 30, 600
_WORDS = (
    "burst: at the boost clock, the highest rate of a launch (MAMF). sustained: at the power limit, as in training "
    "(MSMF). classic: the loop of mamf-finder.",
    "% of peak: of the datasheet's dense peak. interval: where 95 % of repeats lie. cards: how many cards of the model "
    "were measured; over cards: from the slowest to the fastest.",
    "tier complete: a maintainer measured it, or two contributors did; every result was checked.",
    "tier unconfirmed: one contributor measured it.",
    "tier interrupted: the run ended early; the best shape may never have been tried.",
    "tier legacy: mamf-finder's figures as printed, of unchecked results.",
    "Figures of different tiers are not comparable.",
)
_CONTRIBUTE: Sequence[Part] = (
    Lines(["Both ceilings in a minute, then a pull request with the log:"]),
    Command("mamf find --dtype bfloat16"),
    Command("mamf results submit LOG"),
)


def log_link(base: str, place: Path, text: str = "log") -> Link:
    """``base``: the address of results/, with a slash at its end."""
    return Link(text, base + quote(place.as_posix()))


def device_title(name: str) -> str:
    return name.strip() or "unnamed device"


def index_page(data: SiteData, logs: str, pages: Mapping[str, str]) -> Page:
    """``logs``: the base address of logs; ``pages``: the address of each device's page."""
    charts = [_ceilings_chart(dtype, lines) for dtype, lines in data.by_dtype.items()]
    leading = next(iter(data.by_dtype.values()), [])
    fastest = [line for line in leading if line.regime == "sustained"] or leading
    runs = group_pairs((run.device, run) for run in data.runs)
    cards = sum(map(count_cards, runs.values()))
    counts = f"{counted(len(runs), 'device')}, {counted(cards, 'card')}, {counted(len(data.runs), 'log')}."
    columns: list[Column[CeilingLine]] = [
        Column("", "device", lambda line: Link(device_title(line.device), pages[line.device]), left=True),
        *figure_columns(),
        Column("", "vendor", lambda line: line.vendor, left=True),
        Column("", "log", lambda line: log_link(logs, line.place)),
    ]
    devices: list[Column[str]] = [
        Column("", "device", lambda name: Link(device_title(name), pages[name]), left=True),
        Column("", "vendor", lambda name: runs[name][0].vendor, left=True),
        Column("", "cards", lambda name: count_cards(runs[name])),
        Column("", "logs", lambda name: len(runs[name])),
        Column("", "last log", lambda name: max(run.started[:10] for run in runs[name]), left=True),
    ]
    sections = [
        Section("Ceilings", charts[:1]),
        Section(f"Ceilings of {counted(len(charts) - 1, 'more dtype')}", charts[1:], is_open=False),
        Section("All ceilings", [Table(columns, data.lines)] if data.lines else []),
        Section("What the words mean", [Lines(_WORDS)] if data.lines else []),
        Section("Devices", [Table(devices, sorted(runs))] if runs else []),
        Section("Add your accelerator", _CONTRIBUTE),
    ]
    return Page(
        "Measured matmul ceilings of accelerators",
        ["The highest rates that matrix products reach, each with its 95 % repeat interval and its log.", counts]
        if runs
        else ["Nobody has contributed a log yet. Yours can be the first: see below."],
        [fact_of(each, device_title(each.device), f"{each.dtype}, {each.regime}") for each in fastest[:MOST_FACTS]],
        sections=[each for each in sections if each.parts],
        links=[("As CSV", CSV), ("As JSON", FEED), *([(_NOT_CHECKED, PUBLISHED)] if data.published else [])],
    )


def fact_of(line: CeilingLine, label: str, *notes: str) -> Fact:
    """A ceiling in large type, with its interval, its share of the datasheet, the range over cards and the energy."""
    found = [
        *notes,
        f"tier {line.tier}" if line.tier != COMPLETE else "",
        f"{interval_cell(line.interval)} (95 % repeat interval)" if line.interval else "",
        f"{percent(line.share)} % of the datasheet's {line.peak.rate:.4g}" if line.peak and line.share else "",
        f"{len(line.cards)} cards: {range_over_cards(line)}" if len(line.cards) > 1 else "",
        f"{joules(line)} J/TFLOP" if joules(line) else "",
    ]
    return Fact(label, significant(line.tflops), "TFLOPS", [note for note in found if note])


def joules(line: CeilingLine) -> str | None:
    """Joules per 1e12 FLOP; None unless power was read in the sustained regime."""
    return f"{found:#.3g}" if line.entry and (found := line.entry.joules_per_tflop) else None


def range_over_cards(line: CeilingLine) -> str | None:
    rates = [significant(entry.tflops) for entry in line.cards]
    return f"{rates[-1]} to {rates[0]}" if len(rates) > 1 else None


def count_cards(runs: Iterable[Run]) -> int:
    """Of one device. Logs that do not identify their card count as one card if no log does."""
    return len({run.card for run in runs if run.card}) or 1


def figure_columns() -> list[Column[CeilingLine]]:
    """The figures of a ceiling, the same on all pages."""
    return [
        Column("", "TFLOPS", lambda line: line.tflops, significant),
        Column("", "dtype", lambda line: line.dtype, left=True),
        Column("", "regime", lambda line: line.regime, left=True),
        Column("", "% of peak", lambda line: line.share, percent),
        Column("", "interval", lambda line: line.interval, interval_cell),
        Column("", "cards", lambda line: len(line.cards) or None),
        Column("", "over cards", range_over_cards),
        Column("", "tier", lambda line: line.tier, left=True),
    ]


def _ceilings_chart(dtype: str, lines: Sequence[CeilingLine]) -> RangeChart:
    devices = list(group_pairs((line.device, line) for line in lines).values())
    kept = [line for each in devices[:MOST_ROWS] for line in each]
    most = max(3, min(_MOST_POINTS, _MOST_IN_PICTURE // len(kept)))
    rows = [
        RangeRow(
            shortened(device_title(line.device)),
            line.regime if line.tier == COMPLETE else f"{line.regime}, {line.tier}",
            tuple(point_of(entry) for entry in spread(line.cards, most)),
            line.peak.rate if line.peak else None,
        )
        for line in kept
    ]
    return RangeChart(
        dtype,
        "One point per card, with its 95 % repeat interval. The dashed tick is the datasheet's dense peak.",
        "TFLOPS",
        tuple(rows),
        (f"{counted(len(devices) - MOST_ROWS, 'more device')} in the table",) if len(devices) > MOST_ROWS else (),
    )


def card_name(entry: ResultRate) -> str:
    return f"card {entry.uuid_hash or 'unknown'}"


def point_of(entry: ResultRate) -> RangePoint:
    interval = entry.interval if entry.interval and entry.interval.is_known else None
    low, high = (interval.low, interval.high) if interval else (entry.tflops, entry.tflops)
    return RangePoint(entry.tflops, low, high, f"{card_name(entry)}, {entry.date[:10]}")


def spread(items: Sequence[ItemT], most: int) -> list[ItemT]:
    """At most so many of them, evenly, the first and the last included."""
    step = (len(items) - 1) / (most - 1)
    return list(items) if len(items) <= most else [items[round(place * step)] for place in range(most)]


def published_page(data: SiteData) -> Page:
    """The figures in published/ of results/, without any measured one beside them."""
    columns: list[Column[Any]] = [
        Column("", "accelerator", lambda figure: figure.accelerator, left=True),
        Column("", "TFLOPS", lambda figure: figure.tflops, significant),
        Column("", "dtype", lambda figure: figure.dtype, left=True),
        Column("", "vendor", lambda figure: figure.vendor, left=True),
        Column("", "statistic", lambda figure: figure.statistic, left=True),
        Column("", "software", lambda figure: figure.software, left=True),
        Column("", "W", lambda figure: figure.power_limit_watts, whole),
        Column(
            "", "source", lambda figure: Link("/".join(figure.reference.split("/")[2:5]), figure.reference), left=True
        ),
        Column("", "license", lambda figure: figure.license, left=True),
    ]
    notice = text_table(("file", "what"), [(Link(NOTICE_COPY, NOTICE_COPY), "authors and licenses of the sources")])
    return Page(
        _NOT_CHECKED,
        [
            f"{counted(len(data.published), 'matmul figure')} that other people published. mamf did not check them.",
            "Scripts, statistics, sizes, clocks and power limits differ: compare none with a measured ceiling.",
        ],
        sections=[Section("Figures", [Table(columns, data.published)]), Section("Licenses", [notice])],
        links=[("Measured ceilings", INDEX)],
    )
