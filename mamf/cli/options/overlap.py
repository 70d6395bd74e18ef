"""The options of ``mamf overlap``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options, add_output_options, add_run_options, index

EXAMPLES = """examples:
  mamf overlap                                     every collective beside products, on all devices here
  mamf overlap --beside all_reduce --blocks 0 8 16 --shapes 8192x8192x8192+1GiB
  mamf overlap --flop 4e15 --bytes 1.6e10          how long a step of both takes at best
  mamf overlap --beside to_host copy               on one device
  mamf overlap --resume LOG                        continue after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what", "several values are measured in every combination")
    group.add_argument(
        "--beside",
        nargs="+",
        metavar="WORK",
        help="collectives, copies, passes over arrays (default: all_reduce all_gather reduce_scatter; on one device "
        "to_host to_device copy)",
    )
    add(group, "--shapes", default_text="8192x8192x8192 and 16x8192x8192, +64MiB and +1GiB")
    group.add_argument(
        "--blocks", nargs="+", type=index, metavar="N", help="communication blocks of a collective; 0: the library's"
    )
    add(group, "--dtype")
    add(group, "--time-limit", default_text="3s for each of the four rows of a pair, and 3s to settle")
    group.add_argument("--flop", type=float, metavar="X", help="the shortest step of so many FLOP, such as 4e15")
    group.add_argument("--bytes", type=float, metavar="Y", help="with so many bytes of the other work's buffers")
    add_device_options(parser)
    add_run_options(parser, "none")
    add_output_options(parser)
