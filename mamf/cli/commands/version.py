"""``mamf --version``."""

from __future__ import annotations

import argparse

from mamf.cli.terminal import say
from mamf.machine.environment import package_version


def run(options: argparse.Namespace) -> int:
    say(f"mamf {package_version('mamf')}")
    return 0
