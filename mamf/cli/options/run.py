"""The options of ``mamf run``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options, add_launch_options

EXAMPLES = """examples:
  mamf run torch.mm --shape 256x256x256                             launched once and verified; any kernel
  mamf run sdpa-flash --seq-lens 4096 --causal --direction bwd
  ncu --clock-control none --profile-from-start off mamf run torch.mm --shape 4096x4096x4096
  nsys profile --capture-range=cudaProfilerApi mamf run flash-attn-4 --seq-lens 8192
  rocprofv3 --selected-regions --kernel-trace -- mamf run torch.mm --shape 4096x4096x4096
  compute-sanitizer --tool memcheck mamf run my.module:MyKernel --shape 256x256x256
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help="one of 'mamf kernels', or package.module:Class")
    add_launch_options(parser, "--shape")
    add(parser, "--launches", default=1, default_text="1")
    parser.add_argument("--no-verify", action="store_true", help="do not check results")
    parser.add_argument(
        "--kernel-names", action="store_true", help="name the GPU kernels, from another launch under torch.profiler"
    )
    parser.add_argument(
        "--determinism", action="store_true", help="launch again, and report whether all results are equal bit by bit"
    )
    add_device_options(parser)
