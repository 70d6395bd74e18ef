"""Implement the command ``mamf show LOG``: print the report of a run log in any format.

The run itself prints the same report when it ends.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli.reading import open_as_local_path, read_log, read_roofs, show_reading_progress
from mamf.cli.terminal import add_shared_options, print_document
from mamf.errors import UsageError
from mamf.plans import SWEEP

if TYPE_CHECKING:
    from mamf.logs.run_log import RunLog
    from mamf.report.document import Document

EXAMPLES = """examples:
  mamf show LOG                         the report that the run printed
  mamf show LOG --format csv            every row, for a program
  mamf show LOG --ceiling FIND_LOG      rows as shares of the ceilings in another log
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs",
        type=Path,
        nargs="+",
        metavar="LOG",
        help="run log, all logs of one run, or a folder that --devices, 'mamf node' or 'mamf profile --ranks' wrote",
    )
    add_shared_options(parser, "--ceiling", default_text="none; only for logs of 'mamf sweep'")
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.logs.shared_runs import is_shared_run_folder

    path, *other_paths = options.logs
    if other_paths or is_shared_run_folder(path):
        print_document(options, _make_run_log_document(read_log(*options.logs), options))
    elif path.is_dir():
        print_document(options, _make_folder_document(path))
    else:
        with open_as_local_path(path) as file:
            print_document(options, make_log_document(file, options))
    return 0


def _make_folder_document(folder: Path) -> Document:
    """Return the report of a folder that ``mamf node`` or ``mamf profile --ranks all`` wrote."""
    from mamf.node.logs import is_node_folder, make_contributed_baseline, read_node_folders
    from mamf.node.report import make_node_document
    from mamf.node.verdict import judge_devices
    from mamf.profiling.log import find_rank_logs, make_ranks_document, read_rank_logs

    if not is_node_folder(folder):
        if not find_rank_logs(folder):
            raise UsageError(
                f"{folder} is not a folder that --devices, 'mamf node' or 'mamf profile --ranks all' wrote: give such "
                f"a folder or a log, or run 'mamf report {folder}', which makes a page of all its logs"
            )
        return make_ranks_document(read_rank_logs(folder), len(find_rank_logs(folder)))
    separate_measurement_reason, devices = read_node_folders([folder])
    return make_node_document(
        devices, judge_devices(devices, make_contributed_baseline(devices)), separate_measurement_reason
    )


def make_log_document(path: Path, options: argparse.Namespace) -> Document:
    """Return the report of the file at ``path``: a run log, a profile or a log of mamf-finder. ``options`` needs the
    fields ``top`` (maximum number of rows) and ``ceiling`` (logs of ceilings, or None). Raises RunLogError for any
    other file.
    """
    from mamf.logs.legacy import read_legacy_log_or_none
    from mamf.profiling.log import make_profile_document, read_profile_or_none
    from mamf.report.imported import make_finder_document

    with show_reading_progress([path]) as count_read_bytes:
        finder_run = read_legacy_log_or_none(path, count_read_bytes)
    if finder_run:
        return make_finder_document(finder_run, options.top)
    if (profile := read_profile_or_none(path)) is not None:
        if options.ceiling:
            raise UsageError(f"{path} is a profile, whose ceilings are fixed: give --ceiling to 'mamf profile' instead")
        return make_profile_document(*profile, options.top)
    return _make_run_log_document(read_log(path), options)


def _make_run_log_document(log: RunLog, options: argparse.Namespace) -> Document:
    from mamf.kinds.kind import ReportOptions
    from mamf.kinds.registry import get_kind
    from mamf.logs.compare import require_same_card
    from mamf.operations.unknown import get_operation
    from mamf.profiling.counters.report import make_counters_document
    from mamf.report.document import add_logged_warnings

    roofs = read_roofs(options)
    if roofs is not None:
        if log.plan.kind != SWEEP or get_operation(log.plan.operation).shows_ceiling_shares:
            raise UsageError(
                f"--ceiling works only for logs of 'mamf sweep', and {log.path} is not a log of this command: use "
                "'mamf roofline LOG --ceiling LOG'"
            )
        require_same_card(log, roofs)
    document = (
        make_counters_document(log)
        if log.counter_records
        else get_kind(log.plan).make_document(log, ReportOptions(options.top, roofs))
    )
    return add_logged_warnings(document, log)
