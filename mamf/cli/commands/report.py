"""``mamf report LOG...``: logs and folders as one html page."""

from __future__ import annotations

import argparse

from mamf.cli.reading import reading
from mamf.cli.terminal import say
from mamf.files import create_whole, write_whole
from mamf.pages.report import report_of
from mamf.report.charts.plotting import exists
from mamf.report.page import render_page


def run(options: argparse.Namespace) -> int:
    if options.output.exists() and not options.overwrite:
        raise exists(options.output)
    with reading([]):
        page = render_page(report_of(options.logs))
    (write_whole if options.overwrite else create_whole)(options.output, page)
    say(f"report: {options.output} ({len(page.encode()) / 1000:.0f} kB)")
    return 0
