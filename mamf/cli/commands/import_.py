"""Implement the command ``mamf import FILE...``: convert logs of the program mamf-finder, versions 2 to 4, to mamf's
run logs.

The tier of the new logs, which says how far their figures can be trusted, is ``legacy``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli.terminal import add_shared_options, print_line
from mamf.cli.watching import SignalHandler
from mamf.errors import UsageError
from mamf.files import make_folder, yield_numbered_paths

if TYPE_CHECKING:
    from mamf.logs.legacy import FinderRun

EXAMPLES = """examples:
  mamf import out.txt                                   writes out.jsonl here
  mamf import logs/*.txt --output-folder imported
  mamf import out.txt.gz && mamf show out.jsonl         convert gzipped output, and show the result
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", type=Path, nargs="+", metavar="FILE", help="output or log of mamf-finder, plain or gzipped (.gz)"
    )
    add_shared_options(parser, "--output-folder", default=Path(), default_text="the current folder")


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.cli.reading import show_reading_progress
    from mamf.logs.finder import read_finder_logs
    from mamf.logs.legacy import write_legacy_log

    paths = list({os.path.realpath(path): path for path in options.logs}.values())
    written_paths: list[Path] = []
    with SignalHandler():
        # Read all files before writing any, so that an unreadable file leaves no partial set of new logs.
        with show_reading_progress(paths) as count_read_bytes:
            runs = [(path, run) for path in paths for run in read_finder_logs(path, count_read_bytes)]
        target_paths = _choose_target_paths((path for path, _ in runs), options.output_folder)
        make_folder(options.output_folder)
        try:
            for target_path, (_, run) in zip(target_paths, runs, strict=True):
                write_legacy_log(run, target_path)
                written_paths.append(target_path)
        except BaseException:
            for target_path in written_paths:
                target_path.unlink()
            raise
    for target_path, (path, run) in zip(target_paths, runs, strict=True):
        for line in (
            f"{target_path} ({path}): {describe_finder_run(run)}",
            *(f"    {remark}" for remark in run.remarks),
        ):
            print_line(line)
    return 0


def _choose_target_paths(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Choose the path of the new log of each imported run. ``paths``: for each run, the path of the mamf-finder log
    that contains the run. ``folder``: the folder of the new logs.

    A new log has the name of the mamf-finder log, with the suffix .jsonl. If a mamf-finder log has several runs, the
    names for the second and later runs also have a number. Raises UsageError if a file already has one of the paths.
    """
    target_paths, numbered_paths_by_first_path = dict[Path, None](), dict[Path, Iterator[Path]]()
    for path in paths:
        first_path = folder / f"{Path(path.name.removesuffix('.gz')).stem}.jsonl"
        numbered_paths = numbered_paths_by_first_path.setdefault(first_path, yield_numbered_paths(first_path))
        target_path = next(each for each in numbered_paths if each not in target_paths)
        if target_path.exists():
            raise UsageError(f"{target_path} already exists: choose another folder for --output-folder")
        target_paths[target_path] = None
    return list(target_paths)


def describe_finder_run(run: FinderRun) -> str:
    """Return a line about a run of mamf-finder: its version, device, dtype, number of rows and best figures."""
    from mamf.report.document import format_count

    figures = ", ".join(
        f"{name} {best.tflops[name]:g} TFLOPS @ {best.shape or 'unknown'}" for name, best in run.best.items()
    )
    interruption_note = "" if run.is_complete else ", interrupted: no ceilings"
    return (
        f"mamf-finder {run.version or 'of unknown version'}, {run.device or 'unknown device'}, "
        f"{run.dtype or 'unknown dtype'}: {format_count(len(run.rows), 'row')}{interruption_note}; "
        f"{figures or 'no best figure'}"
    )
