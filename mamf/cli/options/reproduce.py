"""The options of ``mamf reproduce``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options, add_run_options, share
from mamf.cli.parser import NeededUnless

EXAMPLES = """examples:
  mamf reproduce results/nvidia-h200/LOG.jsonl                 the best row of each problem and regime
  mamf reproduce --claim "1613 TFLOPS flash-attn-4 b1h16q16384d128c fwd"
  mamf reproduce https://example.org/LOG.jsonl --top 5         a log on the web, five rows of each
  mamf reproduce LOG.jsonl --kernel my_package.kernels:Mine    a kernel by path must be named here
docs/reproducing.md says how it decides.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        action=NeededUnless,
        alternatives=("--claim", "--resume"),
        metavar="LOG",
        help="run log, or its https address",
    )
    parser.add_argument("--claim", nargs="+", metavar="TEXT", help="claims in words: rate, kernel, shape, then fields")
    add(parser, "--top", default=1, help="claims of a log: best rows of each problem and regime, or 'all' (default: 1)")
    parser.add_argument(
        "--tolerance", type=share, metavar="SHARE", help="share that counts as reproduced (default: 2%%)"
    )
    add(parser, "--kernel", default_text="those of the log that are installed")
    add_device_options(parser)
    add_run_options(parser, budget="57s")
    add(parser, "--format", "--wide")
