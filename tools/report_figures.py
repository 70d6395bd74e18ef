"""Figures that the reports of run logs show, as digests: they change if a figure does, and not with the layout.

    python tools/report_figures.py            compare all logs in results/ with the expected figures
    python tools/report_figures.py --write    write the figures of today's reports as the expected ones

A digest is over the rows of a log: the number of values of a column, and a hash of the values by regime, shape, kernel
and device. Values of csv and json count with five digits, those of tables as they are printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mamf
from mamf.kinds.kind import View
from mamf.kinds.registry import kind_of
from mamf.logs.legacy import FinderRun
from mamf.plans import EXPLAIN, ROOFLINE
from mamf.report.document import Document, Lines, Table
from mamf.report.imported import finder_document

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = ROOT / "tests" / "unit" / "data" / "report_figures.json"
#: By log and part (rows, ceilings, shown rows, shown ceilings, lines).
Figures = dict[str, Any]
_PARTS = {"measurements": "rows", "rows": "rows", "ceilings": "ceilings"}


def document_of(path: Path) -> Document | None:
    """The report of a log; None for a kind whose figures other tests compare."""
    log = mamf.read_log(path)
    if isinstance(log, FinderRun):
        return finder_document(log)
    if log.plan.kind in (ROOFLINE, EXPLAIN):
        return None
    return kind_of(log.plan).document(log, View())


def figures_of(document: Document) -> Figures:
    """The figures of a report by part and column."""
    found: dict[str, dict[str, list[str]]] = {}
    for table in document.blocks:
        if isinstance(table, Table) and table.key in _PARTS:
            part = _PARTS[table.key]
            for record in table.records():
                if not record.get("is_reference"):
                    _add(found.setdefault(part, {}), record, record.items())
            for record, shown in _shown(table):
                _add(found.setdefault(f"shown {part}", {}), record, shown.items())
    digests = {part: {name: _digest(values) for name, values in by.items()} for part, by in found.items()}
    lines = (text for each in document.blocks for text in (each.texts if isinstance(each, Lines) else each.notes))
    return {**digests, "lines": sorted({number for text in lines for number in re.findall(r"\d+\.\d+", text)})}


def _shown(table: Table[Any]) -> Iterator[tuple[Mapping[str, object], Mapping[str, object]]]:
    for row in table.top_rows:
        record = {column.name: column.read(row) for column in table.columns}
        titled = ((column.name or column.title, column) for column in table.columns if column.title)
        yield record, {name: column.cell(row) for name, column in titled if column.read(row) is not None}


def _add(to: dict[str, list[str]], record: Mapping[str, object], values: Iterable[tuple[str, object]]) -> None:
    known = (record.get(name) for name in ("regime", "shape", "kernel", "device", "direction", "pattern"))
    label = " ".join("" if value is None else str(value) for value in known)
    for name, value in values:
        if value not in (None, ""):
            text = f"{value:.5g}" if isinstance(value, (int, float)) else str(value)
            to.setdefault(name, []).append(f"{label}: {text}")


def _digest(values: Iterable[str]) -> str:
    values = sorted(values)
    return f"{len(values)} {hashlib.sha256(chr(10).join(values).encode()).hexdigest()[:8]}"


def differences(expected: Figures, found: Figures) -> Iterator[str]:
    """What of the expected figures a report does not show, or shows with other values."""
    for part, columns in expected.items():
        if part == "lines":
            if missing := sorted(set(columns) - set(found["lines"])):
                yield f"numbers without a line: {', '.join(missing)}"
            continue
        for name, digest in columns.items():
            if (now := found.get(part, {}).get(name)) != digest:
                yield f"{part}, {name}: {now or 'missing'}, expected {digest}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the expected figures")
    write = parser.parse_args(arguments).write
    documents = ((path, document_of(path)) for path in sorted((ROOT / "results").rglob("*.jsonl")))
    found = {path.relative_to(ROOT).as_posix(): figures_of(each) for path, each in documents if each}
    if write:
        EXPECTED.write_text(json.dumps(found, separators=(",", ":")).replace('},"results', '},\n"results') + "\n")
        return 0
    expected = json.loads(EXPECTED.read_text())
    nothing: Figures = {"lines": []}
    wrong = [f"{path}: {each}" for path in expected for each in differences(expected[path], found.get(path, nothing))]
    print("\n".join(wrong) or f"the figures of {len(expected)} logs are as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
