"""The front page of the site of results/, and the page of what others published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.measurement import TERA
from mamf.pages.site_charts import ceilings_chart
from mamf.pages.site_data import COMPLETE, CeilingLine, Run, SiteData
from mamf.report.columns import text_table
from mamf.report.document import Column, Lines, Table
from mamf.report.page import Command, Fact, Page, Part, Section
from mamf.report.text import counted, interval_cell, percent, significant, whole
from mamf.text import Link

TITLE = "Measured matmul ceilings of accelerators"
INDEX, PUBLISHED, CSV, FEED, FEED_SCHEMA, NOTICE_FILE = (
    *("index.html", "published.html", "ceilings.csv", "index.json", "index.schema.json", "published-notice.txt"),
)
_MOST_FACTS = 4
_WORDS = (
    "burst: at the boost clock, the highest rate of a launch (MAMF). sustained: at the power limit, as in training "
    "(MSMF). classic: the loop of mamf-finder.",
    "% of peak: of the datasheet's dense peak. interval: where 95 % of repeats lie. cards: how many cards of the model "
    "were measured; over cards: from the slowest to the fastest.",
    "tier complete: measured, every result checked, and confirmed by a second card or bounded by a verified datasheet.",
    "tier unconfirmed: above every other card of the model, or the first of a model without a verified datasheet.",
    "tier interrupted: the run ended early; the best shape may never have been tried.",
    "tier legacy: mamf-finder's figures as printed, of unchecked results.",
    "Figures of different tiers are not comparable.",
)


@dataclass(frozen=True)
class Addresses:
    """Where links lead. ``logs``: the base of logs, with a slash at its end, from the front page; ``pages``: by device;
    ``up``: from a page to the front page's folder.
    """

    logs: str
    pages: Mapping[str, str]
    up: str = ""

    def log(self, place: Path, text: str = "log") -> Link:
        base = self.logs if "://" in self.logs else self.up + self.logs
        return Link(text, base + quote(place.as_posix()))

    def device(self, name: str) -> Link:
        return Link(device_title(name), self.up + self.pages[name])


def device_title(name: str) -> str:
    return name.strip() or "unnamed device"


def index_page(data: SiteData, addresses: Addresses) -> Page:
    if not data.runs:
        return _empty_page(data)
    complete = [line for line in data.lines if line.tier == COMPLETE]
    dtypes = [dtype for dtype in data.dtypes if any(line.dtype == dtype for line in complete)]
    charts = [ceilings_chart(dtype, [line for line in complete if line.dtype == dtype]) for dtype in dtypes]
    more = f"Ceilings of {counted(len(charts[1:]), 'more dtype')}"
    ceilings: Table[Any] = Table(_columns(addresses), data.lines)
    sections = [
        Section("Ceilings", charts[:1]),
        Section(more, charts[1:], is_open=False),
        Section("All ceilings", [ceilings] if data.lines else []),
        Section("What the words mean", [Lines(_WORDS)]),
        Section("Devices", [_devices_table(data, addresses)]),
        *_download_sections(data),
        Section("Add your accelerator", _how_to_contribute()),
    ]
    devices = _runs_by_device(data)
    cards = sum(map(count_cards, devices.values()))
    lead = [
        "The highest rates that matrix products reach, each with its 95 % repeat interval and its log.",
        f"{counted(len(devices), 'device')}, {counted(cards, 'card')}, {counted(len(data.runs), 'log')}.",
    ]
    return Page(
        TITLE, lead, _facts(complete, dtypes), sections=[each for each in sections if each.parts], links=_links(data)
    )


def _links(data: SiteData, up: str = "") -> list[tuple[str, str]]:
    published = [("Published elsewhere, not checked", PUBLISHED)] if data.published else []
    return [("Figures as CSV", CSV), ("as JSON", FEED), *published]


def _facts(complete: Sequence[CeilingLine], dtypes: Sequence[str]) -> list[Fact]:
    """The devices that are fastest in the leading dtype, sustained if it was measured."""
    leading = [line for line in complete if line.dtype == dtypes[0]] if dtypes else []
    chosen = [line for line in leading if line.regime == "sustained"] or leading
    return [fact_of(line, device_title(line.device), f"{line.dtype}, {line.regime}") for line in chosen[:_MOST_FACTS]]


def fact_of(line: CeilingLine, label: str, *notes: str) -> Fact:
    """A ceiling in large type: its interval, its share of the datasheet and the range over cards."""
    interval = line.interval
    found = [
        *notes,
        f"{interval_cell(interval)} (95 % repeat interval)" if interval else "",
        f"{percent(line.share)} % of the datasheet's {line.peak.flops / TERA:.4g}" if line.peak and line.share else "",
        f"{len(line.cards)} cards: {range_over_cards(line)}" if len(line.cards) > 1 else "",
        f"{joules(line)} J/TFLOP" if joules(line) else "",
    ]
    return Fact(label, significant(line.tflops), "TFLOPS", [note for note in found if note])


def joules(line: CeilingLine) -> str | None:
    """Joules per 1e12 FLOP; None unless power was read in the sustained regime."""
    found = line.entry and line.entry.joules_per_tflop
    return f"{found:#.3g}" if found else None


def range_over_cards(line: CeilingLine) -> str | None:
    if line.lowest is None or len(line.cards) < 2:
        return None
    return f"{significant(line.lowest)} to {significant(line.cards[0].tflops)}"


def _columns(addresses: Addresses) -> list[Column[CeilingLine]]:
    return [
        Column("", "device", lambda line: addresses.device(line.device), left=True),
        *figure_columns(),
        Column("", "vendor", lambda line: line.vendor, left=True),
        Column("", "log", lambda line: addresses.log(line.place)),
    ]


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


def _devices_table(data: SiteData, addresses: Addresses) -> Table[Any]:
    runs = _runs_by_device(data)
    columns: list[Column[str]] = [
        Column("", "device", addresses.device, left=True),
        Column("", "vendor", lambda name: runs[name][0].vendor, left=True),
        Column("", "cards", lambda name: count_cards(runs[name])),
        Column("", "logs", lambda name: len(runs[name])),
        Column("", "last log", lambda name: max(run.started[:10] for run in runs[name]), left=True),
    ]
    return Table(columns, sorted(runs))


def _runs_by_device(data: SiteData) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for run in data.runs:
        runs.setdefault(run.device, []).append(run)
    return runs


def count_cards(runs: Iterable[Run]) -> int:
    """Of one device. Logs that do not identify their card count as one card if no log does."""
    return len({run.card for run in runs if run.card}) or 1


def _download_sections(data: SiteData) -> list[Section]:
    files = [
        (Link(CSV, CSV), "the table above, for a spreadsheet"),
        (Link(FEED, FEED), "the same for programs: look up a ceiling by device, dtype and regime"),
        (Link(FEED_SCHEMA, FEED_SCHEMA), "its JSON Schema"),
    ]
    sections = [Section("Downloads", [text_table(("file", "what"), files)])]
    if data.published:
        count = counted(len(data.published), "figure")
        text = f"{count} that other people published, with their sources. mamf did not check them."
        link = [(Link("Published elsewhere, not checked", PUBLISHED), text)]
        sections.append(Section("Published elsewhere", [text_table(("page", "what"), link)]))
    return sections


def _how_to_contribute() -> list[Part]:
    return [
        Lines(["Both ceilings in a minute, then a pull request with the log:"]),
        Command("pip install mamf\nmamf find --dtype bfloat16\nmamf results submit LOG"),
    ]


def _empty_page(data: SiteData) -> Page:
    sections = [Section("Add your accelerator", _how_to_contribute()), *_download_sections(data)]
    return Page(TITLE, ["Nobody has measured a device yet."], sections=sections, links=_links(data))


def published_page(data: SiteData) -> Page:
    columns: list[Column[Any]] = [
        Column("", "vendor", lambda figure: figure.vendor, left=True),
        Column("", "accelerator", lambda figure: figure.accelerator, left=True),
        Column("", "dtype", lambda figure: figure.dtype, left=True),
        Column("", "TFLOPS", lambda figure: figure.tflops, significant),
        Column("", "statistic", lambda figure: figure.statistic, left=True),
        Column("", "software", lambda figure: figure.software, left=True),
        Column("", "W", lambda figure: figure.power_limit_watts, whole),
        Column("", "source", lambda figure: Link(_site_of(figure.source), figure.source), left=True),
        Column("", "license", lambda figure: figure.license, left=True),
    ]
    return Page(
        "Published elsewhere, not checked",
        [
            f"{counted(len(data.published), 'matmul figure')} that other people published. mamf did not check them.",
            "Scripts, statistics, sizes, clocks and power limits differ, so they are ranked with no measured figure.",
        ],
        sections=[
            Section("Figures", [Table(columns, data.published)]),
            Section(
                "Licenses", [text_table(("file", "what"), [(Link(NOTICE_FILE, NOTICE_FILE), "authors, licenses")])]
            ),
        ],
        links=[("All measured ceilings", INDEX)],
    )


def _site_of(address: str) -> str:
    """The host, and what follows it if that is a project of GitHub's."""
    parts = address.split("/")
    return "/".join(parts[2:5] if parts[2:3] == ["github.com"] else parts[2:3])
