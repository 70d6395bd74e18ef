"""Submits a log to results/: reviews it, and writes it to its place or as the body of an issue."""

from __future__ import annotations

import base64
import lzma
from pathlib import Path

from mamf.contribution.rules import Review, review
from mamf.errors import UsageError
from mamf.files import numbered


def place_of_review(found: Review) -> Path:
    """Where a reviewed log belongs in results/. Raises UsageError for a log that does not say it."""
    if found.place is None:
        raise UsageError(f"{found.path} cannot be placed: 'mamf results check' says why")
    return found.place


def find_free_place(found: Review, root: Path) -> Path:
    """The first free place for a log in the results folder. Raises UsageError if this run is already there, or if the
    log does not say where it belongs.
    """
    for target in (root / place for place in numbered(place_of_review(found))):
        if not target.exists():
            break
        if review(target).samples & found.samples:
            raise UsageError(f"{target} is there already: a run is submitted once")
    return target


# -- as the body of an issue -------------------------------------------------------------------------------------------


# Of the 65,536 characters that GitHub accepts in the body of an issue; the others are left for the fields of the form.
_MAX_LOG = 60_000
#: A log that fits into the body of an issue has at most about 1 MB.
MOST_BYTES = 4 << 20
#: What surrounds the log in the body of an issue; ``tools/issue_log.py`` reads it.
FENCE = "```"
OPENING = f"{FENCE}mamf-log"


def encode_issue(content: bytes, place: Path) -> str:
    """The issue body with a log. ``place``: of the log in results/. Raises UsageError if it is too long."""
    packed = b"" if len(content) > MOST_BYTES else base64.encodebytes(lzma.compress(content))
    if not 0 < len(packed) <= _MAX_LOG:
        raise UsageError("the log is too long for an issue: open a pull request with 'mamf results submit LOG'")
    heading = f"`results/{place.as_posix()}`, compressed by `mamf results submit --issue`:"
    return f"{heading}\n\n{OPENING}\n{packed.decode()}{FENCE}\n"
