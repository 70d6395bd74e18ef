"""The options of ``mamf sweep``."""

from __future__ import annotations

import argparse

from mamf.cli.options import (
    add,
    add_device_options,
    add_devices_options,
    add_measuring_options,
    add_output_options,
    add_run_options,
    index,
    size,
)
from mamf.cli.planning import add_parameters
from mamf.operations.matmul.operation import Matmul
from mamf.plans import ORDERS
from mamf.regime_names import NAMES

EXAMPLES = """examples:
  mamf sweep --m-range 0 20480 256                    79 shapes Mx4096x4096 in burst
  mamf sweep --m 8192 --n 8192 --k 8192 --regime burst sustained
  mamf sweep --m-range 0 20480 256 --regime classic   mamf-finder's protocol
  mamf sweep --preset decode --top all                linear layers of Llama 8B, 1 to 512 tokens
  mamf sweep --preset llama-8b --product grad-weight  the products of a backward pass
  mamf sweep --resume LOG                             continue after Ctrl-C or kill
  mamf sweep --operation NAME --help                  the options for kernels of another operation
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, Matmul(), several=False)
    group = parser.add_argument_group("what")
    add(group, "--operation", default_text="matmul; other operations have other options")
    add(group, "--kernel", nargs=None, default_text="the usual kernel for the dtype: torch.mm, scaled_mm or int_mm")
    group = add_measuring_options(parser, known=NAMES)
    group.add_argument(
        "--num-warmup-iterations", type=index, metavar="COUNT", help="classic: untimed launches (default: 50)"
    )
    group.add_argument("--num-iterations", type=size, metavar="COUNT", help="classic: timed launches (default: 100)")
    group.add_argument(
        "--order", choices=ORDERS, help="shuffled (default), so that drift cannot look like a trend, or as given"
    )
    group.add_argument(
        "--reference", metavar="MxNxK", help="measure this shape repeatedly to show drift (default: none)"
    )
    group.add_argument(
        "--reference-every", type=size, metavar="COUNT", help="shapes between two visits to it (default: 100)"
    )
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser)
    add(parser, "--ceiling", default_text="rows have no share of the roof")
    add_output_options(parser)
