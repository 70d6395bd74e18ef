"""The options of ``mamf peak``."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import add, add_device_options

_EXAMPLES = """examples:
  mamf peak                                     sustained, first accelerator, bfloat16
  mamf peak --dtype fp8 --regime burst
  mamf peak --format json                       FLOP/s, for a script
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add(parser, "--dtype", nargs=None)
    add(parser, "--regime", nargs=None, default="sustained", default_text="sustained")
    add(parser, "--anyway")
    add(parser, "--format", choices=("table", "json"))
    add_device_options(parser)
