"""Options of commands that launch single kernels: any operation by its shapes, attention by its sizes too."""

from __future__ import annotations

import argparse

from mamf.cli.options.attention_shapes import add_shape_options
from mamf.cli.options.shared import add


def add_launch_options(parser: argparse.ArgumentParser, shapes: str) -> None:
    """``shapes``: the option that names whole shapes, --shape or --shapes."""
    group = parser.add_argument_group("what")
    add(group, "--operation", default_text="the operation of the kernel")
    add(group, shapes, dest="shapes", nargs="+", type=None)
    other = {"--shape": "--shapes", "--shapes": "--shape"}[shapes]
    group.add_argument(other, dest="shapes", nargs="+", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add(group, "--dtype", "--set", "--direction")
    add_shape_options(parser)
