"""The options of ``mamf counters``."""

from __future__ import annotations

from mamf.cli.options import add, add_device_options, add_run_options
from mamf.cli.parser import NeededUnless, Parser
from mamf.cli.planning import add_launch_options

EXAMPLES = """examples:
  mamf counters torch.mm --shape 4096x4096x4096
  mamf counters sdpa-flash sdpa-cudnn --seq-lens 4096 --causal
  mamf counters --resume LOG
"""


def configure(parser: Parser) -> None:
    parser.add_argument(
        "kernel",
        nargs="*",
        action=NeededUnless,
        alternatives=("--resume",),
        metavar="KERNEL",
        help="cycles are relative to those of the first kernel",
    )
    add_launch_options(parser, "--shapes")
    group = parser.add_argument_group("counting")
    add(group, "--launches", default=5, default_text="5")
    group.add_argument("--ncu", metavar="PATH", help="path to ncu (default: the first on PATH)")
    add(group, "--time-limit")
    add_device_options(parser)
    add_run_options(parser)
    add(parser, "--format", "--wide")
    parser.set_defaults(regime=None, precision=None, no_flush=None)
