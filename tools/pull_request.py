"""Downloads the run logs that a pull request adds to results/, as data, and prints a comment on their review.

    python tools/pull_request.py logs COMPARISON.json ROOT
    python tools/pull_request.py comment FOLDER [--commit SHA]

``.github/workflows/results.yml`` runs both with the base branch's code on pull requests of anybody.

``logs``: COMPARISON.json is GitHub's answer to "compare two commits": the pull request's base and its newest commit.
Added logs are written below ROOT, at their paths in results/. Nothing else is downloaded. Prints a line for each file
that is not looked at. Names, sizes and numbers of files are bounded. Reads GITHUB_API_URL, GITHUB_REPOSITORY and
GH_TOKEN.

``comment``: FOLDER holds ``added.txt`` (paths of the logs, a line each), ``notes.txt`` (what ``logs`` printed),
``check.json`` (``mamf results check results --format json``) and, once the tables are written, ``before.md`` and
``after.md``. Exit code 1 if a log is rejected, none is added, or other files change. Text of logs cannot become markup:
findings are indented code, and table rows were escaped when they were written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mamf.errors import MamfError, UsageError, shorten_value
from mamf.files import create_file_atomically, make_folder
from mamf.text import escape_invisible_characters

# GitHub lists no more files of a comparison.
MOST_FILES = 300
MOST_LOGS = 50
#: Bytes of a log; the largest one in results/ has 5 MB.
MAX_LOG_BYTES = 16 << 20
# A folder of an accelerator and a file, of the characters that 'mamf results submit' writes.
PLACE = re.compile(r"results/[a-z0-9][a-z0-9_-]{0,99}/[a-z0-9][a-z0-9_-]{0,199}\.jsonl")
# 'mamf results table' writes them again.
GENERATED = re.compile(r"results/(?:[a-z0-9][a-z0-9_-]{0,99}/)?README\.md|mamf/contributed\.csv")
# Who submitted what is what GitHub says, never what a pull request says.
TRUSTED = {"results/submitters.txt", "results/maintainers.txt"}
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS = 60
#: Of a comment: lines of findings and notes, rows of tables, characters, and characters of a line.
MOST_LINES, MOST_ROWS, MOST_CHARACTERS, _LONGEST_LINE = 100, 60, 60_000, 300
# Footnotes and links of the tables lead nowhere in a comment.
_FOOTNOTE = re.compile(r"\[\^\d+\]")
_LINK = re.compile(r"\[log\]\([^)]*\)")
#: Returns the content of a blob by its hash.
Download = Callable[[str], bytes]


def main(arguments: Sequence[str] | None = None, download: Download | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    logs = commands.add_parser("logs")
    logs.add_argument("comparison", type=Path, metavar="COMPARISON.json")
    logs.add_argument("root", type=Path, metavar="ROOT")
    comment = commands.add_parser("comment")
    comment.add_argument("folder", type=Path, metavar="FOLDER")
    comment.add_argument("--commit", default="", metavar="SHA")
    options = parser.parse_args(arguments)
    if options.command == "comment":
        return print_comment(options.folder, options.commit)
    files = json.loads(options.comparison.read_text(encoding="utf-8"))["files"]
    try:
        for line in take_logs(files, options.root, download or download_blob):
            print(escape_invisible_characters(line))
    except MamfError as error:
        print(escape_invisible_characters(str(error)))
        return 1
    return 0


# -- logs --------------------------------------------------------------------------------------------------------------


def take_logs(files: Sequence[Mapping[str, Any]], root: Path, download: Download) -> Iterator[str]:
    """Write the added logs below ``root``; yields a line for each other file. Raises UsageError for too many files, for
    a change of who submitted what, and for a log that cannot be downloaded.
    """
    if len(files) >= MOST_FILES:
        raise UsageError(f"{MOST_FILES} files or more change: open a pull request with fewer logs")
    names = {name for file in files for name in (file["filename"], file.get("previous_filename"))}
    if trusted := sorted(TRUSTED & names):
        raise UsageError(f"{trusted[0]} changes: a workflow writes it, so take it out of the pull request")
    logs = [file for file in files if PLACE.fullmatch(file["filename"]) and file["status"] == "added"]
    if len(logs) > MOST_LOGS:
        raise UsageError(f"{len(logs)} logs are added: open a pull request with at most {MOST_LOGS}")
    for file in files:
        if file not in logs and not GENERATED.fullmatch(file["filename"]):
            yield f"not looked at: {shorten_value(file['filename'])} ({shorten_value(file['status'])})"
    for file in logs:
        path = root / file["filename"]
        if path.exists():
            yield f"not looked at: {file['filename']} (the base branch has such a file)"
        else:
            make_folder(path.parent)
            create_file_atomically(path, download(file["sha"]))


def download_blob(sha: str) -> bytes:
    """Download a file by its hash from GitHub. Raises UsageError if it is missing or has too many bytes."""
    if not _SHA.fullmatch(sha):
        raise UsageError(f"{shorten_value(sha)} is not a hash")
    url = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/git/blobs/{sha}"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.github.raw+json"})
    request.add_unredirected_header("Authorization", f"Bearer {os.environ['GH_TOKEN']}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            content: bytes = answer.read(MAX_LOG_BYTES + 1)
    except (urllib.error.URLError, TimeoutError) as error:
        raise UsageError(f"cannot download {sha}: {error}") from None
    if len(content) > MAX_LOG_BYTES:
        raise UsageError(f"{sha} has more than {MAX_LOG_BYTES >> 20} MiB")
    return content


# -- the comment -------------------------------------------------------------------------------------------------------


def print_comment(folder: Path, commit: str) -> int:
    """Print the verdict with its commit, the findings, and what was not looked at. Returns the exit code."""
    added = set(_text(folder / "added.txt").splitlines())
    # A file that was there before and changes is seen first, however many others are added.
    notes = sorted(_text(folder / "notes.txt").splitlines(), key=lambda note: "(added)" in note)
    logs = json.loads(_text(folder / "check.json") or '{"logs": []}')["logs"]
    reviews = [each for each in logs if each["path"] in added]
    verdict = "no log to check"
    if reviews:
        verdict = "accepted" if all(each["accepted"] for each in reviews) else "not accepted"
    if verdict == "accepted" and notes:
        verdict = f"logs accepted, but {len(notes)} other files change"
    rows = changed_rows(_text(folder / "before.md"), _text(folder / "after.md"))
    parts = [
        f"**mamf results check: {verdict}**" + (f" at {commit}" if commit else ""),
        code_block([*(line for each in reviews for line in finding_lines(each)), *notes]),
        "Rows of the tables that change:\n" if rows else "",
        "\n".join(rows[:MOST_ROWS]),
    ]
    print("\n".join(filter(None, parts))[:MOST_CHARACTERS])
    return 0 if verdict == "accepted" else 1


def finding_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the log, and one for each finding."""
    yield f"{found['path']}: tier {found['tier'] or 'unreadable'}, {'accepted' if found['accepted'] else 'rejected'}"
    for finding in found["findings"]:
        yield "  {level}: {rule}: {message}".format(**finding)


def code_block(lines: Sequence[str]) -> str:
    """Indent lines as code: no text ends it, unlike a fence."""
    shown = [escape_invisible_characters(line)[:_LONGEST_LINE] for line in lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        shown.append(f"{len(lines) - MOST_LINES} more lines")
    return "".join(f"\n    {line}" for line in shown) + "\n" if shown else ""


def changed_rows(before: str, after: str) -> list[str]:
    """Return the table rows of ``after`` that ``before`` lacks, each table with its heading."""
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
    """Return the names and the rule of the last table in ``lines``."""
    rule = max((number for number, line in enumerate(lines) if line.startswith("| :--")), default=0)
    return lines[rule - 1 : rule + 1] if rule else ()


def _plain(line: str) -> str:
    """Remove links, footnotes, and what GitHub takes as the name of an account."""
    return _LINK.sub("log", _FOOTNOTE.sub("", line)).replace("@", "(at)")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
