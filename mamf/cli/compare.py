"""``mamf compare A B``: what got faster or slower between two run logs, and what their samples cannot tell."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add_width_option, share, terminal_width
from mamf.cli.reading import as_file, read_log
from mamf.cli.terminal import say_lines
from mamf.counters.comparison import compare_counters, render_counter_pairs
from mamf.errors import UsageError
from mamf.logs.compare import DEFAULT_TOLERANCE, compare
from mamf.profiling.comparison import render_profiles
from mamf.profiling.log import read_profile_or_none
from mamf.report import FORMATS
from mamf.report.comparison import render_comparison

_REGRESSION = 3
_EXAMPLES = """examples:
  mamf compare before.jsonl after.jsonl                 exit code 3 if anything is slower by more than 1 %
  mamf compare A B --tolerance 0.5% --format markdown
  mamf compare flash.jsonl eager.jsonl                  two profiles: the step by class, side by side
  mamf compare mm-before.jsonl mm-after.jsonl           two logs of counters: their cycles
  mamf compare h100.jsonl h200.jsonl --anyway           two devices: the title says so
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("a", type=Path, metavar="A", help="a run log of any kind")
    parser.add_argument("b", type=Path, metavar="B", help="another, whose speed is told as a ratio to A's")
    parser.add_argument(
        "--tolerance",
        type=share,
        default=DEFAULT_TOLERANCE,
        help="within it rows are the same; beyond it a slower one is a regression, exit code 3 (default: 1%%)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="compare other devices, dtypes or regimes too; the title says which"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="what is printed (default: table)")
    add_width_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    with as_file(options.a) as a, as_file(options.b) as b:
        profile_a, profile_b = read_profile_or_none(a), read_profile_or_none(b)
        if profile_a and profile_b:
            width = terminal_width(options)
            say_lines(render_profiles(options.format, profile_a, profile_b, options.anyway, width))
            return 0
        if profile_a or profile_b:
            raise UsageError("one of the logs is a profile: compare it with another profile")
        log_a, log_b = read_log(a), read_log(b)
    if log_a.counter_records and log_b.counter_records:
        compared = compare_counters(log_a, log_b, options.anyway)
        say_lines(render_counter_pairs(options.format, compared, options.tolerance, terminal_width(options)))
        return _REGRESSION if compared.regressions(options.tolerance) else 0
    comparison = compare(log_a, log_b, options.anyway)
    say_lines(render_comparison(options.format, comparison, options.tolerance, terminal_width(options)))
    return _REGRESSION if comparison.regressions(options.tolerance) else 0
