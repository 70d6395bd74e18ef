"""The sizes of attention, by option."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import add
from mamf.cli.options.values import size
from mamf.operations.attention.shapes import PRESETS

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
