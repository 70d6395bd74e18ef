"""The options of ``mamf find``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add, add_device_options, add_devices_options, add_output_options, add_run_options
from mamf.cli.planning import add_parameters
from mamf.operations.matmul.operation import Matmul
from mamf.plans import DEFAULT_BUDGET_SECONDS

EXAMPLES = """examples:
  mamf find                                     burst and sustained ceilings of the first accelerator
  mamf find --dtype bfloat16 float16 fp8        one after the other, one log each
  mamf find --kernel torch.mm cublaslt          also search cuBLASLt's algorithms
  mamf find --quick                             both in 13 s
  mamf find --operation NAME --help             the options for ceilings of another operation
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, Matmul(), has_shapes=False, several=False)
    group = parser.add_argument_group("what")
    add(group, "--operation", default_text="matmul; other operations have other options")
    add(group, "--dtype")
    add(group, "--kernel", default_text="all but those that compile for minutes")
    search = parser.add_argument_group("search")
    add(search, "--regime", default_text="both")
    search.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="both ceilings in 15s, in fewer rounds, with the kernel that is fastest in a short trial",
    )
    add(search, "--precision")
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser, budget=f"{DEFAULT_BUDGET_SECONDS:.0f}s per dtype")
    add_output_options(parser)
