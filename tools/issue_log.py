"""Writes the log in the body of a GitHub issue to a file.

    python tools/issue_log.py BODY.md LOG

``mamf results submit --issue`` prints such a body. The name of LOG never comes from it. Exit code 1 and one line for a
body without exactly one whole log. ``.github/workflows/submit.yml`` runs this on issues of anybody.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mamf.contribution.submission import decode_issue
from mamf.errors import MamfError
from mamf.files import create_whole


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
