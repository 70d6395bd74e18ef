"""``mamf show LOG``: print a run log again, in any format."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add_output_options, terminal_width
from mamf.cli.reading import as_file, read_log, reading
from mamf.cli.terminal import say_lines
from mamf.counters.log import counted_in
from mamf.counters.report import render_counters
from mamf.logs.legacy import read_legacy_or_none
from mamf.plans import FindPlan, KernelsPlan
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.report import render_profile
from mamf.report import FORMATS, render, render_find
from mamf.report.imported import render_legacy
from mamf.report.of_run import render_kernels_run


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG")
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    with as_file(options.log) as path:
        return _shown(path, options)


def _shown(path: Path, options: argparse.Namespace) -> int:
    with reading([path]) as seen:
        imported = read_legacy_or_none(path, seen)
    if imported is not None:
        say_lines(render_legacy(options.format, imported, options.top))
        return 0
    if (profiled := read_profile_or_none(path)) is not None:
        say_lines(render_profile(options.format, *profiled, options.top, terminal_width(options)))
        return 0
    log = read_log(path)
    plan, width = log.plan, terminal_width(options)
    if log.counter_records:
        rows, counted = log.measurements, counted_in(log)
        say_lines(render_counters(options.format, rows, counted, log.header, log.summary, width))
        return 0
    if isinstance(plan, KernelsPlan):
        rows, ceilings = log.measurements, log.all_ceilings
        shown = render_kernels_run(
            options.format,
            plan.operation,
            rows,
            ceilings,
            log.header,
            log.summary,
            own_ceilings=log.own_ceilings if plan.confirms else None,
            top=options.top,
            width=width,
        )
        say_lines(shown)
    elif isinstance(plan, FindPlan):
        say_lines(render_find(options.format, log.measurements, log.ceilings, log.header, log.summary, width))
    else:
        say_lines(render(options.format, log.measurements, log.header, log.summary, options.top, width))
    return 0
