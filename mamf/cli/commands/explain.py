"""``mamf explain``: the gap between the datasheet's FLOPS and one product, measured in half a minute."""

from __future__ import annotations

import argparse

from mamf.cli.explain_session import measure_product
from mamf.cli.roofline_files import read_given, require_files
from mamf.errors import UsageError


def run(options: argparse.Namespace) -> int:
    require_files(options)
    if options.ceiling and options.shape:
        raise UsageError("--ceiling determines the shape: leave --shape out")
    given = [read_given(path) for path in options.rows]
    return measure_product(options, given)
