"""``mamf node``: every device of this machine, or of many, at once, and a verdict that a gate can act on."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.node_verdict import existing, print_verdict
from mamf.cli.options import Parser, add_width_option, duration, index
from mamf.cli.terminal import warn
from mamf.errors import MamfError, UsageError
from mamf.node.baselines import baseline_of
from mamf.node.gathering import devices_of
from mamf.node.report import FORMATS
from mamf.node.verdict import EXIT_CODES, UNKNOWN
from mamf.operations.matmul.selection import kernel
from mamf.plans import NODE_BUDGET_SECONDS

_EXAMPLES = """examples:
  mamf node                                     all devices here; exit code 0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN
  mamf node --format json --baseline FIND_LOG   for a gate: against a card that is known to be good
  torchrun --nnodes 4 --nproc-per-node gpu -m mamf node
  srun --ntasks-per-node 8 python -m mamf node  a rank for each device; see docs/cluster.md
  mamf node --resume FOLDER                     measure only what its logs lack
  mamf node --from FOLDER [FOLDER...]           the verdict once more, from logs alone
"""
_PATIENCE_SECONDS = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    group = parser.add_argument_group("what")
    group.add_argument("--backend", help="one of 'mamf backends', or package.module:Class (default: the accelerators)")
    group.add_argument("--devices", nargs="+", type=index, metavar="N", help="some of the node's (default: all)")
    group.add_argument("--dtype", help="of the products (default: the device's)")
    group.add_argument("--kernel", nargs="+", help="of the products; the first searches (default: as 'mamf find')")
    group.add_argument("--budget", type=duration, help=f"of each device's find (default: {NODE_BUDGET_SECONDS:.0f}s)")
    group.add_argument("--quick", action="store_true", help="what it does anyway: ceilings by a short find")
    judging = parser.add_argument_group("verdict")
    judging.add_argument(
        "--baseline", nargs="+", type=Path, metavar="LOG", help="of a good device (default: what was contributed)"
    )
    judging.add_argument(
        "--patience", type=duration, default=_PATIENCE_SECONDS, help="a device silent for so long hangs (default: 2m)"
    )
    group = parser.add_argument_group("run")
    group.add_argument("--output-folder", type=Path, metavar="FOLDER", help="of the logs (default: a dated name)")
    group.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the logs of this folder")
    group.add_argument("--from", dest="logs", nargs="+", type=Path, metavar="FOLDER", help="measure nothing: read logs")
    group.add_argument("--dry-run", action="store_true", help="say what would be measured, and stop")
    group.add_argument("--led", nargs=4, type=index, help=argparse.SUPPRESS)
    parser.add_argument("--format", choices=FORMATS, default="table", help="what is printed at the end")
    add_width_option(parser)
    parser.set_defaults(run=run, parser=parser)
    if isinstance(parser, Parser):
        parser.usage_exit_code = EXIT_CODES[UNKNOWN]  # 2 is a bad device


def run(options: argparse.Namespace) -> int:
    try:
        return _run(options)
    except MamfError as error:
        warn(str(error))
        return EXIT_CODES[UNKNOWN]


def _run(options: argparse.Namespace) -> int:
    if options.logs:
        run, devices = devices_of([existing(folder) for folder in options.logs])
        return print_verdict(options, run, devices, options.logs)
    if options.resume and options.output_folder:
        raise UsageError("--resume goes on with its own folder: leave --output-folder out")
    baseline_of(options.baseline or ())  # what is wrong with it is said before minutes pass
    for name in options.kernel or ():
        kernel(name)
    # Imports torch.
    from mamf.cli import node_measuring

    return node_measuring.run(options)
