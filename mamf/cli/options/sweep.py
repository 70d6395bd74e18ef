"""The options of ``mamf sweep``."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import (
    add,
    add_device_options,
    add_devices_options,
    add_output_options,
    add_run_options,
)
from mamf.cli.options.values import bound, index, shape, size
from mamf.kernel import DATA
from mamf.operations.matmul.shapes import LAYOUT_OF, PRESETS
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
    add(parser, "--operation", default_text="matmul; other operations have other options")
    _add_shape_options(parser)
    _add_product_options(parser)
    group = parser.add_argument_group("measuring")
    add(group, "--regime", choices=NAMES)
    add(group, "--precision", "--time-limit")
    group.add_argument(
        "--num-warmup-iterations", type=index, metavar="COUNT", help="classic: untimed launches (default: 50)"
    )
    group.add_argument("--num-iterations", type=size, metavar="COUNT", help="classic: timed launches (default: 100)")
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser)
    add(parser, "--ceiling", default_text="rows have no share of the roof")
    add_output_options(parser)


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes", "C[M,N] = A[M,K] @ B[K,N]; a dimension that is not given is 4096")
    for name in "mnk":
        either = group.add_mutually_exclusive_group()
        either.add_argument(f"--{name}", type=size, nargs="+", metavar=name.upper(), help=f"sizes of {name.upper()}")
        either.add_argument(
            f"--{name}-range",
            type=bound,
            nargs=3,
            metavar=("START", "STOP", "STEP"),
            help="STOP is excluded; a START of 0 means STEP",
        )
    add(group, "--shapes", type=shape, default_text="the product of the sizes of M, N and K")
    group.add_argument(
        "--preset", metavar="NAME", help=f"linear layers of known models: {', '.join(PRESETS)}; --m is their tokens"
    )
    group.add_argument(
        "--product", choices=list(LAYOUT_OF), help="pass of the preset's layers, with its layout (default: forward)"
    )
    group.add_argument(
        "--order", choices=ORDERS, help="shuffled (default), so that drift cannot look like a trend, or as given"
    )
    group.add_argument(
        "--reference", type=shape, metavar="MxNxK", help="measure this shape repeatedly to show drift (default: none)"
    )
    group.add_argument(
        "--reference-every", type=size, metavar="COUNT", help="shapes between two visits to it (default: 100)"
    )


def _add_product_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("product")
    add(group, "--dtype", nargs=None)
    add(group, "--out-dtype", "--layout")
    group.add_argument("--data", choices=DATA, help="values of the operands (default: normal)")
    add(group, "--seed", "--fast-accumulation")
    add(group, "--kernel", nargs=None, default_text="the usual kernel for the dtype: torch.mm, scaled_mm or int_mm")
