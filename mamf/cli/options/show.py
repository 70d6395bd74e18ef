"""The options of ``mamf show``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options.shared import add, add_output_options

EXAMPLES = """examples:
  mamf show LOG                         the report that the run printed
  mamf show LOG --format csv --top all  every row, for a program
  mamf show LOG --ceiling FIND_LOG      rows as shares of the ceilings in another log
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="a run log; the logs of one run; or a folder of --devices, of 'mamf node' or of ranks",
    )
    add(parser, "--ceiling", default_text="rows have no share of the roof")
    add_output_options(parser)
