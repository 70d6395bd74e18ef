"""Read logs for commands that show them. Warn if the last line is incomplete, and show the progress of long reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mamf.cli.terminal import warn
from mamf.errors import LOG_TOO_LARGE_MESSAGE, MAX_LOG_BYTES, RunLogError

if TYPE_CHECKING:
    from mamf.ceilings.roof import Roofs
    from mamf.logs.run_log import ReadProgressCallback, RunLog

_DOWNLOAD_TIMEOUT_SECONDS = 30.0


def read_log(*paths: Path) -> RunLog:
    """Read a log, or all logs and folders of a run on several devices as one log. Raises RunLogError, which names the
    first wrong line, if a log is invalid.
    """
    from mamf.logs.shared_runs import read_log_or_shared_run

    log = read_log_or_shared_run(*paths)
    if log.is_truncated:
        warn(f"the last line of {log.path} is incomplete, so it is ignored")
    return log


def read_roofs(options: argparse.Namespace) -> Roofs | None:
    """Read the ceilings from the logs of ``--ceiling``, and return the roofs: the highest rates that these compute and
    bandwidth ceilings allow. Return None if the option is not given.

    Leave out matmul ceilings whose interval is unknown, unless a log has no others. Raises UsageError if a log has no
    ceiling, and IncomparableError if the logs are from several cards or a remaining ceiling has an unknown interval.
    """
    from mamf.logs.roofs import build_roofs_from_logs

    logs = [*map(read_log, options.ceiling or ())]
    return build_roofs_from_logs(logs, needs_known_intervals=True) if logs else None


@contextmanager
def show_reading_progress(paths: Iterable[Path]) -> Iterator[ReadProgressCallback]:
    """Show on a terminal how many bytes of the files are read, if that takes more than a second.

    Yields the function to call with the number of bytes of each read.
    """
    from tqdm import tqdm  # import tqdm only here, so that --help stays fast

    from mamf.machine.environment import pause_garbage_collection

    progress_bar = tqdm(
        total=sum(path.stat().st_size for path in paths if path.is_file()),
        unit="B",
        unit_scale=True,
        desc="reading",
        file=sys.stderr,
        disable=None,
        delay=1.0,
        leave=False,
    )
    with progress_bar, pause_garbage_collection():
        yield progress_bar.update


@contextmanager
def open_as_local_path(path: Path | str) -> Iterator[Path]:
    """Yield the path of a file or folder. Copy a pipe or the content of an https address to a temporary file, and yield
    the path of this file.

    A pipe is copied because it can be read only once. Raises RunLogError if the path does not exist, or if the content
    is too long or cannot be read.
    """
    import urllib.request  # import urllib only here, so that --help stays fast
    from http.client import HTTPException

    address, path = str(path), Path(path)
    is_address = "://" in address
    if not is_address and not path.exists():
        raise RunLogError(f"cannot read {path}: No such file or directory")
    if not is_address and (path.is_file() or path.is_dir()):
        yield path
        return
    if is_address and not address.startswith("https://"):
        raise RunLogError(f"cannot read {address}: use an https:// address, or download the log first")
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name.partition("?")[0])
        try:
            source = (
                urllib.request.urlopen(address, timeout=_DOWNLOAD_TIMEOUT_SECONDS) if is_address else path.open("rb")
            )
            with source as stream, copy.open("wb") as file:
                for piece in iter(lambda: stream.read(1 << 20), b""):
                    if file.write(piece) and file.tell() > MAX_LOG_BYTES:
                        raise RunLogError(f"{path} {LOG_TOO_LARGE_MESSAGE}")
        except (ValueError, HTTPException, urllib.error.URLError, TimeoutError) as error:
            raise RunLogError(f"cannot read {address}: {error}") from None
        yield copy
