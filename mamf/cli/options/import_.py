"""The options of ``mamf import``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add

EXAMPLES = """examples:
  mamf import out.txt                                   writes out.jsonl here
  mamf import logs/*.txt --output-folder imported
  mamf import out.txt.gz && mamf show out.jsonl         packed output too; every command that reads logs takes it
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="FILE", help="output or log of mamf-finder, packed (.gz) or not"
    )
    add(parser, "--output-folder", default=Path(), default_text="the current folder")
