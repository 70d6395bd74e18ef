"""``mamf bandwidth``: a sweep of that operation, in all patterns by default."""

from __future__ import annotations

import argparse

from mamf.cli.session import Session, run_kernels
from mamf.operations.bandwidth.shapes import PATTERNS

_OPERATION = "bandwidth"


def run(options: argparse.Namespace) -> int:
    options.operation, options.shapes = _OPERATION, options.size
    options.set = [f"pattern={','.join(options.pattern or PATTERNS)}"]
    return run_kernels(options, Session)
