"""The options of ``mamf peak``."""

from __future__ import annotations

import argparse

from mamf.choices import PEAK_SOURCES
from mamf.cli.options import add, add_device_options

EXAMPLES = """examples:
  mamf peak                                     sustained, first accelerator, bfloat16
  mamf peak --dtype fp8 --regime burst
  mamf peak --format json                       FLOP/s, for a script
  mamf peak --name "NVIDIA B200"                any listed device, here or not
  mamf peak --name "h100 sxm" --source datasheet
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="DEVICE", help="a device that need not be here: torch's name or a common one")
    add(parser, "--dtype", nargs=None)
    add(parser, "--regime", nargs=None, default="sustained", default_text="sustained")
    parser.add_argument("--source", choices=PEAK_SOURCES, help="take figures of this source alone (default: the best)")
    add(parser, "--anyway", "--format", "--wide")
    add_device_options(parser)
