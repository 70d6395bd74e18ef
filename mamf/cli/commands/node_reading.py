"""``mamf node --from``: the verdict on a node from its logs alone, without torch."""

from __future__ import annotations

import argparse

from mamf.cli.node_verdict import existing, exit_unknown, print_verdict
from mamf.node.gathering import devices_of


def run(options: argparse.Namespace) -> int:
    return exit_unknown(_run, options)


def _run(options: argparse.Namespace) -> int:
    run, devices = devices_of([existing(folder) for folder in options.logs])
    return print_verdict(options, run, devices, options.logs)
