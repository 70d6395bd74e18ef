"""``mamf backends`` has no options, only examples."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  mamf backends     each backend with its devices, or the reason why it has none
  mamf doctor       what costs performance on the device that is found
  mamf kernels      what can be measured on it
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no option."""
