"""The options of ``mamf kernels``."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import add, add_device_options


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--operation", default_text="all operations")
    add_device_options(parser)
    parser.set_defaults(format="table")
