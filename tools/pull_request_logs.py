"""Downloads the run logs that a pull request adds to results/, as data.

    python tools/pull_request_logs.py COMPARISON.json ROOT

COMPARISON.json is GitHub's answer to "compare two commits": the pull request's base and its newest commit. Added logs
are written below ROOT, at their paths in results/. Nothing else of the pull request is downloaded. Prints a line for
each file that is not looked at. ``.github/workflows/results.yml`` runs this, with the base branch's code, on pull
requests of anybody, so names, sizes and numbers of files are bounded. Reads GITHUB_API_URL, GITHUB_REPOSITORY and
GH_TOKEN.
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

from mamf.errors import MamfError, UsageError
from mamf.files import create_whole, make_folder
from mamf.limits import shorten
from mamf.text import visible

# GitHub lists no more files of a comparison.
MOST_FILES = 300
MOST_LOGS = 50
#: Bytes of a log; the largest one in results/ has 5 MB.
MOST_BYTES = 16 << 20
# A folder of an accelerator and a file, of the characters that 'mamf results submit' writes.
PLACE = re.compile(r"results/[a-z0-9][a-z0-9_-]{0,99}/[a-z0-9][a-z0-9_-]{0,199}\.jsonl")
# 'mamf results table' writes them again.
GENERATED = re.compile(r"results/(?:[a-z0-9][a-z0-9_-]{0,99}/)?README\.md|mamf/contributed\.csv")
# Who submitted what is what GitHub says, never what a pull request says.
TRUSTED = {"results/submitters.txt", "results/maintainers.txt"}
_SHA = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SECONDS = 60
#: The content of a blob by its hash.
Download = Callable[[str], bytes]


def main(arguments: Sequence[str] | None = None, download: Download | None = None) -> int:
    parser = argparse.ArgumentParser(description="Download the run logs that a pull request adds to results/.")
    parser.add_argument("comparison", type=Path, metavar="COMPARISON.json")
    parser.add_argument("root", type=Path, metavar="ROOT")
    options = parser.parse_args(arguments)
    files = json.loads(options.comparison.read_text(encoding="utf-8"))["files"]
    try:
        for line in take_logs(files, options.root, download or download_blob):
            print(visible(line))
    except MamfError as error:
        print(visible(str(error)))
        return 1
    return 0


def take_logs(files: Sequence[Mapping[str, Any]], root: Path, download: Download) -> Iterator[str]:
    """Write the added logs below ``root``; yields a line for each other file. Raises UsageError for too many files, for
    a change of who submitted what, and for a log that cannot be downloaded.
    """
    if len(files) >= MOST_FILES:
        raise UsageError(f"{MOST_FILES} files or more change: open a pull request with fewer logs")
    if trusted := sorted(
        TRUSTED & {name for file in files for name in (file["filename"], file.get("previous_filename"))}
    ):
        raise UsageError(f"{trusted[0]} changes: a workflow writes it, so take it out of the pull request")
    logs = [file for file in files if PLACE.fullmatch(file["filename"]) and file["status"] == "added"]
    if len(logs) > MOST_LOGS:
        raise UsageError(f"{len(logs)} logs are added: open a pull request with at most {MOST_LOGS}")
    for file in files:
        if file not in logs and not GENERATED.fullmatch(file["filename"]):
            yield f"not looked at: {shorten(file['filename'])} ({shorten(file['status'])})"
    for file in logs:
        path = root / file["filename"]
        if path.exists():
            yield f"not looked at: {file['filename']} (the base branch has such a file)"
        else:
            make_folder(path.parent)
            create_whole(path, download(file["sha"]))


def download_blob(sha: str) -> bytes:
    """The content of a file by its hash, from GitHub. Raises UsageError if it is missing or has too many bytes."""
    if not _SHA.fullmatch(sha):
        raise UsageError(f"{shorten(sha)} is not a hash")
    url = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/git/blobs/{sha}"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.github.raw+json"})
    request.add_unredirected_header("Authorization", f"Bearer {os.environ['GH_TOKEN']}")
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except (urllib.error.URLError, TimeoutError) as error:
        raise UsageError(f"cannot download {sha}: {error}") from None
    if len(content) > MOST_BYTES:
        raise UsageError(f"{sha} has more than {MOST_BYTES >> 20} MiB")
    return content


if __name__ == "__main__":
    sys.exit(main())
