"""``mamf roofline``: what bounds a kernel, from measured or given ceilings of compute and bandwidth."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from mamf.ceilings.roof import Roofs
from mamf.cli.printing import print_document
from mamf.cli.reading import read_log
from mamf.cli.resuming import flag
from mamf.cli.roofline_files import place_rows, read_given, require_files, write_files
from mamf.cli.roofline_session import measure_roofs
from mamf.errors import UsageError
from mamf.logs.comparability import roofs_of_logs
from mamf.logs.run_log import RunLog
from mamf.report.roofline import roofline_document
from mamf.report.text import machine_line


def run(options: argparse.Namespace) -> int:
    require_files(options)
    given = [read_given(path) for path in options.rows]
    if options.ceiling is None:
        return measure_roofs(options, given)
    for option in ("resume", "output", "budget", "dtype", "dry_run"):
        if option in options.given:
            raise UsageError(f"--ceiling measures nothing: leave {flag(option)} out")
    logs = [read_log(path) for path in options.ceiling]
    roofs = roofs_of_logs(logs, options.anyway)
    if options.regime:
        roofs = roofs.only(options.regime)
    points = place_rows(given, roofs, options.anyway)
    head = [machine_line(logs[0].header), *other_cards(roofs, [*logs, *(each.log for each in given if each.log)])]
    print_document(options, roofline_document(roofs, points, head, top=options.top))
    write_files(options, roofs, points, logs[0].header)
    return 0


def other_cards(roofs: Roofs, logs: Iterable[RunLog]) -> list[str]:
    """A line for logs that --anyway accepted."""
    devices = [(log.header["device"]["name"], log.header["device"]["uuid_hash"]) for log in logs]
    names = list(dict.fromkeys(name for name, _ in devices))
    cards = {uuid for _, uuid in devices if uuid}
    if len(names) > 1:
        return [f"accepted with --anyway: logs of {', '.join(names)}"]
    return (
        [f"accepted with --anyway: logs of {len(cards)} cards of this model, which differ by percents"]
        if len(cards) > 1
        else []
    )
