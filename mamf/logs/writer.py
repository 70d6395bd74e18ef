"""Writes run logs record by record, for one process at a time, and never overwrites a file.

Each line is written by one system call and reaches the operating system before the next shape starts: a killed process
loses at most the shape in flight.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mamf.errors import LogMismatchError, RunLogWriteError, UsageError
from mamf.files import create_whole
from mamf.logs.run_log import SCHEMA, RunLog, read_run_log
from mamf.machine.environment import scrub_record


class RunLogWriter:
    """Appends records to a log that is locked until ``close``. Use as a context manager."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> RunLogWriter:
        """Start a new log, which has its header from the first moment on, whatever ends the process.

        Raises UsageError when the file exists or cannot be created, as a log is never overwritten, and RunLogWriteError
        when the disk is full.
        """
        line = as_line("header", {"schema": SCHEMA, **header})
        if os.path.lexists(path):
            raise UsageError(f"{path} exists and is not overwritten: name another, or --resume it")
        create_whole(path, line)
        writer = cls(path, os.open(path, os.O_WRONLY | os.O_APPEND))
        try:
            lock(writer._descriptor, path)
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(cls, path: Path) -> tuple[RunLog, RunLogWriter]:
        """Lock a log, then read it: what was read before another process ended would be out of date, and what that one
        wrote meanwhile cut off. Nothing is changed before the first record.

        Raises UsageError when it cannot be written or another process holds it, RunLogError when it cannot be read, and
        LogMismatchError for a log of an earlier schema: its rounds and figures would be mixed with others.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise UsageError(f"cannot resume {path}: {error.strerror}") from None
        writer = cls(path, descriptor)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError(f"cannot resume {path}: it is no regular file")
            lock(descriptor, path)
            log = read_run_log(path)
            if (schema := log.header["schema"]) != SCHEMA:
                raise LogMismatchError(
                    f"{path} has schema {schema}, whose figures are measured differently: start a new log, "
                    f"or resume with the version of mamf that wrote it"
                )
            return log, writer
        except BaseException:
            writer.close()
            raise

    def write_resume(self, log: RunLog, fields: Mapping[str, Any]) -> None:
        """Cut off the line that a killed run did not finish, and write that the log is resumed."""
        line = as_line("resume", fields)
        if log.is_truncated:
            os.ftruncate(self._descriptor, log.valid_bytes)
        self._append(line)

    def write(self, record: str, fields: Mapping[str, Any]) -> None:
        """Append one record. Raises RunLogWriteError (disk full) and leaves the log as it was before."""
        self._append(as_line(record, fields))

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # not a regular file: nothing to take back
                os.ftruncate(self._descriptor, size)
            raise RunLogWriteError(
                f"cannot write {self.path}: {error.strerror}; it holds all shapes up to here"
            ) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode) and int(fields[4]) > 0:
                return f"process {fields[4]}"
    return "another process"
