"""``mamf show LOG``: print a run log again, in any format."""

from __future__ import annotations

import argparse
from pathlib import Path

from mamf.cli.printing import print_document
from mamf.cli.reading import as_file, read_log, read_roofs, reading
from mamf.errors import UsageError
from mamf.kinds.kind import View
from mamf.kinds.registry import kind_of
from mamf.logs.compare import require_same_card
from mamf.logs.legacy import read_legacy_or_none
from mamf.logs.run_log import RunLog
from mamf.node.logs import contributed_baseline, is_node_folder, read_nodes
from mamf.node.report import node_document
from mamf.node.verdict import judge
from mamf.plans import SWEEP
from mamf.profiling.counters.report import counters_document
from mamf.profiling.log import read_profile_or_none
from mamf.profiling.ranks import rank_logs, ranks_document, read_rank_logs
from mamf.profiling.report import profile_document
from mamf.report.document import Document
from mamf.report.imported import finder_document


def run(options: argparse.Namespace) -> int:
    if is_node_folder(options.log):
        not_together, devices = read_nodes([options.log])
        verdict = judge(devices, contributed_baseline(devices))
        print_document(options, node_document(devices, verdict, not_together))
        return 0
    if options.log.is_dir():
        print_document(options, ranks_document(read_rank_logs(options.log), len(rank_logs(options.log))))
        return 0
    with as_file(options.log) as path:
        return _shown(path, options)


def _shown(path: Path, options: argparse.Namespace) -> int:
    with reading([path]) as seen:
        imported = read_legacy_or_none(path, seen)
    print_document(options, finder_document(imported, options.top) if imported else _document(path, options))
    return 0


def _document(path: Path, options: argparse.Namespace) -> Document:
    if (profiled := read_profile_or_none(path)) is not None:
        return profile_document(*profiled, options.top)
    log, roofs = read_log(path), read_roofs(options)
    if roofs is not None:
        require_rows(log)
        require_same_card(log, roofs)
    if log.counter_records:
        return counters_document(log)
    return kind_of(log.plan).document(log, View(options.top, roofs))


def require_rows(log: RunLog) -> None:
    """Raises UsageError for a log whose rows have no shares of the roof."""
    if log.plan.kind != SWEEP or log.plan.operation == "attention":
        raise UsageError(
            f"{log.path}: --ceiling shows shares for rows of a sweep; for other logs, use 'mamf roofline LOG --ceiling "
            "LOG'"
        )
