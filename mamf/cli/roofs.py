"""``--ceiling LOG...`` of commands that print rows: their shares of the roof, beside every other column."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.ceilings.roof import Roofs
from mamf.cli.reading import read_log
from mamf.logs.roofs import roofs_of_logs


def add_roof_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ceiling",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="logs of 'mamf roofline' or 'mamf find': each row's share of the roof",
    )


def given_roofs(options: argparse.Namespace) -> Roofs | None:
    """What the logs of ``--ceiling`` give, None without any. Raises UsageError or IncomparableError."""
    return roofs_of_logs(map(read_log, options.ceiling)) if options.ceiling else None
