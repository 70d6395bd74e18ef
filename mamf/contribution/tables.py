"""results/README.md: the collection as GitHub tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mamf.contribution.collection import (
    AttentionEntry,
    CeilingEntry,
    Collection,
    KernelEntry,
    LegacyEntry,
    best_attention,
    best_kernels,
    leaders,
)
from mamf.contribution.confirming import Entry, part_confirmed, shortened
from mamf.machine.peaks import find_peak
from mamf.measurement import TERA
from mamf.report.kernels import title as problem_title
from mamf.report.own_ceilings import share_of
from mamf.report.text import DASH, interval_cell, markdown, significant, whole
from mamf.statistics import CONFIDENCE, Interval
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
"""
_CEILING_COLUMNS = (
    "regime",
    "accelerator",
    "TFLOPS",
    "interval",
    "MxNxK",
    "kernel",
    "of the dense peak",
    "MHz",
    "W",
    "J/TFLOP",
    "by",
    "all",
    "software",
    "date",
    "log",
)
_ATTENTION_COLUMNS = (
    "accelerator",
    "dtype",
    "regime",
    "pass",
    "d",
    "mask",
    "kernel",
    "MAMFU",
    "TFLOPS",
    "shape",
    "date",
    "log",
)
_KERNEL_COLUMNS = ("accelerator", "problem", "rate", "interval", "of the peak", "shape", "kernel", "date", "log")
_LEGACY_COLUMNS = ("accelerator", "dtype", "version", "figure", "TFLOPS", "MxNxK", "shapes", "run", "date", "log")
_UNCONFIRMED = "## Unconfirmed: ranked with none until a second submitter confirms it"
_UNCONFIRMED_COLUMNS = ("accelerator", "why it is unconfirmed", "date", "log")
_LEFT = {
    "why it is unconfirmed",
    "regime",
    "accelerator",
    "kernel",
    "software",
    "dtype",
    "pass",
    "mask",
    "figure",
    "version",
    "by",
    "run",
    "problem",
}


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
    parts = [_INTRODUCTION]
    ceilings, doubted_ceilings = part_confirmed(collection.ceilings)
    attention, doubted_attention = part_confirmed(collection.attention)
    kernels, doubted_kernels = part_confirmed(collection.kernels)
    complete = [entry for entry in ceilings if entry.tier == "complete"]
    for dtype in sorted({entry.dtype for entry in complete}):
        parts.append(
            _ceilings(f"## {markdown_text(dtype)}", [entry for entry in complete if entry.dtype == dtype], notes)
        )
    finished = [entry for entry in attention if entry.tier == "complete"]
    parts.append(_attention("## Attention: the best kernel by share of the measured ceiling (MAMFU)", finished))
    unfinished = [entry for entry in attention if entry.tier == "interrupted"]
    parts.append(_attention("## Attention, tier interrupted", unfinished))
    for tier, more in (("complete", ""), ("interrupted", ", tier interrupted")):
        kept = best_kernels(entry for entry in kernels if entry.tier == tier)
        for name in dict.fromkeys(entry.row.operation for entry in kept):
            parts.append(
                _kernels(f"## {markdown_text(name)}{more}", [each for each in kept if each.row.operation == name])
            )
    cut = [entry for entry in ceilings if entry.tier == "interrupted"]
    parts.append(_ceilings("## Tier interrupted: what is best may never have been tried", cut, notes, with_dtype=True))
    parts.append(_unconfirmed([*doubted_ceilings, *doubted_attention, *doubted_kernels]))
    parts.append(_legacy(collection.legacy))
    return "\n".join(filter(None, [*parts, notes.lines()]))


def _ceilings(title: str, entries: Sequence[CeilingEntry], notes: Footnotes, with_dtype: bool = False) -> str:
    if not entries:
        return ""
    found = leaders(entries)
    rows = [([entry.dtype] if with_dtype else []) + _ceiling_cells(entry, kind, notes) for entry, kind in found]
    columns = (("dtype",) if with_dtype else ()) + _CEILING_COLUMNS
    return f"{title}\n\n{markdown(columns, rows, _LEFT)}"


def _ceiling_cells(entry: CeilingEntry, kind: Sequence[CeilingEntry], notes: Footnotes) -> list[str]:
    clock, joules = entry.conditions.clock_hz, entry.joules_per_tflop
    figures = sorted(each.tflops for each in kind)
    span = f"{len(kind)}: {significant(figures[0])} to {significant(figures[-1])}" if len(kind) > 1 else "1"
    has_none = entry.low is None or entry.high is None
    interval = DASH if has_none else interval_cell(Interval(entry.low or 0.0, entry.high or 0.0, CONFIDENCE))
    return [
        entry.regime,
        entry.device,
        Markup(f"**{significant(entry.tflops)}**"),
        interval,
        entry.shape,
        entry.kernel,
        _share_of_peak(entry, notes),
        whole(clock and clock / 1e6),
        whole(entry.conditions.watts),
        DASH if joules is None else f"{joules:#.3g}",
        "find" if entry.is_confirmed else "sweep",
        span,
        software(entry.header),
        entry.header["started"][:10],
        link(entry.place),
    ]


def _share_of_peak(entry: CeilingEntry, notes: Footnotes) -> str:
    device = entry.header["device"]
    dtype = entry.dtype.partition(",")[0]
    peak = find_peak(device["name"], dtype, device["compute_units"])
    if peak is None:
        return DASH
    note = notes.mark(f"{peak.origin}, {peak.dtype}, dense {peak.flops / TERA:g} TFLOPS: {peak.source}")
    return Markup(f"{100 * entry.tflops * TERA / peak.flops:.1f} % of {peak.flops / TERA:g}{note}")


def software(header: Mapping[str, Any]) -> str:
    """torch, the vendor's libraries and the driver."""
    device = header["device"]
    named = {"torch": header["environment"]["packages"].get("torch"), **(device.get("versions") or {})}
    texts = [f"{name} {version}" for name, version in named.items() if version and version != "True"]
    return ", ".join([*texts, *([f"driver {device['driver']}"] if device.get("driver") else [])])


def _attention(title: str, entries: Iterable[AttentionEntry]) -> str:
    rows = [_attention_cells(entry) for entry in best_attention(entries)]
    return f"{title}\n\n{markdown(_ATTENTION_COLUMNS, rows, _LEFT)}" if rows else ""


def _attention_cells(entry: AttentionEntry) -> list[str]:
    row = entry.row
    window = "" if row.shape.window is None else f", window {row.shape.window}"
    return [
        entry.device,
        row.problem.dtype,
        row.regime,
        row.problem.direction,
        str(row.shape.head_dim),
        ("causal" if row.shape.causal else "full") + window,
        row.kernel,
        Markup(f"**{100 * entry.share:.1f} %**"),
        significant(row.tflops(row.figure)),
        str(row.shape),
        entry.header["started"][:10],
        link(entry.place),
    ]


def _kernels(title: str, entries: Sequence[KernelEntry]) -> str:
    works = dict.fromkeys((entry.row.work.unit, entry.row.work.convention) for entry in entries)
    counts = [markdown_line(f"{unit}: {convention}.") for unit, convention in works]
    rows = [_kernel_cells(entry) for entry in entries]
    return f"{title}\n\n{' '.join(counts)}\n\n{markdown(_KERNEL_COLUMNS, rows, _LEFT)}"


def _kernel_cells(entry: KernelEntry) -> list[str]:
    row, interval, unit = entry.row, entry.interval, entry.row.work.unit
    share = share_of(entry.rate, row.problem, entry.header)
    return [
        entry.device,
        problem_title(row),
        Markup(f"**{significant(entry.rate)}** {markdown_text(unit)}"),
        interval_cell(interval),
        DASH if share is None else f"{100 * share:.1f} %",
        str(row.shape),
        row.kernel,
        entry.header["started"][:10],
        link(entry.place),
    ]


def _unconfirmed(entries: Iterable[tuple[Entry, str]]) -> str:
    """A line for each log with figures that are ranked with none."""
    reasons: dict[Path, tuple[dict[str, Any], list[str]]] = {}
    for entry, reason in entries:
        reasons.setdefault(entry.place, (entry.header, []))[1].append(reason)
    rows = [
        [header["device"]["name"], shortened(found), header["started"][:10], link(place)]
        for place, (header, found) in sorted(reasons.items())
    ]
    return f"{_UNCONFIRMED}\n\n{markdown(_UNCONFIRMED_COLUMNS, rows, _LEFT)}" if rows else ""


def _legacy(entries: Iterable[LegacyEntry]) -> str:
    ordered = sorted(entries, key=lambda entry: (entry.run.device or "", entry.run.dtype or "", str(entry.place)))
    rows = [cells for entry in ordered for cells in _legacy_rows(entry)]
    if not rows:
        return ""
    title = "## Legacy: mamf-finder's own figures, as it printed them, of unchecked products"
    return f"{title}\n\n{markdown(_LEGACY_COLUMNS, rows, _LEFT)}"


def _legacy_rows(entry: LegacyEntry) -> list[list[str]]:
    run = entry.run
    return [
        [
            run.device or "unknown",
            run.dtype or "unknown",
            f"mamf-finder {run.version or 'of unknown version'}",
            name if run.is_complete else f"{name} (of scouts)",
            significant(best.tflops[name]),
            str(best.shape) if best.shape else "unknown",
            str(run.tried) if run.tried is not None else "unknown",
            "complete" if run.is_complete else "interrupted",
            run.started[:10] if run.started else "unknown",
            link(entry.place),
        ]
        for name, best in run.best.items()
    ]


def link(place: Path) -> Markup:
    return Markup(f"[log]({quote(place.as_posix())})")
