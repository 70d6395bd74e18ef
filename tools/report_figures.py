"""Check that the reports of all logs in results/ still show the same figures, with one recorded checksum per log.

    python tools/report_figures.py            # print the logs whose reports show other figures; exit code 1 if any
    python tools/report_figures.py LOG...     # print the figures of these logs, so that diff can compare two checkouts
    python tools/report_figures.py --write    # record the checksums of the reports as they are now

The figures of a report are the values of all columns in all rows (with five digits), the same values as tables print
them, and the decimal numbers in the text around tables. The order of rows and columns does not matter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import mamf
from mamf.kinds.kind import ReportOptions
from mamf.kinds.registry import get_kind
from mamf.logs.legacy import FinderRun
from mamf.report.document import Document, Lines, Table
from mamf.report.imported import make_finder_document

ROOT = Path(__file__).resolve().parents[1]
CHECKSUMS_FILE = ROOT / "tests" / "unit" / "data" / "report_figures.json"
_LABELS = ("regime", "shape", "kernel", "device", "direction", "pattern")


def make_document(path: Path) -> Document:
    """Return the report of a log."""
    log = mamf.read_log(path)
    if isinstance(log, FinderRun):
        return make_finder_document(log)
    return get_kind(log.plan).make_document(log, ReportOptions())


def list_figures(document: Document) -> list[str]:
    """Return the figures of a report: a line for each column of a table, and a line for each number in the text."""
    columns: dict[str, list[str]] = {}
    for table in document.blocks:
        if isinstance(table, Table):
            for name, label, figure in _list_table_figures(table):
                columns.setdefault(name, []).append(f"{label}: {figure}")
    column_lines = [f"{name}: {'; '.join(sorted(values))}" for name, values in columns.items()]
    lines = (text for block in document.blocks for text in (block.texts if isinstance(block, Lines) else block.notes))
    return sorted([*column_lines, *{f"line: {number}" for text in lines for number in re.findall(r"\d+\.\d+", text)}])


def _list_table_figures(table: Table) -> Iterator[tuple[str, str, str]]:
    """Yield the figures of a table, each with the name of its column and the label of its row."""
    for record in table.make_records():
        label = " ".join(str(record.get(name, "")) for name in _LABELS)
        for name, value in record.items():
            if value not in (None, ""):
                yield f"{table.key} {name}", label, f"{value:.5g}" if isinstance(value, (int, float)) else str(value)
    for row in table.visible_rows:
        values = {column.name: column.read_value(row) for column in table.columns}
        label = " ".join(str(values.get(name, "")) for name in _LABELS)
        for column in table.columns:
            if column.title and values[column.name] is not None:
                yield f"{table.key} shown {column.name or column.title}", label, column.format_cell(row)


def compute_checksum(figures: Iterable[str]) -> str:
    """Return the checksum of the figures of one report."""
    return hashlib.sha256("\n".join(figures).encode()).hexdigest()[:12]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "logs", nargs="*", type=Path, metavar="LOG", help="log whose figures the tool prints (default: check all logs)"
    )
    parser.add_argument("--write", action="store_true", help="record the checksums of all reports as they are now")
    options = parser.parse_args(arguments)
    paths = options.logs or sorted((ROOT / "results").rglob("*.jsonl"))
    figures = {path: list_figures(make_document(path)) for path in paths}
    if options.logs:
        print("\n".join(line for lines in figures.values() for line in lines))
        return 0
    checksums = {path.relative_to(ROOT).as_posix(): compute_checksum(lines) for path, lines in figures.items()}
    if options.write:
        CHECKSUMS_FILE.write_text(json.dumps(checksums, indent=0) + "\n")
        return 0
    recorded = json.loads(CHECKSUMS_FILE.read_text())
    changed_paths = [path for path in sorted(checksums.keys() | recorded) if checksums.get(path) != recorded.get(path)]
    print("\n".join(changed_paths) or f"the reports of {len(checksums)} logs show the recorded figures")
    if changed_paths:
        print("if these reports are right, run 'python tools/report_figures.py --write'", file=sys.stderr)
    return 1 if changed_paths else 0


if __name__ == "__main__":
    sys.exit(main())
