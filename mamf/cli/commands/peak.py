"""``mamf peak``: the matmul rate of the device, and the source of the figure."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from mamf.cli.printing import print_document
from mamf.contribution.known_ceilings import KnownPeak, peak
from mamf.measurement import TERA
from mamf.plugins.discovery import open_backend
from mamf.report.document import Answer, Document
from mamf.report.text import WHY_UNKNOWN, rate_text, significant


def run(options: argparse.Namespace) -> int:
    backend = open_backend(options.backend or "auto", options.device or 0)
    known = peak(backend, options.dtype, options.regime, anyway=options.anyway)
    print_document(options, Document("Peak", [Answer([_line(known), known.description])], asdict(known)))
    return 0


def _line(known: KnownPeak) -> str:
    what = f"{known.device}, {known.dtype}, {known.regime or 'theoretical'}: {rate_text(known.tflops, 'TFLOPS')}"
    if known.interval is None:
        return what
    low, high = (significant(value / TERA) for value in (known.interval.low, known.interval.high))
    return f"{what}, 95 % repeat interval: {low} to {high}" if known.interval.is_known else f"{what}, {WHY_UNKNOWN}"
