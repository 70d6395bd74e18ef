"""Checks of sizes, shares, times, seeds and numbers of steps. Pure.

Shapes, problems and plans use these checks, so bad input gives the same one-line error whether it comes from the
command line, Python or a log.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from dataclasses import fields
from typing import ClassVar, TypeVar

from mamf.errors import UnknownNameError, UsageError

#: The largest 64-bit index; no memory is this large.
LARGEST_SIZE = 2**63 - 1
#: Random number generators take seeds of 64 bits, and each operand adds a 32-bit number to the seed.
LARGEST_SEED = 2**63 - 1
#: The largest run log; its longest line (half a million samples), because a record takes several times its length in
#: memory; and the deepest nesting of objects.
MAX_LOG_BYTES, MAX_LINE_BYTES, MAX_NESTED = 512 << 20, 16 << 20, 32
TOO_LONG = f"has more than {MAX_LOG_BYTES >> 20} MiB: no run log is that long"
_MAX_DIGITS = len(str(LARGEST_SEED))
#: The most steps (combinations of kernel, problem, shape and regime) of a run.
MAX_STEPS = 1_000_000
# The number of characters that an error shows of a long value.
_MAX_SHOWN = 24


def whole_number(what: str, value: object, minimum: int = 1, maximum: int = LARGEST_SIZE) -> int:
    """Return ``value`` (an int, or numpy's) as an int. Raises UsageError if it is below or above the bounds."""
    if type(value) is not int:
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"{what} {shorten(value)}: it must be a whole number") from None
    if not minimum <= value <= maximum:
        bounds = f"at least {minimum}" if value < minimum else f"at most {maximum}"
        raise UsageError(f"{what} {shorten(value)}: it must be {bounds}")
    return value


def parse_digits(digits: str) -> int:
    """A whole number from its digits. Raises UsageError if there are more digits than any size has."""
    if len(digits) > _MAX_DIGITS and len(digits.lstrip("0")) > _MAX_DIGITS:
        raise UsageError(f"{shorten(digits)} is too large")
    return int(digits)


def parse_size(text: str) -> int:
    """A size or a count from text. Raises UsageError unless it is a whole number of at least 1."""
    number = parse_digits(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise UsageError(f"{shorten(text)!r} is not a whole number of at least 1")
    return number


def parse_share(text: str) -> float:
    """A share between 0 and 1 from ``0.3%`` or ``0.003``. Raises UsageError for any other text."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"{text!r} is not a share between 0 and 1; write 0.3% or 0.003")
    return value


def require_known(*named: tuple[str, str, Collection[str]]) -> None:
    """Check triples of label, value and known values. Raises UnknownNameError for the first unknown value."""
    for what, value, known in named:
        if value not in known:
            raise UnknownNameError(what, value, known)


def require_share(what: str, value: object) -> None:
    """Raises UsageError unless ``value`` is a number between 0 and 1."""
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(f"{what} {shorten(value)}: it must be a share between 0 and 1, such as 0.003")


def require_seconds(what: str, value: object) -> None:
    """Raises UsageError unless ``value`` is a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{what} {shorten(value)}: it must be a number of seconds above 0")


def require_some(what: str, values: object, kind: type) -> None:
    """Raises UsageError unless ``values`` is a list of at least one ``kind``; a string is not a list of letters."""
    if isinstance(values, str) or not isinstance(values, Collection):
        raise UsageError(f"{what} {shorten(values)}: it must be a list")
    if not values:
        raise UsageError(f"no {what}: name at least one")
    text = ", or its text" if hasattr(kind, "parse") else ""
    for value in values:
        if not isinstance(value, kind) or value == "":
            raise UsageError(f"{what} {shorten(value)}: each must be a {kind.__name__}{text}")


def require_steps(*counts: int) -> None:
    """Raises UsageError if the product of these counts exceeds the number of steps that a run may have."""
    steps = math.prod(counts)
    if steps > MAX_STEPS:
        raise UsageError(f"{shorten(steps)} rows exceed the limit of {MAX_STEPS}: choose fewer sizes or a larger STEP")


def count_values(values: Collection[object]) -> int:
    """The number of values. ``len`` fails for a range whose length exceeds a machine word."""
    return max(0, -((values.start - values.stop) // values.step)) if isinstance(values, range) else len(values)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite or infinite number, and neither NaN nor a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def shorten(value: object) -> str:
    """The text of a value, shortened for a one-line error."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "with thousands of digits"
    return text if len(text) <= 2 * _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


class Sizes:
    """Base class of shapes: frozen dataclasses of whole numbers, written by ``str`` and read by ``parse``.

    ``pattern``: matches the text, with one group per field. ``written``: describes the notation in error messages.
    """

    __slots__ = ()
    pattern: ClassVar[re.Pattern[str]]
    written: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # derived classes are dataclasses
            object.__setattr__(self, field.name, whole_number(field.name, getattr(self, field.name)))

    @classmethod
    def parse(cls: type[SizesT], text: str) -> SizesT:
        """Read the text that ``str`` writes. Raises UsageError for any other text."""
        match = cls.pattern.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not {cls.written}")
        return cls(*map(parse_digits, match.groups()))


SizesT = TypeVar("SizesT", bound=Sizes)
