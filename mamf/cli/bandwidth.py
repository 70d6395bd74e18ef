"""``mamf bandwidth``: the operation of that name, with the options that people expect of it."""

from __future__ import annotations

import argparse

from mamf.cli import kernels_sweep
from mamf.cli.kernels_options import add_common_options

_OPERATION = "bandwidth"
_EXAMPLES = """examples:
  mamf bandwidth                                        copy, from inside the cache to half the memory
  mamf bandwidth --pattern copy read write triad --size 1GiB --regime burst sustained
  mamf bandwidth --resume LOG                           go on after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    group = parser.add_argument_group("what", "several dtypes and patterns are measured in every combination")
    group.add_argument("--pattern", nargs="+", help="copy, read, write, triad (default: the operation's own)")
    group.add_argument("--size", nargs="+", metavar="SIZE", help="of each array, such as 1GiB (default: many)")
    add_common_options(group)
    kernels_sweep.add_run(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    options.command = options.operation = _OPERATION
    options.shapes = options.size
    options.set = options.pattern and [f"pattern={','.join(options.pattern)}"]
    return kernels_sweep.run(options)
