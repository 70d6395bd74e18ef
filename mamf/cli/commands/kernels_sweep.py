"""``mamf sweep --operation NAME``: kernels of any operation over shapes."""

from __future__ import annotations

import argparse

from mamf.cli.session import Session, run_kernels


def run(options: argparse.Namespace) -> int:
    return run_kernels(options, Session)
