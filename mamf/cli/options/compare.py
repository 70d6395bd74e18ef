"""The options of ``mamf compare``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.choices import DEFAULT_TOLERANCE
from mamf.cli.options.shared import add
from mamf.cli.options.values import share

EXAMPLES = """examples:
  mamf compare before.jsonl after.jsonl                 exit code 3 if anything is slower by more than 1 %
  mamf compare A B --tolerance 0.5% --format markdown
  mamf compare A1 A2 A3 --against B1 B2 B3              equal runs, measured in turns: detects a uniform loss of 0.5 %
  mamf compare h100.jsonl h200.jsonl --anyway           two devices: the title says so
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="A B",
        help="two logs of any kind, or folders of --devices; the report is B/A",
    )
    parser.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="B",
        help="equal runs of side B; all logs before are equal runs of side A",
    )
    parser.add_argument(
        "--tolerance",
        type=share,
        default=DEFAULT_TOLERANCE,
        metavar="SHARE",
        help="exit code 3 if a row is slower by more, or all rows together by more than a quarter of it (default: 1%%)",
    )
    add(parser, "--top", default=0, default_text="what changed or is undecided")
    add(parser, "--anyway", "--format", "--wide")
