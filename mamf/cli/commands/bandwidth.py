"""``mamf bandwidth``: a sweep of that operation, in all patterns by default."""

from __future__ import annotations

import argparse

from mamf.cli.commands.kernels_sweep import KernelsSession, run_session
from mamf.plugins.discovery import operation


def run(options: argparse.Namespace) -> int:
    return run_session(options, KernelsSession, operation("bandwidth"))
