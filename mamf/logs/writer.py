"""Writes run logs record by record, for one process at a time, and never overwrites a file.

Each line is written by one system call and reaches the operating system before the next shape starts: a killed process
loses at most the shape in flight. If another program changes the file, the whole log is written again from a copy in
memory, at its path or under a free name beside it, else in the folder for temporary files, and continues there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import stat
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mamf.errors import LogChangedWarning, MamfError, RunLogError, RunLogWriteError, UsageError
from mamf.files import create_whole, make_folder
from mamf.logs.run_log import SCHEMA, RunLog, read_run_log
from mamf.machine.privacy import scrub_record

# O_NONBLOCK: a pipe is refused, not waited for. O_BINARY: Windows writes the bytes as they are.
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class RunLogWriter(contextlib.AbstractContextManager["RunLogWriter"]):
    """Appends records to a log that is locked until ``close``. Use as a context manager.

    ``path``: where the log is now. Each change by another program is a LogChangedWarning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._place = path.absolute()  # a script may change the working directory
        self._descriptor = -1
        self._copy = io.BytesIO()

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], is_numbered: bool = False) -> RunLogWriter:
        """Start a new log, which has its header from the first moment on, whatever ends the process. ``is_numbered``:
        under a free name beside the path if that is taken.

        Raises UsageError when the file exists or cannot be created, as a log is never overwritten, and RunLogWriteError
        when the disk is full.
        """
        line = as_line("header", {"schema": SCHEMA, **header})
        if not is_numbered and os.path.lexists(path):
            raise UsageError(f"{path} already exists: name another, or --resume it")
        writer = cls(create_whole(path, line, is_numbered))
        writer._keep(line)
        try:
            writer._open()
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(cls, path: Path) -> tuple[RunLog, RunLogWriter]:
        """Lock a log, then read it: what was read before another process ended would be out of date, and what that one
        wrote meanwhile cut off. Nothing is changed before the first record.

        Raises UsageError when it cannot be written or another process holds it, RunLogError when it cannot be read,
        which says what can be saved.
        """
        writer = cls(path)
        try:
            writer._open()
            if not stat.S_ISREG(os.fstat(writer._descriptor).st_mode):
                raise UsageError(f"cannot resume {path}: it is no regular file")
            log = read_run_log(path)
            writer._keep(path.read_bytes())
            return log, writer
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError):
                raise UsageError(f"cannot resume {path}: {error.strerror}") from None
            if isinstance(error, RunLogError) and error.whole_lines:
                raise RunLogError(
                    f"{error}; the lines before it can be saved and resumed: "
                    f"head -n {error.whole_lines} {shlex.quote(str(path))} > NEW.jsonl"
                ) from None
            raise

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def write_resume(self, log: RunLog, fields: Mapping[str, Any]) -> None:
        """Cut off the line that a killed run did not finish, and write that the log is resumed."""
        line = as_line("resume", fields)
        self.append()
        os.ftruncate(self._descriptor, log.valid_bytes)
        self._copy.truncate(log.valid_bytes)
        self.append(line)

    def write(self, record: str, fields: Mapping[str, Any]) -> None:
        """Append one record. Raises RunLogWriteError (disk full) and leaves the log as it was before."""
        self.append(as_line(record, fields))

    def append(self, line: bytes = b"") -> None:
        """Append a whole line; without one, only make sure that the file is whole. Raises as ``write`` does."""
        change = self._save_beside() if self._is_changed() else ""
        size = self._copy.seek(0, os.SEEK_END)
        self._copy.write(line)  # first: after an interrupt the file lacks what the copy holds
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._copy.truncate(size)
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise RunLogWriteError(
                f"cannot write {self.path}: {error.strerror}; it holds all shapes up to here"
            ) from None
        if change:  # last: a filter may turn it into an error, which must cost no row
            warnings.warn(change, LogChangedWarning, stacklevel=3)

    def _is_changed(self) -> bool:
        """Whether another program changed the file since the last line."""
        try:
            state, is_same = self._place.stat(), os.path.samestat(os.fstat(self._descriptor), self._place.stat())
        except OSError:
            return True
        return not is_same or state.st_size != self._copy.seek(0, os.SEEK_END)

    def _save_beside(self) -> str:
        """Write the whole log again; returns what happened, in a line. Raises RunLogWriteError if that fails."""
        change = f"{self.path} was changed by another program"
        self._copy.seek(0)
        whole = self._copy.read()
        for folder in (self._place.parent, Path(tempfile.gettempdir())):
            try:
                make_folder(folder)
                self.path = self._place = create_whole(folder / self._place.name, whole, is_numbered=True)
                self._open()
                return f"{change}: the whole log is now {self.path}"
            except (MamfError, OSError) as error:
                change = f"{change}; {error}"
        raise RunLogWriteError(change)

    def _open(self) -> None:
        self.close()
        self._descriptor = os.open(self._place, _FLAGS)
        lock(self._descriptor, self.path)

    def _keep(self, data: bytes) -> None:
        self._copy.truncate(0)
        self._copy.seek(0)
        self._copy.write(data)

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *raised: object) -> None:
        self.close()


def as_line(record: str, fields: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON. Raises RunLogWriteError for what JSON has no value for, such as NaN."""
    try:
        text = json.dumps({"record": record, **scrub_record(dict(fields))}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunLogWriteError(f"a {record} cannot be written as JSON: {error}") from None
    return f"{text}\n".encode()


def lock(descriptor: int, path: Path) -> None:
    """Keep a second process from writing the same log. Raises UsageError that says which one does."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{path} is being written by {holder(descriptor)}: wait for it to end") from None
    except OSError:
        return  # a file system without locks


def holder(descriptor: int) -> str:
    """The process that holds the lock of a file, if the system reports it (Linux)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF
            fields = line.split()
            if (
                fields[1] == "FLOCK"
                and fields[5].rpartition(":")[2] == str(os.fstat(descriptor).st_ino)
                and int(fields[4]) > 0
            ):
                return f"process {fields[4]}"
    return "another process"
