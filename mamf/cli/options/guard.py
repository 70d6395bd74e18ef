"""The options of ``mamf guard``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add_device_options, add_output_options, add_run_options

EXAMPLES = """examples:
  mamf guard kernels.toml --update                      measure the baseline of the file
  mamf guard kernels.toml                               exit code 3 if a kernel is slower, 0 if not
  mamf guard kernels.toml --strict                      exit code 3, not 1, if a row is undecided
  mamf guard kernels.toml --junit guard.xml --markdown guard.md
docs/guard.md describes the file and has a workflow.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="TOML file with the kernels and their baseline: docs/guard.md"
    )
    parser.add_argument("--baseline", type=Path, metavar="LOG", help="baseline of this card (default: the file's)")
    parser.add_argument("--update", action="store_true", help="measure a new baseline that replaces the old one")
    parser.add_argument("--strict", action="store_true", help="exit code 3 instead of 1 if a row is undecided")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML, one test per row")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write markdown, for a comment")
    add_device_options(parser)
    add_run_options(parser, budget="none; an unfinished guard exits with 1, or 3 after a regression")
    add_output_options(parser)
