"""The values of options: durations, shares, sizes and shapes from text."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from mamf.errors import UsageError
from mamf.limits import parse_digits, shorten
from mamf.operations.attention.shapes import HeadDims
from mamf.operations.matmul.shapes import MatmulShape

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
#: Every device of the backend; the device of each process that a launcher started.
ALL, RANKS = -1, -2


def duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``5m`` or ``1.5h``."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a duration; write 90s, 5m or 1.5h")
    return seconds


def share(text: str) -> float:
    """A share between 0 and 1 from ``0.3%`` or ``0.003``."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1; write 0.3% or 0.003")
    return value


def sparsity(text: str) -> float:
    """A share from 0 to below 1: ``0.5`` or ``50%``."""
    return 0.0 if text.strip(" %") in ("0", "0.0") else share(text)


def size(text: str) -> int:
    """A dimension or a count: at least 1."""
    if not text.isascii() or not text.isdigit() or _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number of at least 1")
    return _number(text)


def head_dims(text: str) -> HeadDims:
    """Widths of keys and values: ``128`` for both, or ``192/128``."""
    keys, *values = map(size, text.split("/", 1))
    return HeadDims(keys, *(values or [keys]))


def bound(text: str) -> int:
    """A bound of a range; the sizes of the range are checked together."""
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number")
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _number(digits: str) -> int:
    try:
        return parse_digits(digits)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def filled(text: str) -> str:
    """A text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    return Path(filled(text))


def shape(text: str) -> MatmulShape:
    try:
        return MatmulShape.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number from 0")
    return _number(text)


def device_index(text: str) -> int:
    """The index of a device, ``all`` (ALL) or ``ranks`` (RANKS)."""
    return {"all": ALL, "ranks": RANKS}[text] if text in ("all", "ranks") else index(text)


def row_count(text: str) -> int | None:
    """How many rows to show: a number, or ``all`` (None)."""
    return None if text == "all" else index(text)
