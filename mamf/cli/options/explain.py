"""The options of ``mamf explain``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options, add_output_options, add_run_options

EXAMPLES = """examples:
  mamf explain --ceiling find.jsonl                         the winner of that find
  mamf explain                                              the winner of the last find here
  mamf explain --shape 8192x8192x8192 --dtype float16 --picture waterfall.png
"""


def configure(parser: argparse.ArgumentParser) -> None:
    product = parser.add_argument_group("product")
    add(product, "--ceiling", nargs=None, default_text="the last find on this device")
    add(product, "--shape", default_text="the winner of the find")
    add(product, "--dtype", nargs=None)
    add(product, "--kernel", nargs=1, default_text="the winner's, or the library's")
    add_run_options(parser, budget="30s")
    add_device_options(parser)
    add(parser, "--picture", "--overwrite")
    add_output_options(parser)
