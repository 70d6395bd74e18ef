"""Implement the command ``mamf report LOG...``: write one HTML page with the reports and charts of run logs. If an
argument is a folder, the page covers all run logs in the folder.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mamf.cli.terminal import add_shared_options, print_line, warn
from mamf.errors import UsageError
from mamf.files import create_file_atomically, write_file_atomically

EXAMPLES = """examples:
  mamf report find.jsonl                              report.html: ceilings, pictures, tables, conditions
  mamf report before.jsonl after.jsonl -o both.html   side by side, and compared
  mamf report FOLDER                                  a folder of 'mamf node', of 'mamf autoprofile', or of logs
"""
_PAGE_SUFFIXES = (".html", ".htm")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="LOG_OR_FOLDER", help="run logs, profiles, or folders of them"
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML page to write (default: report.html)",
    )
    add_shared_options(parser, "--overwrite")


def run_with_options(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from mamf.cli.reading import open_as_local_path
    from mamf.machine.environment import pause_garbage_collection
    from mamf.pages.report import make_report_page
    from mamf.report.charts.picture import NO_MATPLOTLIB_REASON, make_file_exists_error
    from mamf.report.page import render_page

    if options.output.suffix.lower() not in ("", *_PAGE_SUFFIXES):
        raise UsageError(f"cannot write {options.output}: its name must end with {' or '.join(_PAGE_SUFFIXES)}")
    with ExitStack() as open_files, pause_garbage_collection():
        paths = [path if path.is_dir() else open_files.enter_context(open_as_local_path(path)) for path in options.logs]
        show_progress = partial(tqdm, file=sys.stderr, disable=None, leave=False)
        content = make_report_page(paths, partial(show_progress, desc="reading", unit="log"))
        if options.output.exists() and not options.overwrite:
            raise make_file_exists_error(options.output)
        if len(content.sections) > 20:  # a pipe shows no progress bar
            print_line(f"drawing {len(content.sections)} sections, which can take minutes", sys.stderr)
        page = render_page(content, partial(show_progress, desc="drawing", unit="section"))
    (write_file_atomically if options.overwrite else create_file_atomically)(options.output, page)
    if NO_MATPLOTLIB_REASON in page:
        warn(f"the page has no pictures, because {NO_MATPLOTLIB_REASON}")
    print_line(f"report: {options.output} ({len(page.encode()) / 1000:.0f} kB)")
    return 0
