"""``mamf bandwidth``: a sweep of that operation, in all patterns by default."""

from __future__ import annotations

import argparse

from mamf.cli.session import Session, run_kernels
from mamf.plugins.discovery import operation


def run(options: argparse.Namespace) -> int:
    return run_kernels(options, Session, operation("bandwidth"))
