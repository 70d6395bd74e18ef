"""The options of ``mamf explain``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options.shared import add, add_device_options, add_output_options, add_run_options

EXAMPLES = """examples:
  mamf explain --ceiling find.jsonl                         the winner of that find
  mamf explain                                              the winner of the last find here, or of a short one
  mamf explain --shape 8192x8192x8192 --dtype float16 --picture waterfall.png
  mamf explain --ceiling find.jsonl attention.jsonl         and the best of your own kernels
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rows", type=Path, nargs="*", metavar="LOG", help="logs of runs and profiles: the best of each is the last step"
    )
    product = parser.add_argument_group("product")
    add(product, "--ceiling", nargs=None, default_text="the last find on this device, or a short one")
    add(product, "--shape", default_text="the winner of the find")
    add(product, "--dtype", nargs=None)
    add(product, "--kernel", nargs=1, default_text="the winner's, or the library's")
    add(product, "--anyway")
    add_run_options(parser, budget="30s, without a find")
    add_device_options(parser)
    add(parser, "--picture", "--overwrite")
    add_output_options(parser)
    parser.set_defaults(export=None, export_file=None)
