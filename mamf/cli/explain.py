"""``mamf explain``: where the datasheet's FLOPS went, step by step, measured on one product in half a minute."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.options import add_device_options, add_output_options, duration, shape
from mamf.cli.roofline_files import read_given, require_files
from mamf.errors import UsageError
from mamf.plans import EXPLAIN
from mamf.report import FORMATS

_EXAMPLES = """examples:
  mamf explain --ceiling find.jsonl                         on the winner of that find
  mamf explain                                              on what 'mamf find' left here, else on that of a short find
  mamf explain --shape 8192x8192x8192 --dtype float16 --output waterfall.png
  mamf explain --ceiling find.jsonl attention.jsonl         and down to the best of my own kernels
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "rows", type=Path, nargs="*", metavar="LOG", help="logs of runs and profiles: the best of each comes last"
    )
    product = parser.add_argument_group("product")
    product.add_argument("--ceiling", type=Path, metavar="LOG", help="the log of a find, whose winner is explained")
    product.add_argument("--shape", type=shape, metavar="MxNxK", help="in place of a winner")
    product.add_argument("--dtype", help="(default: the device's, or the log's)")
    product.add_argument(
        "--kernel",
        nargs=1,
        help="of 'mamf kernels', or package.module:Class (default: the winner's, else the library's)",
    )
    product.add_argument("--anyway", action="store_true", help="take logs of another card too")
    group = parser.add_argument_group("run")
    group.add_argument("--budget", type=duration, help="time for all of it, without a find (default: 30s)")
    group.add_argument("--dry-run", action="store_true", help="say what would be measured, and stop")
    group.add_argument(
        "--log", dest="output", type=Path, metavar="FILE", help="the run log to write (default: a dated name)"
    )
    group.add_argument("--resume", type=Path, metavar="FILE", help="go on with this log, measuring only what it lacks")
    group.add_argument("--notes", type=str, default="", help="free text for the log")
    add_device_options(parser)
    parser.add_argument("--output", dest="picture", type=Path, metavar="FILE", help="the picture: .png or .svg")
    parser.add_argument("--overwrite", action="store_true", help="replace the picture if it exists")
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser, command=EXPLAIN, export=None, export_file=None)


def run(options: argparse.Namespace) -> int:
    require_files(options)
    if options.resume and options.output:
        raise UsageError("--resume continues its own file: leave --log out")
    if options.ceiling and options.shape:
        raise UsageError("--ceiling names the shape: leave --shape out")
    given = [read_given(path) for path in options.rows]
    from mamf.cli.explain_session import measured

    return measured(options, given)
