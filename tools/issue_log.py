"""Writes the log in the body of a GitHub issue to a file.

    python tools/issue_log.py BODY.md LOG

``mamf results submit --issue`` prints such a body; one to decode is foreign text. The name of LOG never comes from it.
Exit code 1 and one line for a body without exactly one whole log. ``.github/workflows/submit.yml`` runs this on issues
of anybody.
"""

from __future__ import annotations

import argparse
import base64
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from mamf.contribution.submission import FENCE, MOST_BYTES, OPENING
from mamf.errors import MamfError, RunLogError
from mamf.files import create_whole

#: Characters that GitHub accepts in the body of an issue.
MOST_CHARACTERS = 65_536
_MOST_MEMORY = 32 << 20


def decode_issue(body: str) -> bytes:
    """The log in an issue body. Raises RunLogError unless the body holds exactly one whole log of at most 4 MiB."""
    if len(body) > MOST_CHARACTERS:
        raise RunLogError(f"the issue has {len(body)} characters: {MOST_CHARACTERS} at most")
    lines = [line.rstrip() for line in body.split("\n")]
    if (found := lines.count(OPENING)) != 1:
        raise RunLogError(f"the issue has {found} blocks that begin with {OPENING}: one is due")
    block = lines[lines.index(OPENING) + 1 :]
    if FENCE not in block:
        raise RunLogError("the block with the log does not end: paste all lines that the command printed")
    return _unpack("".join(block[: block.index(FENCE)]))


def _unpack(text: str) -> bytes:
    unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_MEMORY)
    try:
        content = unpacking.decompress(base64.b64decode(text, validate=True), MOST_BYTES + 1)
    except (ValueError, lzma.LZMAError) as error:
        raise RunLogError(f"the log in the issue cannot be unpacked: {error}") from None
    if len(content) > MOST_BYTES:
        raise RunLogError(f"the log in the issue has more than {MOST_BYTES} bytes")
    if not unpacking.eof or unpacking.unused_data:
        raise RunLogError("the log in the issue is cut, or has something after its end")
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the log in the body of a GitHub issue to a file.")
    parser.add_argument("body", type=Path, metavar="BODY")
    parser.add_argument("log", type=Path, metavar="LOG")
    options = parser.parse_args(arguments)
    try:
        create_whole(options.log, decode_issue(options.body.read_text(encoding="utf-8", errors="replace")))
    except MamfError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
