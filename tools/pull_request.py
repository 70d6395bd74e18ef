"""Download the run logs that a pull request adds to results/, and print a comment with the review of these logs.

    python tools/pull_request.py logs COMPARISON.json ROOT
    python tools/pull_request.py comment FOLDER [--commit SHA]

``.github/workflows/results.yml`` runs both commands with the code of the base branch. Anybody can open a pull request,
so its files are only read as data and never run.

``logs`` downloads the added logs to ROOT, at their paths in results/, and downloads no other file. COMPARISON.json is
the answer of GitHub's API that compares two commits: the base of the pull request and its newest commit. The command
prints a line for each file that is not reviewed. The names, sizes and number of files are limited. The command reads
the environment variables GITHUB_API_URL, GITHUB_REPOSITORY and GH_TOKEN.

``comment`` prints the comment. It reads these files in FOLDER:

- ``added.txt``: the paths of the added logs, one per line.
- ``notes.txt``: the output of ``logs``.
- ``check.json``: the output of ``mamf results check results --format json``.
- ``before.md``, ``after.md``: the tables of results without and with the added logs. They may be missing.

The exit code is 1 if a log is rejected, no log is added, or other files change. Texts from logs cannot act as markup:
the comment shows findings as indented code, and ``mamf results table`` has already escaped the rows of tables.
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

# GitHub lists at most this many files of a comparison.
MAX_FILES = 300
MAX_LOGS = 50
#: The maximum size of a log, in bytes. The largest log in results/ has 5 MB.
MAX_LOG_BYTES = 16 << 20
# The path of a log: the folder of an accelerator and a file name, with the characters that 'mamf results submit' uses.
LOG_PATH = re.compile(r"results/[a-z0-9][a-z0-9_-]{0,99}/[a-z0-9][a-z0-9_-]{0,199}\.jsonl")
# The files that 'mamf results table' writes.
GENERATED_PATH = re.compile(r"results/(?:[a-z0-9][a-z0-9_-]{0,99}/)?README\.md|mamf/contributed\.csv")
# The files that say which account submitted which log, and which accounts are maintainers. A pull request must not
# change them: mamf takes the account of a submitter only from GitHub.
PROTECTED_FILES = {"results/submitters.txt", "results/maintainers.txt"}
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT_SECONDS = 60
#: The limits of a comment: lines of findings and notes, rows of tables, all characters, and the characters of a line.
MAX_LINES, MAX_ROWS, MAX_CHARACTERS, _MAX_LINE_LENGTH = 100, 60, 60_000, 300
# Footnotes and links of the tables, which do not work in a comment.
_FOOTNOTE = re.compile(r"\[\^\d+\]")
_LINK = re.compile(r"\[log\]\([^)]*\)")
#: A function that returns the content of a file (a git blob), given its hash.
Download = Callable[[str], bytes]


def main(arguments: Sequence[str] | None = None, download: Download | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    logs = commands.add_parser("logs", help="download the added logs")
    logs.add_argument(
        "comparison", type=Path, metavar="COMPARISON.json", help="GitHub's comparison of the base and the newest commit"
    )
    logs.add_argument("root", type=Path, metavar="ROOT", help="folder to which the logs are downloaded")
    comment = commands.add_parser("comment", help="print the comment")
    comment.add_argument("folder", type=Path, metavar="FOLDER", help="folder with added.txt, notes.txt and check.json")
    comment.add_argument("--commit", default="", metavar="SHA", help="commit that the comment names (default: none)")
    options = parser.parse_args(arguments)
    if options.command == "comment":
        return print_comment(options.folder, options.commit)
    files = json.loads(options.comparison.read_text(encoding="utf-8"))["files"]
    try:
        for line in download_logs(files, options.root, download or download_blob):
            print(escape_invisible_characters(line))
    except MamfError as error:
        print(escape_invisible_characters(str(error)))
        return 1
    return 0


# -- logs --------------------------------------------------------------------------------------------------------------


def download_logs(files: Sequence[Mapping[str, Any]], root: Path, download: Download) -> Iterator[str]:
    """Download the added logs to ``root``. Yield a line for each file that is not reviewed.

    Raises UsageError if there are too many files, if a file in PROTECTED_FILES changes, or if a download fails.
    """
    if len(files) >= MAX_FILES:
        raise UsageError(f"{MAX_FILES} files or more change: open a pull request with fewer logs")
    names = {name for file in files for name in (file["filename"], file.get("previous_filename"))}
    if protected := sorted(PROTECTED_FILES & names):
        raise UsageError(f"{protected[0]} changes, but only a workflow writes it: remove it from the pull request")
    logs = [file for file in files if LOG_PATH.fullmatch(file["filename"]) and file["status"] == "added"]
    if len(logs) > MAX_LOGS:
        raise UsageError(f"{len(logs)} logs are added: open a pull request with at most {MAX_LOGS} logs")
    for file in files:
        if file not in logs and not GENERATED_PATH.fullmatch(file["filename"]):
            yield f"not reviewed: {shorten_value(file['filename'])} ({shorten_value(file['status'])})"
    for file in logs:
        path = root / file["filename"]
        if path.exists():
            yield f"not reviewed: {file['filename']} (the base branch already has a file with this name)"
        else:
            make_folder(path.parent)
            create_file_atomically(path, download(file["sha"]))


def download_blob(sha: str) -> bytes:
    """Download a file from GitHub by its hash. Raises UsageError if this fails or the file is too large."""
    if not _SHA.fullmatch(sha):
        raise UsageError(f"{shorten_value(sha)} is not a hash")
    url = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/git/blobs/{sha}"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.github.raw+json"})
    request.add_unredirected_header("Authorization", f"Bearer {os.environ['GH_TOKEN']}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(MAX_LOG_BYTES + 1)
    except (urllib.error.URLError, TimeoutError) as error:
        raise UsageError(f"cannot download {sha}: {error}") from None
    if len(content) > MAX_LOG_BYTES:
        raise UsageError(f"{sha} has more than {MAX_LOG_BYTES >> 20} MiB: submit a smaller log")
    return content


# -- the comment -------------------------------------------------------------------------------------------------------


def print_comment(folder: Path, commit: str) -> int:
    """Print the verdict and the commit, the findings, the files that were not reviewed, and the changed rows of the
    tables. Return the exit code.
    """
    added = set(_read_text(folder / "added.txt").splitlines())
    # Show changed files first, so that a large number of added files does not push them out of the comment.
    notes = sorted(_read_text(folder / "notes.txt").splitlines(), key=lambda note: "(added)" in note)
    logs = json.loads(_read_text(folder / "check.json") or '{"logs": []}')["logs"]
    reviews = [review for review in logs if review["path"] in added]
    verdict = "no log to check"
    if reviews:
        verdict = "accepted" if all(review["accepted"] for review in reviews) else "not accepted"
    if verdict == "accepted" and notes:
        verdict = f"logs accepted, but {len(notes)} other files change"
    rows = list_changed_rows(_read_text(folder / "before.md"), _read_text(folder / "after.md"))
    parts = [
        f"**mamf results check: {verdict}**" + (f" at {commit}" if commit else ""),
        format_code_block([*(line for review in reviews for line in format_findings(review)), *notes]),
        "Rows of the tables that change:\n" if rows else "",
        "\n".join(rows[:MAX_ROWS]),
    ]
    print("\n".join(filter(None, parts))[:MAX_CHARACTERS])
    return 0 if verdict == "accepted" else 1


def format_findings(review: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for the log, and a line for each of its findings."""
    yield f"{review['path']}: tier {review['tier'] or 'unreadable'}, {'accepted' if review['accepted'] else 'rejected'}"
    for finding in review["findings"]:
        yield "  {level}: {rule}: {message}".format(**finding)


def format_code_block(lines: Sequence[str]) -> str:
    """Format lines as a block of indented code. Unlike a fenced block, no text in a line can end it."""
    shown_lines = [escape_invisible_characters(line)[:_MAX_LINE_LENGTH] for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown_lines.append(f"{len(lines) - MAX_LINES} more lines")
    return "".join(f"\n    {line}" for line in shown_lines) + "\n" if shown_lines else ""


def list_changed_rows(before: str, after: str) -> list[str]:
    """Return the table rows that are in ``after`` but not in ``before``, below the headings of their tables."""
    lines_before, heading, rows = set(map(_remove_links, before.splitlines())), "", []
    shown_heading, lines_after = "", [_remove_links(line) for line in after.splitlines()]
    for number, line in enumerate(lines_after):
        if line.startswith("## "):
            heading = line
        elif line.startswith("|") and line not in lines_before:
            if heading != shown_heading:
                shown_heading = heading
                rows += ["", heading, "", *_get_table_head(lines_after[:number])]
            rows.append(line)
    return rows


def _get_table_head(lines: Sequence[str]) -> Sequence[str]:
    """Return the column names and the separator line of the last table in ``lines``."""
    separator = max((number for number, line in enumerate(lines) if line.startswith("| :--")), default=0)
    return lines[separator - 1 : separator + 1] if separator else ()


def _remove_links(line: str) -> str:
    """Remove links and footnotes, and replace each @, because GitHub would notify an account with this name."""
    return _LINK.sub("log", _FOOTNOTE.sub("", line)).replace("@", "(at)")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
