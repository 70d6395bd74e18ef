"""``mamf report LOG...``: logs and folders as one html page."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from mamf.cli.reading import as_file
from mamf.cli.terminal import say
from mamf.files import create_whole, write_whole
from mamf.machine.garbage import no_garbage_collection
from mamf.pages.report import report_of
from mamf.report.charts.picture import exists
from mamf.report.page import render_page


def run(options: argparse.Namespace) -> int:
    if options.output.exists() and not options.overwrite:
        raise exists(options.output)
    with ExitStack() as opened, no_garbage_collection():
        paths = [path if path.is_dir() else opened.enter_context(as_file(path)) for path in options.logs]
        page = render_page(report_of(paths))
    (write_whole if options.overwrite else create_whole)(options.output, page)
    say(f"report: {options.output} ({len(page.encode()) / 1000:.0f} kB)")
    return 0
