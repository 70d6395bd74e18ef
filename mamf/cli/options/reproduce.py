"""The options of ``mamf reproduce``."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import add, add_device_options, add_run_options
from mamf.cli.options.values import row_count, share

EXAMPLES = """examples:
  mamf reproduce results/nvidia-h200/LOG.jsonl                 the best row of each problem and regime
  mamf reproduce LOG.jsonl --explain                           and the setting that explains a difference
  mamf reproduce --claim "1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd"
  mamf reproduce https://example.org/LOG.jsonl --top 5         a log on the web
  mamf reproduce LOG.jsonl --kernel my_package.kernels:Mine    a kernel by path must be named here
docs/reproducing.md says how it decides.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="LOG", help="run log, imported log of mamf-finder, or the https address of a log"
    )
    parser.add_argument(
        "--claim", nargs="+", metavar="TEXT", help="claims in words: rate, kernel, shape, and dtype, direction, regime"
    )
    rows = parser.add_mutually_exclusive_group()
    add(rows, "--top", default=1, type=row_count, help="rows of each problem and regime, best first (default: 1)")
    rows.add_argument("--all", dest="top", action="store_const", const=None, help="all rows of the log")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="measure claims that are not reproduced in other settings: which matches?",
    )
    parser.add_argument(
        "--tolerance",
        type=share,
        metavar="SHARE",
        help="reproduced: within it; exit code 3: slower by more (default: 2%%)",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 3 also if a claim is undecided")
    add(parser, "--kernel", default_text="those of the log that are installed")
    add_device_options(parser)
    add_run_options(parser, budget="57s, with --explain 2m")
    add(parser, "--format", "--wide")
