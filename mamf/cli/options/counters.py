"""The options of ``mamf counters``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.choices import COUNTER_COLUMNS, SECTION_SETS
from mamf.cli.options.operations import add_launch_options
from mamf.cli.options.shared import add, add_device_options, add_run_options

EXAMPLES = """examples:
  mamf counters torch.mm --shape 4096x4096x4096
  mamf counters sdpa-flash sdpa-cudnn --seq-lens 4096 --causal --ceiling LOG
  mamf counters cublaslt --variants --shape 8192x8192x8192        its algorithms, by cycles and in burst
  mamf counters torch.mm --shape 4096x4096x4096 --set full --report mm.ncu-rep
  mamf counters --resume LOG
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="*", metavar="KERNEL", help="cycles are relative to those of the first kernel")
    add_launch_options(parser, "--shapes")
    group = parser.add_argument_group("counting")
    group.add_argument("--variants", action="store_true", help="every algorithm that the kernels offer")
    add(group, "--launches", default=5, default_text="5")
    sets = ", ".join(SECTION_SETS)
    group.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="METRIC",
        help=f"additional metrics, by ncu's names; --set {sets} adds ncu's sets",
    )
    group.add_argument(
        "--columns",
        nargs="+",
        choices=COUNTER_COLUMNS,
        default=[],
        help="additional columns in the table (csv and json always have them)",
    )
    group.add_argument("--report", type=Path, metavar="FILE", help="keep ncu's report for its viewer")
    group.add_argument("--ncu", metavar="PATH", help="path to ncu (default: the first on PATH)")
    add(group, "--ceiling", default_text="the ceilings that 'mamf peak' knows")
    group.add_argument("--bandwidth-ceiling", type=Path, metavar="LOG", help="log of 'mamf find --operation bandwidth'")
    add(group, "--time-limit")
    add_device_options(parser)
    add_run_options(parser)
    add(parser, "--format", "--wide")
    parser.set_defaults(regime=None, precision=None, no_flush=None)
