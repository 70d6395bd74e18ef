"""Write files atomically: a reader never sees a partial file, and if the disk is full the old file stays intact.

The logs of running measurements are not written by this module: logs/writer.py appends to them.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import importlib.resources
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from mamf.errors import MamfError, RunLogWriteError, UsageError

_WRITE_BUFFER_BYTES = 1 << 20
#: The errno values of disk errors, which the user cannot fix by choosing another file name.
_DISK_ERROR_NUMBERS = {errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC)}

FileContent = str | bytes | Iterable[str]


def read_packaged_csv_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of the CSV file ``name``, which is installed with this package. Each row is a dict with the names
    of the columns as keys.
    """
    return list(
        csv.DictReader(importlib.resources.files("mamf").joinpath(name).read_text(encoding="utf-8").splitlines())
    )


def make_folder(folder: Path, advice: str = "") -> None:
    """Create a folder and its parents unless the folder exists. Raises UsageError, whose message ends with ``advice``,
    if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create folder {folder}: {error.strerror}{advice}") from None


def write_file_atomically(path: Path, content: FileContent) -> None:
    """Write a file so that it has either its old content or all of the new content at any moment.

    ``content``: text, which is encoded as UTF-8, or bytes, or an iterable of text. Raises RunLogWriteError if the disk
    is full, and UsageError if the file cannot be written for another reason.
    """
    with _convert_os_errors(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            # Write into the existing pipe or device, such as /dev/stdout, because it cannot be replaced.
            with path.open("wb") as stream:
                stream.writelines(_encode_content(content))
            return
        # Resolve a symbolic link, so that its target is replaced and not the link.
        target = path.resolve()
        with _write_temporary_file(target, content) as temporary_path:
            temporary_path.replace(target)


def create_file_atomically(path: Path, content: FileContent, may_add_number_to_name: bool = False) -> Path:
    """Create a file atomically, so that no reader ever sees it with partial content, and return its path.

    If a file of this name exists, raise UsageError or, if ``may_add_number_to_name``, use the first free name of
    ``yield_numbered_paths``. Raises the same errors as ``write_file_atomically``.
    """
    with _convert_os_errors(path), _write_temporary_file(path, content) as temporary_path:
        for place in yield_numbered_paths(path) if may_add_number_to_name else (path,):
            with contextlib.suppress(FileExistsError):
                _rename_without_replacing(temporary_path, place)
                return place
    raise UsageError(f"{path} already exists: choose another name")


def yield_numbered_paths(path: Path) -> Iterator[Path]:
    """Yield a path, then numbered paths in the same folder: ``a.jsonl``, ``a-2.jsonl``, ``a-3.jsonl``, ..."""
    yield path
    for number in itertools.count(2):
        yield path.with_stem(f"{path.stem}-{number}")


@contextlib.contextmanager
def _write_temporary_file(target: Path, content: FileContent) -> Iterator[Path]:
    """Write a temporary file in the folder of ``target`` and yield its path. Remove the file afterwards, even after
    Ctrl-C.
    """
    temporary_path = target.with_name(f".mamf-{secrets.token_hex(8)}.part")
    try:
        with temporary_path.open("xb", buffering=_WRITE_BUFFER_BYTES) as file:
            file.writelines(_encode_content(content))
            file.flush()
            os.fsync(file.fileno())
        yield temporary_path
    finally:
        with contextlib.suppress(OSError):
            temporary_path.unlink(missing_ok=True)


def _encode_content(content: FileContent) -> Iterable[bytes]:
    if isinstance(content, bytes):
        return (content,)
    return (piece.encode() for piece in ((content,) if isinstance(content, str) else content))


def _rename_without_replacing(temporary_path: Path, target: Path) -> None:
    """Rename a temporary file to ``target``. Raises FileExistsError if ``target`` exists. Make a hard link, because on
    some systems a rename would replace an existing ``target``.
    """
    try:
        os.link(temporary_path, target)
    except FileExistsError:
        raise
    except OSError:  # The file system has no hard links, so reserve the name with an empty file.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        temporary_path.replace(target)


@contextlib.contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}; create it first") from None
        error_class: type[MamfError] = RunLogWriteError if error.errno in _DISK_ERROR_NUMBERS else UsageError
        raise error_class(f"cannot write {path}: {error.strerror or error}") from None
