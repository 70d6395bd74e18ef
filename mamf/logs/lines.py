"""The lines of a run log, and the JSON record in each."""

from __future__ import annotations

import codecs
import json
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mamf.errors import RunLogError
from mamf.limits import MOST_BYTES, MOST_LINE_BYTES, MOST_NESTED, TOO_LONG
from mamf.logs.validator import is_nested_deeper

#: Receives how many bytes or characters more were read, for a progress bar.
Seen = Callable[[int], object]


def lines_of(path: Path, seen: Seen | None = None) -> Iterator[bytes]:
    """The whole lines of a regular file, one at a time. Raises RunLogError for a file without any, for a longer file or
    line than a log has, and for a pipe or a device, which may never end.
    """
    is_empty = True
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) and not stat.S_ISDIR(state.st_mode):
            raise RunLogError(f"cannot read {path}: it is not a regular file: save the log first")
        if state.st_size > MOST_BYTES:
            raise RunLogError(f"{path} {TOO_LONG}")
        with path.open("rb") as file:
            for line in iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""):
                if len(line) > MOST_LINE_BYTES:
                    raise RunLogError(f"{path} has a line of more than {MOST_LINE_BYTES >> 20} MiB: not a run log")
                if line.endswith(b"\n"):
                    is_empty = False
                    yield line[:-1]
                if seen:
                    seen(len(line))
    except OSError as error:
        folder = ": 'mamf report' takes folders" if path.is_dir() else ""
        raise RunLogError(f"cannot read {path}: {error.strerror}{folder}") from None
    if is_empty:
        raise RunLogError(f"{path} holds no whole line: not a run log, emptied, or killed before it began")


def parse_records(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record with its line, one at a time. Raises RunLogError naming the line that is no record."""
    for number, line in enumerate(lines, start=1):
        try:
            yield number, parse_record(line)
        except ValueError as error:
            raise RunLogError(f"{path}, line {number}: {error}", number - 1) from None


def parse_record(line: bytes) -> dict[str, Any]:
    """Parse a line of a log. Raises ValueError for anything but one object with unique keys and finite numbers."""
    try:
        text = line.removeprefix(codecs.BOM_UTF8).strip(b" \t\r").decode()
        record, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        raise ValueError("not a JSON object, as in a run log") from None
    if end < len(text):
        raise ValueError("not one JSON object")
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise ValueError("not a record of a run log")
    if line.count(b"{") + line.count(b"[") > MOST_NESTED and is_nested_deeper(record, MOST_NESTED):
        raise ValueError(f"nested more than {MOST_NESTED} deep")
    return record


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Readers that keep the last of two equal keys would never see what the first one holds."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_without_repetition)
