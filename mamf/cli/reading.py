"""Reading a log that is to be shown: what a killed run left incomplete is told."""

from __future__ import annotations

from pathlib import Path

from mamf.cli.terminal import warn
from mamf.logs.run_log import RunLog, read_run_log


def read_log(path: Path) -> RunLog:
    """Raises RunLogError naming the line and what is wrong with it."""
    log = read_run_log(path)
    if log.is_truncated:
        warn(f"the last line of {log.path} is incomplete and left out")
    return log
