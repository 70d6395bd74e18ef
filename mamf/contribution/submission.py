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


#: Characters that GitHub accepts in the body of an issue.
MOST_CHARACTERS = 65_536
# Left for the other fields of the issue form.
_MOST_OF_LOG = 60_000
# A log that fits has at most about 1 MB.
_MOST_BYTES = 4 << 20
_MOST_MEMORY = 32 << 20
_FENCE = "```"
_OPENING = f"{_FENCE}mamf-log"


def encode_issue(text: str, place: Path) -> str:
    """The issue body with a scrubbed log. ``place``: of the log in results/. Raises UsageError if it is too long."""
    content = text.encode()
    packed = b"" if len(content) > _MOST_BYTES else base64.encodebytes(lzma.compress(content))
    if not 0 < len(packed) <= _MOST_OF_LOG:
        raise UsageError("the log is too long for an issue: open a pull request with 'mamf results submit LOG'")
    heading = f"`results/{place.as_posix()}`, scrubbed and compressed by `mamf results submit --issue`:"
    return f"{heading}\n\n{_OPENING}\n{packed.decode()}{_FENCE}\n"


def decode_issue(body: str) -> bytes:
    """The log in an issue body. Raises RunLogError unless the body holds exactly one whole log of at most 4 MiB."""
    if len(body) > MOST_CHARACTERS:
        raise RunLogError(f"the issue has {len(body)} characters: {MOST_CHARACTERS} at most")
    lines = [line.rstrip() for line in body.split("\n")]
    if (found := lines.count(_OPENING)) != 1:
        raise RunLogError(f"the issue has {found} blocks that begin with {_OPENING}: one is due")
    block = lines[lines.index(_OPENING) + 1 :]
    if _FENCE not in block:
        raise RunLogError("the block with the log does not end: paste all lines that the command printed")
    return _unpack("".join(block[: block.index(_FENCE)]))


def _unpack(text: str) -> bytes:
    unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)
    try:
        content = unpacking.decompress(base64.b64decode(text, validate=True), _MOST_BYTES + 1)
    except (ValueError, lzma.LZMAError) as error:
        raise RunLogError(f"the log in the issue cannot be unpacked: {error}") from None
    if len(content) > _MOST_BYTES:
        raise RunLogError(f"the log in the issue has more than {_MOST_BYTES} bytes")
    if not unpacking.eof or unpacking.unused_data:
        raise RunLogError("the log in the issue is cut, or has something after its end")
    return content
