"""The options of ``mamf doctor``."""

from __future__ import annotations

import argparse

from mamf.cli.options import add_device_options

EXAMPLES = """examples:
  mamf doctor                  checks the first accelerator and the machine; changes nothing
  mamf doctor --device 3       another device
  mamf doctor --backend cpu    the CPU
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_device_options(parser)
