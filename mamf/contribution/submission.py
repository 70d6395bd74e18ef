"""Submits a log to results/: scrubs it, reviews the result, and writes it to its place or as the body of an issue."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import lzma
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from mamf.contribution.evidence import records_of
from mamf.contribution.privacy import cleaned, removals, without_private
from mamf.contribution.rules import Review, review
from mamf.errors import RunLogError, UsageError
from mamf.files import create_whole, make_folder, numbered
from mamf.logs.run_log import why_unreadable


@dataclass(frozen=True)
class Submission:
    """``text``: the log as it will be written. ``changes``: which fields scrubbing changes and what kinds of text it
    removes, a line each. ``review``: of that text.
    """

    text: str
    changes: tuple[str, ...]
    review: Review

    @property
    def place(self) -> Path:
        if self.review.place is None:
            raise UsageError(f"{self.review.path} cannot be placed: 'mamf results check' says why")
        return self.review.place


def prepare(path: Path) -> Submission:
    """Scrub and review a log; nothing is written beside it. Raises RunLogError when it cannot be read."""
    records = list(records_of(path))
    if why := why_unreadable(path, records[0][1].get("schema")):
        raise RunLogError(why)
    scrubbed = [without_private(record, _clean) for _, record in records]
    changes = tuple(
        f"line {line}, {name}: {what} removed"
        for (line, old), new in zip(records, scrubbed, strict=True)
        for name, what in removals(old, new)
    )
    # An incomplete last line stays incomplete.
    cut = path.read_bytes().rpartition(b"\n")[2].decode(errors="replace")
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in scrubbed) + cut
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_text(text, encoding="utf-8", newline="\n")
        found = review(copy)
    return Submission(text, changes, replace(found, path=path))


@functools.lru_cache(4096)
def _clean(text: str) -> str:
    """A text without private parts, and without what detect-secrets finds, if it is installed."""
    text = cleaned(text)
    with contextlib.suppress(ImportError):
        from detect_secrets.core.scan import scan_line
        from detect_secrets.settings import default_settings

        with default_settings():
            # Every time and every shape has high entropy.
            found = {each.secret_value or "" for each in scan_line(text) if "Entropy" not in each.type}
        for secret in found - {""}:
            text = text.replace(secret, "<secret>")
    return text


def free_place(submission: Submission, root: Path) -> Path:
    """The first free place for it in the results folder. Raises UsageError if this run is already there, or if the
    log does not say where it belongs.
    """
    for target in (root / place for place in numbered(submission.place)):
        if not target.exists():
            break
        if review(target).samples & submission.review.samples:
            raise UsageError(f"{target} is there already: a run is submitted once")
    return target


def write(submission: Submission, target: Path) -> None:
    """Raises UsageError when it cannot be written, RunLogWriteError when the disk is full; then nothing is."""
    make_folder(target.parent)
    create_whole(target, submission.text)


# -- as the body of an issue -------------------------------------------------------------------------------------------


# Of the 65,536 characters that GitHub accepts in the body of an issue; the others are left for the fields of the form.
_MOST_OF_LOG = 60_000
#: A log that fits into the body of an issue has at most about 1 MB.
MOST_BYTES = 4 << 20
#: What surrounds the log in the body of an issue; ``tools/issue_log.py`` reads it.
FENCE = "```"
OPENING = f"{FENCE}mamf-log"


def encode_issue(text: str, place: Path) -> str:
    """The issue body with a scrubbed log. ``place``: of the log in results/. Raises UsageError if it is too long."""
    content = text.encode()
    packed = b"" if len(content) > MOST_BYTES else base64.encodebytes(lzma.compress(content))
    if not 0 < len(packed) <= _MOST_OF_LOG:
        raise UsageError("the log is too long for an issue: open a pull request with 'mamf results submit LOG'")
    heading = f"`results/{place.as_posix()}`, scrubbed and compressed by `mamf results submit --issue`:"
    return f"{heading}\n\n{OPENING}\n{packed.decode()}{FENCE}\n"
