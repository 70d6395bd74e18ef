"""Options that commands share which measure or launch kernels of any operation."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import (
    OPTIONS,
    add,
    add_device_options,
    add_devices_options,
    add_measuring_options,
    add_output_options,
    add_run_options,
)
from mamf.cli.options.values import size
from mamf.operations.attention.shapes import PRESETS


def add_operation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what", "several dtypes and values are measured in every combination")
    add(group, "--operation", required=True)
    add(group, "--shapes", default_text="the operation's default shapes")
    group.add_argument("--preset", metavar="NAME", help="layers of known models in place of --shapes (grouped: moe)")
    add(group, "--set")
    add(group, "--layout", nargs="+")
    add(group, "--dtype", "--kernel")


def add_session_options(
    parser: argparse.ArgumentParser,
    budget: str = OPTIONS["--budget"].default,
    regimes: str = OPTIONS["--regime"].default,
) -> None:
    """Measuring, device, run and report; ``budget`` and ``regimes``: the defaults as help names them."""
    add_measuring_options(parser, regimes)
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser, budget)
    add_output_options(parser)


#: Values of --causal, each with the masks that are measured.
MASKS = {"yes": (True,), "no": (False,), "both": (False, True)}


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shapes of attention", "each option takes several values; all combinations")
    group.add_argument("--preset", choices=list(PRESETS), help="well-known shapes; the other options override it")
    add(group, "--seq-lens")
    group.add_argument("--query-lens", type=size, nargs="+", metavar="S", help="queries (default: as many as keys)")
    add(group, "--head-dims", "--heads")
    group.add_argument("--kv-heads", type=size, nargs="+", metavar="H", help="key heads (default: as many as --heads)")
    add(group, "--batch")
    mask = group.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal",
        choices=list(MASKS),
        nargs="?",
        const="yes",
        help="a query sees no later keys (default: no, or the preset's)",
    )
    mask.add_argument("--no-causal", dest="causal", action="store_const", const="no", help="the same as --causal no")
    group.add_argument(
        "--window", type=size, nargs="+", metavar="W", help="keys seen before, and unless causal after, each query"
    )


def add_launch_options(parser: argparse.ArgumentParser, shapes: str) -> None:
    """``shapes``: the option that names whole shapes, --shape or --shapes."""
    group = parser.add_argument_group("what")
    add(group, "--operation", default_text="the operation of the kernel")
    add(group, shapes, dest="shapes", nargs="+", type=None)
    other = {"--shape": "--shapes", "--shapes": "--shape"}[shapes]
    group.add_argument(other, dest="shapes", nargs="+", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add(group, "--dtype", "--set", "--direction")
    add_shape_options(parser)
