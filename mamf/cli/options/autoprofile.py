"""The options of ``mamf autoprofile``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add, add_device_options

EXAMPLES = """examples:
  mamf autoprofile                                      ./autoprofile: ceilings, attention, a model step, SUMMARY.md
  mamf autoprofile --output-folder h200 --budget 10m
  mamf report autoprofile                               the folder as one page
Repeat the command to measure what is missing.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--output-folder", default=Path("autoprofile"), default_text="autoprofile")
    add(parser, "--dtype", nargs=None)
    add(parser, "--budget", default_text="270s, 150s on a CPU")
    add_device_options(parser)
