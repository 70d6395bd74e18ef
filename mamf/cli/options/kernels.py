"""The options of ``mamf kernels``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options

EXAMPLES = """examples:
  mamf kernels                          kernels by operation: available here, or why not
  mamf kernels --operation attention    of one operation
  mamf kernels --backend cpu            on another device
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--operation", default_text="all operations")
    add_device_options(parser)
    parser.set_defaults(format="table")
