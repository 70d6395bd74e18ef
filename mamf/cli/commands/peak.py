"""``mamf peak``: the matmul rate of a device, here or by name, and the source of the figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter

from mamf.cli.terminal import print_document
from mamf.contribution.known_ceilings import KnownPeak, peak, peaks_by_name
from mamf.errors import UsageError
from mamf.measurement import TERA
from mamf.plugins.discovery import open_backend
from mamf.report.document import Answer, Column, Document, Table
from mamf.report.text import WHY_UNKNOWN, interval_cell, rate_text, significant


def run(options: argparse.Namespace) -> int:
    if options.name is not None and (options.backend or options.device is not None):
        raise UsageError("--name looks a device up: leave out --backend and --device")
    print_document(options, _answer(options))
    return 0


def _answer(options: argparse.Namespace) -> Document:
    if options.name is not None:
        known = peaks_by_name(options.name, options.dtype, options.regime, options.source)
    else:
        backend = open_backend(options.backend or "auto", options.device or 0)
        known = [peak(backend, options.dtype, options.regime, anyway=options.anyway, source=options.source)]
    table = Table(_COLUMNS, known, key="known", shown=known if len(known) > 1 else [])
    best = known[0]
    origin = [] if best.reference in best.description else [f"from: {best.reference}"]
    return Document("Peak", [table, Answer([_line(best), best.description, *origin])], asdict(best))


def _line(known: KnownPeak) -> str:
    kind = known.regime or ("theoretical" if known.source == "datasheet" else known.source)
    what = f"{known.device}, {known.dtype}, {kind}: {rate_text(known.tflops, 'TFLOPS')}"
    if known.interval is None:
        return what
    low, high = (significant(value / TERA) for value in (known.interval.low, known.interval.high))
    return f"{what}, 95 % repeat interval: {low} to {high}" if known.interval.is_known else f"{what}, {WHY_UNKNOWN}"


_COLUMNS: Sequence[Column[KnownPeak]] = (
    Column("source", "source", attrgetter("source"), left=True),
    Column("tier", "tier", attrgetter("tier"), left=True),
    Column("regime", "regime", attrgetter("regime"), left=True),
    Column("tflops", "TFLOPS", attrgetter("tflops"), significant),
    Column("", "interval", attrgetter("interval"), lambda interval: interval_cell(interval, 1 / TERA)),
    Column("reference", "from", attrgetter("reference"), left=True, importance=1),
)
