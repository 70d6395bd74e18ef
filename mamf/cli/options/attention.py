"""The options of ``mamf attention``."""

from __future__ import annotations

import argparse

from mamf.cli.options import (
    add,
    add_device_options,
    add_devices_options,
    add_measuring_options,
    add_output_options,
    add_run_options,
)
from mamf.cli.planning import add_parameters
from mamf.operations.attention.operation import Attention

EXAMPLES = """examples:
  mamf attention                                        all installed kernels, bf16, 1k to 16k, head dimension 128
  mamf attention --preset fa3-paper --direction fwd bwd --ceiling LOG
  mamf attention --preset scaling --no-ceiling          eager and compiled kernels until memory is full
  mamf attention --seq-lens 256 512 --head-dims 64      small enough for a CPU
  mamf attention --kernel sdpa-cudnn my.module:MyKernel --baseline sdpa-cudnn
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, Attention())
    add(parser.add_argument_group("what"), "--kernel")
    add_ceiling_options(add_measuring_options(parser))
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser)
    add_output_options(parser)


def add_ceiling_options(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    add(either, "--ceiling", default_text="a search comes first")
    either.add_argument(
        "--no-ceiling",
        action="store_true",
        default=None,
        help="report no shares, and measure the kernels alone",
    )
    group.add_argument(
        "--ceiling-kernel",
        nargs="+",
        default=(),
        metavar="CLASS",
        help="package.module:Class of a ceiling's kernel that is not installed",
    )
    group.add_argument("--baseline", metavar="KERNEL", help="kernel that speedups refer to (default: eager or slowest)")
