"""Options of commands that measure kernels of any operation."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import (
    OPTIONS,
    add,
    add_device_options,
    add_measuring_options,
    add_output_options,
    add_run_options,
)


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
    add_run_options(parser, budget)
    add_output_options(parser)
