"""Implement the command ``mamf bandwidth``: measure the memory bandwidth of a device for arrays of several sizes, by
default with every access pattern, such as copy, read and write.
"""

from __future__ import annotations

import argparse

from mamf.cli.planning import add_operation_options
from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import add_session_options, add_shared_options
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthOperation

EXAMPLES = """examples:
  mamf bandwidth                                        every pattern, from the cache to half the memory
  mamf bandwidth --pattern copy read write triad --size 1GiB --regime burst sustained
  mamf bandwidth --resume LOG                           continue after Ctrl-C or kill
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_operation_options(parser, BandwidthOperation(), defaults={"pattern": ACCESS_PATTERNS})
    add_shared_options(parser.add_argument_group("what to measure"), "--kernel")
    add_session_options(parser)


def run_with_options(options: argparse.Namespace) -> int:
    return run_kernel_session(options, Session)
