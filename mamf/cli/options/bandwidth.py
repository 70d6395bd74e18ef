"""The options of ``mamf bandwidth``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_session_options
from mamf.operations.bandwidth.shapes import PATTERNS

EXAMPLES = """examples:
  mamf bandwidth                                        every pattern, from the cache to half the memory
  mamf bandwidth --pattern copy read write triad --size 1GiB --regime burst sustained
  mamf bandwidth --resume LOG                           continue after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what", "several dtypes and patterns are measured in every combination")
    group.add_argument("--pattern", nargs="+", help=f"{', '.join(PATTERNS)} (default: all)")
    group.add_argument(
        "--size",
        nargs="+",
        metavar="SIZE",
        help="bytes of each array, such as 1GiB (default: powers of two from the cache to half the memory)",
    )
    add(group, "--dtype", default_text="float32")
    add(group, "--kernel")
    add_session_options(parser)
