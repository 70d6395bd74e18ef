"""The lines of a run log, and the JSON record in each."""

from __future__ import annotations

import codecs
import json
import math
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from mamf.errors import RunLogError
from mamf.limits import MOST_BYTES, MOST_LINE_BYTES, MOST_NESTED, TOO_LONG

_TOO_DEEP = f"nested more than {MOST_NESTED} deep"
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
    """Parse a line of a log; of a repeated field, the last one counts. Raises ValueError for anything but one object
    with finite numbers.
    """
    text = line.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            record = msgspec.json.decode(text)
        except msgspec.DecodeError:
            # A command line that is not UTF-8 is written with halves of surrogate pairs, which msgspec refuses.
            record = _DECODER.decode(text.decode())
    except ValueError:
        raise ValueError("not a JSON object, as in a run log") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(record, dict) or not isinstance(record.get("record"), str):
        raise ValueError("not a record of a run log")
    if line.count(b"{") + line.count(b"[") > MOST_NESTED and _is_nested_deeper(record, MOST_NESTED):
        raise ValueError(_TOO_DEEP)
    return record


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _is_nested_deeper(record: object, depth: int) -> bool:
    """Whether objects and lists are nested more than ``depth`` deep: recursive functions would fail."""
    level = [record]
    for _ in range(depth):
        values = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [value for value in chain.from_iterable(values) if isinstance(value, (dict, list))]
    return bool(level)


def repeated_fields(line: bytes) -> list[str]:
    """The names that an object of this line has more than once; none in a line that is not JSON."""
    found: list[str] = []

    def note_repeated(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            found.extend(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)

    try:
        json.loads(line, object_pairs_hook=note_repeated)
    except (ValueError, RecursionError):
        return []
    return found
