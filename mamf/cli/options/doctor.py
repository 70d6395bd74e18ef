"""The options of ``mamf doctor``."""

from __future__ import annotations

import argparse

from mamf.cli.options.shared import add_device_options


def configure(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser)
