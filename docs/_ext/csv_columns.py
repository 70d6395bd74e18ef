"""The columns of csv by kind of report, from what ``mamf show`` prints of the logs in this repository.

``{csv-columns} KIND`` in a page writes the table of one kind. A column without a meaning in meanings.toml is a warning.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import tomllib
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from mamf import cli

ROOT = Path(__file__).resolve().parents[2]
MEANINGS = Path(__file__).with_name("meanings.toml")
#: The logs of a kind, and the command that prints them. Each kind of run, dtype and kernel is read once.
LOGS: Mapping[str, tuple[str, str]] = {
    "rows": (
        "show",
        "results/*/{sweep,attention,bandwidth-float32,batched,decode,collective,copies,grouped,model}-*.jsonl",
    ),
    "ceilings": ("show", "results/*/find-*.jsonl"),
    "roofline": ("show", "results/*/bandwidth-roofline-*.jsonl"),
    "explain": ("show", "results/*/matmul-explain-*.jsonl"),
    "compare": ("compare", "results/*/sweep-torch-mm-bfloat16-burst-*.jsonl"),
    "counters": ("show", "docs/autoprofile-h200/counters.jsonl"),
    "profile": ("show", "docs/autoprofile-h200/step.jsonl"),
    "imported": ("show", "results/*/mamf-finder-*.jsonl"),
}
_DATE = re.compile(r"-\d{8}-\d{6}.*")
#: Hardware counters, as ncu names them.
_COUNTER = re.compile(r"[a-z0-9]+__\w+")
_LOGGER = logging.getLogger(__name__)


def logs(pattern: str) -> list[Path]:
    """The last log of each name that a pattern matches. Braces hold alternatives."""
    before, _, rest = pattern.partition("{")
    names, _, after = rest.partition("}")
    found = (path for name in names.split(",") for path in sorted(ROOT.glob(f"{before}{name}{after}")))
    return list({_DATE.sub("", path.name): path for path in found}.values())


def columns(command: str, log: Path) -> list[str]:
    """The first line of the csv of a log; a comparison is of the log with itself."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = cli.main([command, str(log), *([str(log)] if command == "compare" else []), "--format", "csv"])
    if code:
        raise RuntimeError(f"mamf {command} {log} ends with exit code {code}")
    return next(csv.reader(text.getvalue().splitlines()[:1]))


def operations_by_column(kind: str) -> dict[str, list[str]]:
    """The columns of a kind in their order, each with the runs that have it."""
    command, pattern = LOGS[kind]
    found: dict[str, dict[str, None]] = {}
    for log in logs(pattern):
        for column in columns(command, log):
            found.setdefault(column, {})[log.name.partition("-")[0].replace("sweep", "matmul")] = None
    return {column: list(runs) for column, runs in found.items()}


def lines(kind: str) -> Iterator[str]:
    meanings = tomllib.loads(MEANINGS.read_text(encoding="utf-8"))["csv"]
    own, found = meanings.get(kind, {}), operations_by_column(kind)
    if not found:
        _LOGGER.warning("no log for the csv columns of %s", kind)
    every = max((len(runs) for runs in found.values()), default=0)
    yield from (
        ("| column | meaning | operations |", "|:--|:--|:--|") if every > 1 else ("| column | meaning |", "|:--|:--|")
    )
    for column, runs in found.items():
        meaning = own.get(column) or meanings["any"].get(column)
        if _COUNTER.match(column):
            continue
        if meaning is None:
            _LOGGER.warning("%s has no meaning for the csv column %s of %s", MEANINGS.name, column, kind)
        of = "" if every == 1 else f" {'all' if len(runs) == every else ', '.join(runs)} |"
        yield f"| `{column}` | {meaning} |{of}"


class CsvColumns(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(MEANINGS))
        self.env.note_dependency(__file__)
        return self.parse_text_to_nodes("\n".join(lines(self.arguments[0])))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("csv-columns", CsvColumns)
    return {"parallel_read_safe": True}
