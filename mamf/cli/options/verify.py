"""The options of ``mamf verify``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_devices_options, add_output_options, add_run_options, index
from mamf.plans import VERIFY_BUDGET_SECONDS
from mamf.regime_names import CHECKING

EXAMPLES = """examples:
  mamf verify                                 all devices, every available kernel, a minute; exit code 3 if one is wrong
  mamf verify --budget 8h --output night.jsonl
  mamf verify --resume night.jsonl            go on after Ctrl-C
  mamf verify --kernel torch.mm my_package.kernels:MyMatmul --dtype bfloat16
  mamf verify --kernel torch.mm --seed 0 --number 17     one problem again, as reports of failures say it
docs/verify-a-card.md says what a clean run excludes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    add(group, "--kernel", default_text="all available ones but those that compile for minutes")
    add(group, "--dtype", default_text="all that the device has")
    add(group, "--regime", choices=CHECKING, help="launches apart at boost, or under load", default_text="both")
    group.add_argument(
        "--largest", metavar="SHAPE", help="matmul shape whose FLOP no problem exceeds (default: by device)"
    )
    group.add_argument("--seed", type=index, metavar="N", help="seed of all random choices (default: 0)")
    group.add_argument("--number", type=index, default=0, metavar="N", help="only this random problem, again and again")
    group = parser.add_argument_group("device")
    add(group, "--backend", "--device")
    add_devices_options(parser, "all")
    add_run_options(parser, budget=f"{VERIFY_BUDGET_SECONDS:.0f}s")
    add_output_options(parser)
