"""Write run logs record by record. Only one process at a time can write a log, and an existing file is never
overwritten.

One system call writes each line before the run measures the next shape, so a killed process loses at most the shape
that it was measuring. If another program changes the file, the writer writes the whole log again from a copy in memory
and appends later records to that new file. The new file gets the path of the log if possible, otherwise a free name
next to it, otherwise a name in the folder for temporary files.
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
from mamf.files import create_file_atomically, make_folder
from mamf.logs.run_log import SCHEMA_VERSION, RunLog, read_run_log
from mamf.machine.privacy import scrub_record

# O_NONBLOCK keeps open() from blocking on a pipe. O_BINARY keeps Windows from changing line ends.
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class RunLogWriter(contextlib.AbstractContextManager["RunLogWriter"]):
    """A context manager that appends records to a log, and keeps the file locked until ``close``.

    ``path``: the path of the log. If another program changes the file, the writer continues the log in a new file,
    updates ``path``, and issues a LogChangedWarning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute_path = path.absolute()  # A script may change its working directory during the run.
        self._descriptor = -1
        self._copy = io.BytesIO()

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], may_add_number_to_name: bool = False) -> RunLogWriter:
        """Start a new log with a header. If the process is killed while this method runs, no file without a header is
        left behind.

        ``may_add_number_to_name``: whether to add a number to the name of the file if the name is taken. Raises
        UsageError if the file exists or cannot be created, and RunLogWriteError if the disk is full.
        """
        line = encode_record("header", {"schema": SCHEMA_VERSION, **header})
        if not may_add_number_to_name and os.path.lexists(path):
            raise UsageError(f"{path} already exists: choose another name, or continue it with --resume")
        writer = cls(create_file_atomically(path, line, may_add_number_to_name))
        writer._copy.write(line)
        try:
            writer._open_and_lock()
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def resume(cls, path: Path) -> tuple[RunLog, RunLogWriter]:
        """Lock a log, then read it. The file does not change before the first record is written.

        The lock comes first, because another process may still be writing the log. Raises UsageError if the log cannot
        be written or another process has it open. Raises RunLogError if the log cannot be read; the message says how to
        save the lines before the error.
        """
        writer = cls(path)
        try:
            writer._open_and_lock()
            if not stat.S_ISREG(os.fstat(writer._descriptor).st_mode):
                raise UsageError(f"cannot resume {path}: it is not a regular file; give a run log")
            log = read_run_log(path)
            writer._copy.write(path.read_bytes())
            return log, writer
        except BaseException as error:
            writer.close()
            if isinstance(error, OSError):
                raise UsageError(f"cannot resume {path}: {error.strerror}") from None
            if isinstance(error, RunLogError) and error.readable_line_count:
                raise RunLogError(
                    f"{error}; to save and resume the lines before it: "
                    f"head -n {error.readable_line_count} {shlex.quote(str(path))} > NEW.jsonl"
                ) from None
            raise

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def write_resume_record(self, log: RunLog, fields: Mapping[str, Any]) -> None:
        """Remove the incomplete last line of a killed run, and append a record which says that the run was resumed."""
        line = encode_record("resume", fields)
        self.append_line()
        os.ftruncate(self._descriptor, log.valid_bytes)
        self._copy.truncate(log.valid_bytes)
        self.append_line(line)

    def write(self, record_name: str, fields: Mapping[str, Any]) -> None:
        """Append a record. If the disk is full, restore the log and raise RunLogWriteError."""
        self.append_line(encode_record(record_name, fields))

    def append_line(self, line: bytes = b"") -> None:
        """Append an encoded line. If another program has changed the file, first write the whole log again.

        An empty ``line`` appends nothing. Raises RunLogWriteError if the file cannot be written.
        """
        change = self._rewrite_log() if self._was_file_changed_externally() else ""
        size = self._copy.seek(0, os.SEEK_END)
        self._copy.write(line)  # Write to the copy first, because an interrupt may prevent the write to the file.
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            self._copy.truncate(size)
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            # Leave the folder out of the message: the log's summary stores the message, and a log must not contain the
            # user's folders.
            raise RunLogWriteError(
                f"cannot write the log {self.path.name}: {error.strerror}; it contains all earlier rows"
            ) from None
        # Warn only after the write. A filter may turn the warning into an exception, which must not prevent the write.
        if change:
            warnings.warn(change, LogChangedWarning, stacklevel=3)

    def _was_file_changed_externally(self) -> bool:
        """Return whether another program has changed or replaced the file since the writer wrote its last line."""
        try:
            now, written = self._absolute_path.stat(), os.fstat(self._descriptor)
        except OSError:
            return True
        return not os.path.samestat(now, written) or now.st_size != self._copy.seek(0, os.SEEK_END)

    def _rewrite_log(self) -> str:
        """Write the whole log to a new file and append there from now on. Return one line that says what happened.

        Raises RunLogWriteError if no new file can be written.
        """
        change = f"{self.path} was changed by another program"
        for folder in (self._absolute_path.parent, Path(tempfile.gettempdir())):
            try:
                make_folder(folder)
                self.path = self._absolute_path = create_file_atomically(
                    folder / self._absolute_path.name, self._copy.getvalue(), may_add_number_to_name=True
                )
                self._open_and_lock()
                return f"{change}, so mamf wrote the whole log again to {self.path}"
            except (MamfError, OSError) as error:
                change = f"{change}; {error}"
        raise RunLogWriteError(change)

    def _open_and_lock(self) -> None:
        """Open the file and lock it, if the system can. Raises UsageError if another process has locked it."""
        self.close()
        self._descriptor = os.open(self._absolute_path, _OPEN_FLAGS)
        try:
            import fcntl
        except ImportError:  # Windows has no fcntl.
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing {self.path}: wait for it to end") from None
        except OSError:
            return  # The file system has no locks.

    def close(self) -> None:
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1

    def __exit__(self, *raised: object) -> None:
        self.close()


def encode_record(record_name: str, fields: Mapping[str, Any]) -> bytes:
    """Encode a record as a line of JSON, without private texts. Raises RunLogWriteError if ``fields`` has a value that
    JSON cannot store, such as NaN.
    """
    try:
        return f"{json.dumps({'record': record_name, **scrub_record(dict(fields))}, allow_nan=False)}\n".encode()
    except (TypeError, ValueError) as error:
        raise RunLogWriteError(f"a record of type {record_name!r} cannot be written as JSON: {error}") from None
