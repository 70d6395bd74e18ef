"""results/README.md: the collection as GitHub tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from mamf.contribution.collection import (
    AttentionEntry,
    CeilingEntry,
    Collection,
    KernelEntry,
    LegacyEntry,
    best_attention,
    best_kernels,
    kernel_title,
    leaders,
)
from mamf.contribution.confirming import Entry, part_confirmed, shortened
from mamf.measurement import TERA
from mamf.peaks import Peak
from mamf.report.columns import sensor_columns
from mamf.report.document import Column, Table
from mamf.report.formats.markdown import table_text
from mamf.report.own_ceilings import described_title, share_of
from mamf.report.text import interval_cell, significant
from mamf.text import Markup, markdown_line, markdown_text

_INTRODUCTION = """# Results

Written by `mamf results table` from the logs in this folder; a change by hand is lost.
[CONTRIBUTING.md](../CONTRIBUTING.md) says how yours gets here.

A figure is in TFLOPS (1e12 FLOP/s) and belongs to its regime: **burst** at the boost clock (its ceiling is the MAMF),
**sustained** at the power limit (MSMF), **classic** by mamf-finder's loop ([measuring](../docs/measuring.md)). `by`
says what stands behind it: `find` confirmed it by fresh samples; the best row of a `sweep` was chosen by the samples
that it is shown with, and counts only where no find is there. `all` is the range over the logs of that accelerator:
cards of one model differ. A figure above what every other card of its model reaches is **unconfirmed**, and so is the
first of a model that no verified datasheet bounds: it stands apart until another card confirms it. Logs are of three
tiers that are never ranked together: complete (what is not labelled), interrupted, and legacy (mamf-finder's own, which
hold no samples and no checks).

[published/](published/NOTICE.md) holds figures that other people published. This project did not check them, and never
ranks them with measured figures.
"""

_UNCONFIRMED = "Unconfirmed: ranked with none until a second submitter confirms it"
_LEGACY = "Legacy: mamf-finder's own figures, as it printed them, of unchecked products"
_CUT = ("interrupted", ", tier interrupted")
RowT = TypeVar("RowT")
#: The best ceiling, with those that it leads.
Leader = tuple[CeilingEntry, Sequence[CeilingEntry]]


@dataclass
class Footnotes:
    """Numbered texts; the same text has one number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, text: str) -> str:
        return f"[^{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def lines(self) -> str:
        return "".join(f"[^{number}]: {text}\n" for text, number in self.numbers.items())


def results_page(collection: Collection) -> str:
    """The whole of results/README.md."""
    notes = Footnotes()
    ceilings, doubted_ceilings = part_confirmed(collection.ceilings)
    attention, doubted_attention = part_confirmed(collection.attention)
    kernels, doubted_kernels = part_confirmed(collection.kernels)
    complete = [entry for entry in ceilings if entry.tier == "complete"]
    parts = [
        _ceilings(markdown_text(dtype), [entry for entry in complete if entry.dtype == dtype], notes)
        for dtype in sorted({entry.dtype for entry in complete})
    ]
    for tier, more in (("complete", ": the best kernel by share of the measured ceiling (MAMFU)"), _CUT):
        best = best_attention(entry for entry in attention if entry.tier == tier)
        parts.append(_section(f"Attention{more}", attention_columns(), best))
    for tier, more in (("complete", ""), _CUT):
        kept = best_kernels(entry for entry in kernels if entry.tier == tier)
        parts += [
            _kernels(f"{markdown_text(name)}{more}", [each for each in kept if each.row.operation == name])
            for name in dict.fromkeys(entry.row.operation for entry in kept)
        ]
    cut = [entry for entry in ceilings if entry.tier == "interrupted"]
    parts += [
        _ceilings("Tier interrupted: the best shape may never have been tried", cut, notes, with_dtype=True),
        _unconfirmed([*doubted_ceilings, *doubted_attention, *doubted_kernels]),
        _legacy(collection.legacy),
        notes.lines(),
    ]
    return "\n".join(filter(None, [_INTRODUCTION, *parts]))


def _section(title: str, columns: Sequence[Column[RowT]], rows: Sequence[RowT], above: str = "") -> str:
    """A table below its title; nothing without rows."""
    return f"## {title}\n\n{above}{table_text(Table(columns, rows))}" if rows else ""


def _ceilings(title: str, entries: Sequence[CeilingEntry], notes: Footnotes, with_dtype: bool = False) -> str:
    columns = ceiling_columns(notes)
    return _section(title, columns if with_dtype else columns[1:], leaders(entries) if entries else [])


def text_column(title: str, read: Callable[[RowT], object]) -> Column[RowT]:
    return Column("", title, read, str, left=True)


def origin_columns(read: Callable[[Any], Entry] = lambda entry: entry) -> list[Column[Any]]:
    """The day of the run, and its log."""
    return [
        Column("", "date", lambda row: read(row).header["started"][:10]),
        Column("", "log", lambda row: link(read(row).place), Markup),
    ]


def ceiling_columns(notes: Footnotes) -> list[Column[Leader]]:
    """Of the best ceiling of an accelerator, with those of its other logs."""

    def share(peak: tuple[CeilingEntry, Peak]) -> str:
        entry, its = peak
        note = notes.mark(f"{its.origin}, {its.dtype}, dense {its.flops / TERA:g} TFLOPS: {its.source}")
        return Markup(f"{100 * entry.tflops * TERA / its.flops:.1f} % of {its.flops / TERA:g}{note}")

    return [
        text_column("dtype", lambda row: row[0].dtype),
        text_column("regime", lambda row: row[0].regime),
        text_column("accelerator", lambda row: row[0].device),
        Column("", "TFLOPS", lambda row: row[0].tflops, lambda rate: Markup(f"**{significant(rate)}**")),
        Column("", "interval", lambda row: row[0].interval, interval_cell),
        Column("", "MxNxK", lambda row: row[0].shape),
        text_column("kernel", lambda row: kernel_title(row[0])),
        Column("", "of the dense peak", lambda row: _peak(row[0]), share),
        *sensor_columns(lambda row: row[0].conditions),
        Column("", "J/TFLOP", lambda row: row[0].joules_per_tflop, "{:#.3g}".format),
        text_column("by", lambda row: "find" if row[0].is_confirmed else "sweep"),
        Column("", "all", lambda row: _span([each.tflops for each in row[1]])),
        text_column("software", lambda row: software(row[0].header)),
        *origin_columns(lambda row: row[0]),
    ]


def _span(rates: Sequence[float]) -> str:
    return f"{len(rates)}: {significant(min(rates))} to {significant(max(rates))}" if len(rates) > 1 else "1"


def _peak(entry: CeilingEntry) -> tuple[CeilingEntry, Peak] | None:
    peak = entry.datasheet
    return None if peak is None else (entry, peak)


def software(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in software_versions(header).items())


def software_versions(header: Mapping[str, Any]) -> dict[str, str]:
    """torch, the vendor's libraries and the driver."""
    device = header["device"]
    named = {"torch": header["environment"]["packages"].get("torch"), **(device.get("versions") or {})}
    named |= {"driver": device.get("driver")}
    return {name: str(version) for name, version in named.items() if version and version != "True"}


def attention_columns() -> list[Column[AttentionEntry]]:
    return [
        text_column("accelerator", lambda entry: entry.device),
        text_column("dtype", lambda entry: entry.row.problem.dtype),
        text_column("regime", lambda entry: entry.row.regime),
        text_column("pass", lambda entry: entry.row.problem.direction),
        Column("", "d", lambda entry: entry.row.shape.head_dims),
        text_column("mask", lambda entry: entry.row.shape.mask),
        text_column("kernel", kernel_title),
        Column("", "MAMFU", lambda entry: entry.share, lambda share: Markup(f"**{100 * share:.1f} %**")),
        Column("", "TFLOPS", lambda entry: entry.row.tflops(entry.row.figure), significant),
        Column("", "shape", lambda entry: entry.row.shape),
        *origin_columns(),
    ]


def _kernels(title: str, entries: Sequence[KernelEntry]) -> str:
    works = dict.fromkeys((entry.row.work.unit, entry.row.work.convention) for entry in entries)
    counts = " ".join(markdown_line(f"{unit}: {convention}.") for unit, convention in works)
    return _section(title, kernel_columns(), entries, f"{counts}\n\n")


def kernel_columns() -> list[Column[KernelEntry]]:
    def share(entry: KernelEntry) -> float | None:
        return share_of(entry.rate, entry.row.problem, entry.header)

    return [
        text_column("accelerator", lambda entry: entry.device),
        text_column("problem", lambda entry: described_title(entry.row.regime, entry.row.problem)),
        Column("", "rate", lambda entry: f"**{significant(entry.rate)}** {markdown_text(entry.row.work.unit)}", Markup),
        Column("", "interval", lambda entry: entry.interval, interval_cell),
        Column("", "of the peak", share, lambda share: f"{100 * share:.1f} %"),
        Column("", "shape", lambda entry: entry.row.shape),
        text_column("kernel", kernel_title),
        *origin_columns(),
    ]


def _unconfirmed(entries: Iterable[tuple[Entry, str]]) -> str:
    """A line for each log with figures that are not ranked."""
    reasons: dict[Path, tuple[Entry, list[str]]] = {}
    for entry, reason in entries:
        reasons.setdefault(entry.place, (entry, []))[1].append(reason)
    columns: list[Column[tuple[Entry, list[str]]]] = [
        text_column("accelerator", lambda row: row[0].header["device"]["name"]),
        text_column("why it is unconfirmed", lambda row: shortened(row[1])),
        *origin_columns(lambda row: row[0]),
    ]
    return _section(_UNCONFIRMED, columns, [reasons[place] for place in sorted(reasons)])


def _legacy(entries: Iterable[LegacyEntry]) -> str:
    ordered = sorted(entries, key=lambda entry: (entry.run.device or "", entry.run.dtype or "", str(entry.place)))
    columns: list[Column[tuple[LegacyEntry, str]]] = [
        text_column("accelerator", lambda row: row[0].run.device or "unknown"),
        text_column("dtype", lambda row: row[0].run.dtype or "unknown"),
        text_column("version", lambda row: f"mamf-finder {row[0].run.version or 'of unknown version'}"),
        text_column("figure", lambda row: row[1] if row[0].run.is_complete else f"{row[1]} (of scouts)"),
        Column("", "TFLOPS", lambda row: row[0].run.best[row[1]].tflops[row[1]], significant),
        Column("", "MxNxK", lambda row: row[0].run.best[row[1]].shape or "unknown"),
        Column("", "shapes", lambda row: "unknown" if row[0].run.tried is None else row[0].run.tried),
        text_column("run", lambda row: "complete" if row[0].run.is_complete else "interrupted"),
        Column("", "date", lambda row: row[0].run.started[:10] if row[0].run.started else "unknown"),
        Column("", "log", lambda row: link(row[0].place), Markup),
    ]
    return _section(_LEGACY, columns, [(entry, name) for entry in ordered for name in entry.run.best])


def link(place: Path) -> Markup:
    return Markup(f"[log]({quote(place.as_posix())})")
