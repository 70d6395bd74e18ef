"""``mamf roofline``: what bounds a kernel, by ceilings of computing and of bandwidth, measured here or given."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from mamf.ceilings.roof import Roofs
from mamf.cli.options import add_device_options, add_output_options, duration
from mamf.cli.printing import print_document
from mamf.cli.reading import read_log
from mamf.cli.resuming import flag
from mamf.cli.roofline_files import EXPORTS, finish, placed, read_given, require_files
from mamf.errors import UsageError
from mamf.logs.roofs import roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.regime_names import CEILINGS
from mamf.report import FORMATS
from mamf.report.roofline import roofline_document
from mamf.report.text import machine_line

_EXAMPLES = """examples:
  mamf roofline                                             measure the device's ceilings: its roofs and balance points
  mamf roofline --dtype bfloat16 fp8 --budget 2m --output roofline.png
  mamf roofline attention.jsonl decode.jsonl --ceiling roofline.jsonl --output roofline.svg
  mamf roofline --ceiling find.jsonl bandwidth.jsonl --export tracelens --export-file h200.json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("rows", type=Path, nargs="*", metavar="LOG", help="logs whose rows are placed under the roof")
    parser.add_argument(
        "--ceiling", type=Path, nargs="+", metavar="LOG", help="take ceilings from these logs, and measure nothing"
    )
    parser.add_argument("--anyway", action="store_true", help="take logs of several cards too; a note says so")
    group = parser.add_argument_group("measuring")
    group.add_argument("--dtype", nargs="+", help="of the compute ceilings, one or several (default: the device's)")
    group.add_argument("--regime", nargs="+", choices=CEILINGS, help="which roofs (default: both)")
    group.add_argument("--budget", type=duration, help="time for all of it (default: 57s a dtype, 86s for bandwidth)")
    group.add_argument("--dry-run", action="store_true", help="say what would be measured and how long, and stop")
    group.add_argument(
        "--log", dest="output", type=Path, metavar="FILE", help="the run log to write (default: a dated name)"
    )
    group.add_argument("--resume", type=Path, metavar="FILE", help="go on with this log, measuring only what it lacks")
    group.add_argument("--notes", type=str, default="", help="free text for the log")
    add_device_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--output", dest="picture", type=Path, metavar="FILE", help="the picture: .png or .svg")
    group.add_argument("--export", choices=EXPORTS, help="write what another tool reads, of what was measured alone")
    group.add_argument("--export-file", type=Path, metavar="FILE", help="where to (default: tracelens.json)")
    group.add_argument("--overwrite", action="store_true", help="replace the picture and the export if they exist")
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    require_files(options)
    given = [read_given(path) for path in options.rows]
    if options.ceiling is None:
        from mamf.cli.roofline_session import measured

        return measured(options, given)
    for option in ("resume", "output", "budget", "dtype", "dry_run"):
        if getattr(options, option):
            name = "--log" if option == "output" else flag(option)
            raise UsageError(f"--ceiling measures nothing: leave {name} out")
    logs = [read_log(path) for path in options.ceiling]
    roofs = roofs_of_logs(logs, options.anyway)
    if options.regime:
        roofs = roofs.only(options.regime)
    points = placed(given, roofs, options.anyway)
    head = [machine_line(logs[0].header), *other_cards(roofs, [*logs, *(each.log for each in given if each.log)])]
    print_document(options, roofline_document(roofs, points, head, top=options.top))
    finish(options, roofs, points, logs[0].header)
    return 0


def other_cards(roofs: Roofs, logs: Iterable[RunLog]) -> list[str]:
    """What --anyway let pass: a line to say so."""
    devices = [(log.header["device"]["name"], log.header["device"]["uuid_hash"]) for log in logs]
    names = list(dict.fromkeys(name for name, _ in devices))
    cards = {uuid for _, uuid in devices if uuid}
    if len(names) > 1:
        return [f"taken anyway: logs of {', '.join(names)}"]
    return (
        [f"taken anyway: logs of {len(cards)} cards of that name, which differ by percents"] if len(cards) > 1 else []
    )
