"""Implement the command ``mamf compare A B``: show which rows of run log B are faster or slower than the same rows of
log A.

A and B may each be several logs of repeated runs.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from mamf.cli.reading import open_as_local_path, read_log
from mamf.cli.terminal import add_shared_options, print_document, warn
from mamf.cli.watching import REGRESSION_EXIT_CODE
from mamf.errors import DEFAULT_COMPARISON_TOLERANCE, UsageError, parse_share

EXAMPLES = """examples:
  mamf compare before.jsonl after.jsonl                 exit code 3 if anything is slower by more than 1 %
  mamf compare A B --tolerance 0.5% --format markdown
  mamf compare A1 A2 A3 --against B1 B2 B3              repeated runs of A and B, alternating: detect a loss of 0.5 %
  mamf compare h100.jsonl h200.jsonl --anyway           two devices: the title says so
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="A B",
        help="two logs of runs with rates, or two folders that runs with --devices wrote; ratios are B/A",
    )
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="B",
        help="logs of repeated runs of side B; the logs before this option are then repeated runs of side A",
    )
    parser.add_argument(
        "--tolerance",
        type=parse_share,
        default=DEFAULT_COMPARISON_TOLERANCE,
        metavar="SHARE",
        help="exit with code 3 if a row of B is slower than in A by more than this share, or if all rows together are "
        "slower by more than a quarter of this share (default: 1%%)",
    )
    add_shared_options(
        parser, "--top", default=0, default_text="rows that changed or are undecided, which a smaller N prints too"
    )
    add_shared_options(parser, "--anyway", "--format", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.logs.compare import compare_logs
    from mamf.logs.legacy import read_legacy_log_or_none
    from mamf.report.comparison import make_comparison_document
    from mamf.report.imported import make_compared_run, make_side_by_side_document

    if options.against is None and len(options.logs) != 2:
        raise UsageError(
            f"'mamf compare' takes two logs, not {len(options.logs)}: for several runs per side, write "
            "A1 A2 --against B1 B2"
        )
    sides = (options.logs[:1], options.logs[1:]) if options.against is None else (options.logs, options.against)
    with ExitStack() as open_files:
        files = [[open_files.enter_context(open_as_local_path(path)) for path in side] for side in sides]
        finder_runs = [None if path.is_dir() else read_legacy_log_or_none(path) for side in files for path in side]
        if any(finder_runs):  # Rows of mamf-finder match no rows of other logs, so print the logs side by side.
            if len(finder_runs) != 2:
                raise UsageError(
                    f"{len(finder_runs)} logs are given, and one is from mamf-finder: compare a log of mamf-finder "
                    "with exactly one other log"
                )
            paths_and_runs = zip((path for side in files for path in side), finder_runs, strict=True)
            documents = (make_compared_run(path.name, run or read_log(path)) for path, run in paths_and_runs)
            print_document(options, make_side_by_side_document(*documents, top=options.top or None))
            return 0
        logs_a, logs_b = ([read_log(path) for path in side] for side in files)
    if [path.resolve() for path in sides[0]] == [path.resolve() for path in sides[1]]:
        warn("A and B are the same log, so no row can differ")
    comparison = compare_logs(logs_a, logs_b, options.anyway)
    print_document(options, make_comparison_document(comparison, options.tolerance, options.top))
    return REGRESSION_EXIT_CODE if comparison.is_b_slower(options.tolerance) else 0
