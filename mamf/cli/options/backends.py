"""``mamf backends`` has no options."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Nothing to add."""
