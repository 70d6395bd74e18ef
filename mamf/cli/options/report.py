"""The options of ``mamf report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add

EXAMPLES = """examples:
  mamf report find.jsonl                              report.html: ceilings, pictures, tables, conditions
  mamf report before.jsonl after.jsonl -o both.html   side by side, and compared
  mamf report FOLDER                                  a folder of 'mamf node', of 'mamf autoprofile', or of logs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", type=Path, nargs="+", metavar="LOG_OR_FOLDER", help="run logs, profiles or folders")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="page to write (default: report.html)",
    )
    add(parser, "--overwrite")
