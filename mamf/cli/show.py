"""``mamf show LOG``: print a run log again, in any format."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.backend import DeviceInfo
from mamf.ceilings.explanation import fall
from mamf.cli.options import add_output_options, terminal_width
from mamf.cli.reading import as_file, read_log, reading
from mamf.cli.roofs import add_roof_option, given_roofs
from mamf.cli.terminal import say_lines
from mamf.counters.log import counted_in
from mamf.counters.report import render_counters
from mamf.errors import UsageError
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.roofs import require_same_card, roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.plans import EXPLAIN, ROOFLINE, ROWS, FindPlan, KernelsPlan, Plan
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.report import render_profile
from mamf.report import FORMATS, render, render_find
from mamf.report.explanation import render_explanation, title
from mamf.report.imported import render_legacy
from mamf.report.of_run import has_own_report, render_kernels_run
from mamf.report.roofline import render_roofline
from mamf.report.text import end_line, machine_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG")
    add_roof_option(parser)
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
    log, roofs = read_log(path), given_roofs(options)
    plan, width = log.plan, terminal_width(options)
    if roofs is not None:
        require_rows(log)
        require_same_card(log, roofs)
    if log.counter_records:
        rows, counted = log.measurements, counted_in(log)
        say_lines(render_counters(options.format, rows, counted, log.header, log.summary, width))
        return 0
    if isinstance(plan, KernelsPlan) and plan.purpose == ROOFLINE and (log.all_ceilings or log.own_ceilings):
        head, foot = [machine_line(log.header)], [end_line(log.summary)]
        say_lines(render_roofline(options.format, roofs_of_logs([log]), [], head, foot, options.top, width))
    elif isinstance(plan, KernelsPlan) and plan.purpose == EXPLAIN and log.measurements:
        rows, head = log.measurements, [machine_line(log.header), title(log.measurements[0])]
        steps = fall(rows, DeviceInfo(**log.header["device"]))
        say_lines(render_explanation(options.format, steps, rows, head, [end_line(log.summary)], width))
    elif isinstance(plan, KernelsPlan):
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
            roofs=roofs,
            known_ceilings=log.known_ceilings,
        )
        say_lines(shown)
    elif isinstance(plan, FindPlan):
        say_lines(render_find(options.format, log.measurements, log.ceilings, log.header, log.summary, width))
    else:
        say_lines(render(options.format, log.measurements, log.header, log.summary, options.top, width, roofs))
    return 0


def require_rows(log: RunLog) -> None:
    """Raises UsageError for a log whose rows stand in no table of shares of the roof."""
    plan = log.plan
    is_of_rows = isinstance(plan, Plan) or (isinstance(plan, KernelsPlan) and plan.purpose == ROWS)
    if not is_of_rows or (isinstance(plan, KernelsPlan) and has_own_report(plan.operation)):
        raise UsageError(
            f"{log.path}: --ceiling shows shares of the rows of a sweep; those of others are shown by 'mamf roofline "
            "ROWS --ceiling LOG'"
        )
