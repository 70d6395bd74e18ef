"""A log as the body of a GitHub issue: compressed, as base64, in one fenced block. A body to decode is foreign text."""

from __future__ import annotations

import base64
import lzma
from pathlib import Path

from mamf.errors import RunLogError, UsageError

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
