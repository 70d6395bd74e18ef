"""Implement the command ``mamf peak``: print the highest known matmul rate of a device, and say whether the rate was
measured on this machine, contributed by other users, or taken from a datasheet. The device need not be in this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mamf.cli.terminal import add_device_options, add_shared_options, print_document
from mamf.errors import PEAK_SOURCES, UsageError
from mamf.measurement import TERA, Rate

if TYPE_CHECKING:
    from mamf.report.document import Column, Document

EXAMPLES = """examples:
  mamf peak                                     sustained, first accelerator, bfloat16
  mamf peak --dtype fp8 --regime burst
  mamf peak --format json                       FLOP/s, for a script
  mamf peak --name "NVIDIA B200"                a listed device, which this machine need not have
  mamf peak --name "h100 sxm" --source datasheet
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        metavar="DEVICE",
        help="device to look up, such as 'h100 sxm' or the name that torch reports; it need not be in this machine",
    )
    add_shared_options(parser, "--dtype", nargs=None)
    add_shared_options(parser, "--regime", nargs=None, default="sustained", default_text="sustained")
    parser.add_argument(
        "--source",
        choices=PEAK_SOURCES,
        help="use only figures from this source: measured on this machine, contributed to results/, published by "
        "other people (unchecked), or the datasheet (default: the first of these that has a figure)",
    )
    add_shared_options(parser, "--anyway", "--format", "--wide")
    add_device_options(parser)


def run_with_options(options: argparse.Namespace) -> int:
    if options.name is not None and (options.backend or options.device is not None):
        raise UsageError(
            "--name cannot be combined with --backend or --device, because it may name a device of another machine"
        )
    print_document(options, _make_peak_document(options))
    return 0


def _make_peak_document(options: argparse.Namespace) -> Document:
    from mamf.contribution.known_ceilings import find_peaks_by_name, peak
    from mamf.plugins.discovery import open_backend
    from mamf.report.document import Answer, Column, Document, Table, format_four_digits, format_interval

    if options.name is not None:
        rates = find_peaks_by_name(options.name, options.dtype, options.regime, options.source)
    else:
        backend = open_backend(options.backend or "auto", options.device or 0)
        rates = [peak(backend, options.dtype, options.regime, anyway=options.anyway, source=options.source)]
    columns: Sequence[Column[Rate]] = (
        Column("", "source", _describe_source, is_left_aligned=True),
        Column("source", "", attrgetter("source")),
        Column("tier", "", attrgetter("tier")),
        Column("regime", "regime", attrgetter("regime"), is_left_aligned=True),
        Column("tflops", "TFLOPS", attrgetter("tflops"), format_four_digits),
        Column("", "interval", attrgetter("interval"), format_interval),
        Column("reference", "from", attrgetter("reference"), is_left_aligned=True, drop_priority=1),
    )
    table = Table(columns, rates, key="known", shown_rows=rates if len(rates) > 1 else [])
    best_rate = rates[0]
    reference_lines = [] if best_rate.reference in best_rate.description else [f"from: {best_rate.reference}"]
    return Document(
        "Peak",
        [table, Answer([_format_rate_sentence(best_rate), best_rate.description, *reference_lines])],
        _make_json_record(best_rate),
    )


def _describe_source(rate: Rate) -> str:
    """Describe the source of a rate. If the rate does not come from the log of a complete run, also give its tier,
    which says how far it can be trusted.
    """
    if rate.tier.startswith(rate.source):
        return rate.tier
    return rate.source if rate.tier == "complete" else f"{rate.source}, {rate.tier}"


def _make_json_record(rate: Rate) -> dict[str, Any]:
    """Return the JSON object that --format json prints. The unit of its ``flops`` and ``interval`` is FLOP/s, not
    TFLOPS.
    """
    copied_fields = ("regime", "source", "description", "dtype", "device", "tier", "reference", "date")
    interval = rate.interval and [rate.interval.low * TERA, rate.interval.high * TERA, rate.interval.coverage]
    return {
        "flops": rate.flops,
        "interval": interval and dict(zip(("low", "high", "coverage"), interval, strict=True)),
        **{name: getattr(rate, name) for name in copied_fields},
    }


def _format_rate_sentence(rate: Rate) -> str:
    from mamf.report.document import UNKNOWN_INTERVAL_REASON, format_four_digits, format_rate

    rate_kind = rate.regime or ("theoretical" if rate.source == "datasheet" else rate.source)
    sentence = f"{rate.device}, {rate.dtype}, {rate_kind}: {format_rate(rate.tflops, 'TFLOPS')}"
    if rate.interval is None:
        return sentence
    low, high = format_four_digits(rate.interval.low), format_four_digits(rate.interval.high)
    if rate.interval.is_known:
        return f"{sentence}, 95 % repeat interval: {low} to {high}"
    return f"{sentence}, {UNKNOWN_INTERVAL_REASON}"
