"""The options of ``mamf node``."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.choices import UNKNOWN, VERDICT_EXIT_CODES
from mamf.cli.options import add, duration, index
from mamf.cli.parser import Parser
from mamf.plans import NODE_BUDGET_SECONDS, VERIFY_BUDGET_SECONDS

EXAMPLES = """examples:
  mamf node                                     all devices here; exit code 0 OK, 1 WARN, 2 CRITICAL, 3 UNKNOWN
  mamf node --format json --baseline FIND_LOG   for a gate: compare with a card that is known to be good
  srun --ntasks-per-node 1 mamf node --output-folder FOLDER   on several machines, one folder each
  mamf node --from FOLDER [FOLDER...]           one verdict over one or more machines, from logs alone
"""


_PATIENCE_SECONDS = 120.0


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    add(group, "--backend")
    add(group, "--devices", default_text="all")
    add(group, "--dtype", nargs=None)
    add(group, "--kernel", default_text="all but those that compile for minutes; the first one searches")
    alone = "for what each device measures alone; --verify, copies between devices and the start come on top"
    add(group, "--budget", default_text=f"{NODE_BUDGET_SECONDS:.0f}s {alone}")
    group.add_argument(
        "--verify",
        type=duration,
        nargs="?",
        const=VERIFY_BUDGET_SECONDS,
        metavar="TIME",
        help=f"check whole outputs as 'mamf verify' (default time: {VERIFY_BUDGET_SECONDS:.0f}s)",
    )
    group.add_argument("--overlap", action="store_true", help="afterwards 'mamf overlap': products beside collectives")
    judging = parser.add_argument_group("verdict")
    judging.add_argument(
        "--baseline", nargs="+", type=Path, metavar="LOG", help="logs of a good device (default: contributed ceilings)"
    )
    add(judging, "--patience", default=_PATIENCE_SECONDS, default_text="2m")
    group = parser.add_argument_group("run")
    add(group, "--output-folder", default_text="a name with the date")
    add(group, "--from", dest="logs", nargs="+")
    add(group, "--dry-run")
    group.add_argument("--led", nargs=2, type=index, help=argparse.SUPPRESS)
    add(parser, "--format", "--wide")
    if isinstance(parser, Parser):
        parser.usage_exit_code = VERDICT_EXIT_CODES[UNKNOWN]  # 2 is a bad device
