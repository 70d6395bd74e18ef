"""``mamf compare A B``: what got faster or slower between two runs, or two sets of equal runs."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from mamf.cli.options import add_width_option, share
from mamf.cli.printing import print_document
from mamf.cli.reading import as_file, read_log
from mamf.errors import UsageError
from mamf.logs.compare import DEFAULT_TOLERANCE, compare
from mamf.profiling.comparison import profiles_document
from mamf.profiling.counters.comparison import compare_counters, counters_comparison_document
from mamf.profiling.log import read_profile_or_none
from mamf.report import FORMATS
from mamf.report.comparison import comparison_document

_REGRESSION = 3
_EXAMPLES = """examples:
  mamf compare before.jsonl after.jsonl                 exit code 3 if anything is slower by more than 1 %
  mamf compare A B --tolerance 0.5% --format markdown
  mamf compare A1 A2 A3 --against B1 B2 B3              equal runs, measured in turns: finds a uniform loss of 0.5 %
  mamf compare flash.jsonl eager.jsonl                  two profiles: the step by class, side by side
  mamf compare mm-before.jsonl mm-after.jsonl           two logs of counters: their cycles
  mamf compare h100.jsonl h200.jsonl --anyway           two devices: the title says so
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("logs", type=Path, nargs="+", metavar="A B", help="two run logs of any kind; B/A is printed")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="B",
        help="runs of side B; then all before it are equal runs of side A",
    )
    parser.add_argument(
        "--tolerance",
        type=share,
        default=DEFAULT_TOLERANCE,
        help="exit code 3 for a row slower by more than it, and for all rows together slower by more than a quarter "
        "(default: 1%%)",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="compare other devices, dtypes or regimes too; the title says which"
    )
    parser.add_argument("--format", choices=FORMATS, default="table", help="what is printed (default: table)")
    add_width_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    if options.against is None and len(options.logs) != 2:
        raise UsageError(
            f"two logs are compared, not {len(options.logs)}; of several runs per side: A1 A2 --against B1 B2"
        )
    sides = (options.logs[:1], options.logs[1:]) if options.against is None else (options.logs, options.against)
    with ExitStack() as opened:
        files = [[opened.enter_context(as_file(path)) for path in side] for side in sides]
        found = [read_profile_or_none(path) for side in files for path in side]
        profiles = [each for each in found if each]
        if len(profiles) == len(found) == 2:
            print_document(options, profiles_document(profiles[0], profiles[1], options.anyway))
            return 0
        if profiles:
            raise UsageError("one of the logs is a profile: compare it with another profile")
        logs_a, logs_b = ([read_log(path) for path in side] for side in files)
    if logs_a[0].counter_records and logs_b[0].counter_records:
        if options.against:
            raise UsageError("logs of counters are compared two at a time: leave --against out")
        compared = compare_counters(logs_a[0], logs_b[0], options.anyway)
        print_document(options, counters_comparison_document(compared, options.tolerance))
        return _REGRESSION if compared.regressions(options.tolerance) else 0
    comparison = compare(logs_a, logs_b, options.anyway)
    print_document(options, comparison_document(comparison, options.tolerance))
    return _REGRESSION if comparison.is_slower(options.tolerance) else 0
