"""Prints what a review of contributed logs found, as a comment for GitHub.

    python tools/review_comment.py FOLDER [--commit SHA]

FOLDER holds ``added.txt`` (paths of the logs, a line each), ``notes.txt`` (a line for each other file that changes),
``check.json`` (``mamf results check results --format json``) and, once the tables are written, ``before.md`` and
``after.md``. Exit code 1 if a log is rejected, none is added, or other files change. Text of logs cannot become markup:
findings are indented code, and table rows were escaped when they were written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mamf.text import visible

MOST_LINES = 100
MOST_ROWS = 60
MOST_CHARACTERS = 60_000
_LONGEST_LINE = 300
# Footnotes and links of the tables lead nowhere in a comment.
_FOOTNOTE = re.compile(r"\[\^\d+\]")
_LINK = re.compile(r"\[log\]\([^)]*\)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print what a review of contributed logs found.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", default="", metavar="SHA")
    options = parser.parse_args(arguments)
    reviews = added_reviews(options.folder)
    notes = _text(options.folder / "notes.txt").splitlines()
    verdict = "no log to check"
    if reviews:
        verdict = "accepted" if all(each["accepted"] for each in reviews) else "not accepted"
    if verdict == "accepted" and notes:
        verdict = f"logs accepted, but {len(notes)} other files change"
    print(comment(options.folder, reviews, verdict, options.commit)[:MOST_CHARACTERS])
    return 0 if verdict == "accepted" else 1


def added_reviews(folder: Path) -> list[dict[str, Any]]:
    """The reviews of the added logs, in the order of check.json."""
    added = set(_text(folder / "added.txt").splitlines())
    logs = json.loads(_text(folder / "check.json") or '{"logs": []}')["logs"]
    return [each for each in logs if each["path"] in added]


def comment(folder: Path, reviews: Sequence[dict[str, Any]], verdict: str, commit: str) -> str:
    """The whole comment: the verdict with its commit, the findings, then what was not looked at."""
    lines = [line for each in reviews for line in finding_lines(each)]
    rows = changed_rows(_text(folder / "before.md"), _text(folder / "after.md"))
    parts = [
        f"**mamf results check: {verdict}**" + (f" at {commit}" if commit else ""),
        code_block([*lines, *_text(folder / "notes.txt").splitlines()]),
        "Rows of the tables that change:\n" if rows else "",
        "\n".join(rows[:MOST_ROWS]),
    ]
    return "\n".join(filter(None, parts))


def finding_lines(found: dict[str, Any]) -> Iterator[str]:
    """A line for the log, and one for each finding."""
    yield f"{found['path']}: tier {found['tier'] or 'unreadable'}, {'accepted' if found['accepted'] else 'rejected'}"
    for finding in found["findings"]:
        yield "  {level}: {rule}: {message}".format(**finding)


def code_block(lines: Sequence[str]) -> str:
    """Indented code: no text ends it, unlike a fence."""
    shown = [visible(line)[:_LONGEST_LINE] for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"{len(lines) - MOST_LINES} more lines")
    return "".join(f"\n    {line}" for line in shown) + "\n" if shown else ""


def changed_rows(before: str, after: str) -> list[str]:
    """The table rows of ``after`` that ``before`` lacks, each table with its heading."""
    known, heading, rows = set(map(_plain, before.splitlines())), "", []
    shown, lines = "", [_plain(line) for line in after.splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("## "):
            heading = line
        elif line.startswith("|") and line not in known:
            if heading != shown:
                shown = heading
                rows += ["", heading, "", *_head_of_table(lines[:number])]
            rows.append(line)
    return rows


def _head_of_table(lines: Sequence[str]) -> Sequence[str]:
    """The names and the rule of the last table in ``lines``."""
    rule = max((number for number, line in enumerate(lines) if line.startswith("| :--")), default=0)
    return lines[rule - 1 : rule + 1] if rule else ()


def _plain(line: str) -> str:
    """A row without links and footnotes, and without what GitHub takes as the name of an account."""
    return _LINK.sub("log", _FOOTNOTE.sub("", line)).replace("@", "(at)")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
