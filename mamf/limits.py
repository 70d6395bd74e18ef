"""What a size, a share, a time, a seed or a number of steps may be, wherever it comes from. Pure.

Shapes, problems and plans ask here, so the command line, the library and a log are refused alike, in one line.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection
from dataclasses import fields
from typing import ClassVar, TypeVar

from mamf.errors import UnknownNameError, UsageError

#: What a 64-bit index reaches; no memory does.
LARGEST_SIZE = 2**63 - 1
#: Generators of random numbers take 64 bits, and each operand adds 32 of its own.
LARGEST_SEED = 2**63 - 1
_MOST_DIGITS = len(str(LARGEST_SEED))
#: Steps of a run.
MOST_STEPS = 1_000_000
# Of a number of a hundred digits the first say enough.
_MOST_SHOWN = 24


def whole_number(what: str, value: object, least: int = 1, most: int = LARGEST_SIZE) -> int:
    """``value`` as an int, numpy's too. Raises UsageError for what is no whole number from ``least`` to ``most``."""
    if type(value) is not int:
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f"{what} {shorten(value)}: it must be a whole number") from None
    if not least <= value <= most:
        bounds = f"at least {least}" if value < least else f"at most {most}"
        raise UsageError(f"{what} {shorten(value)}: it must be {bounds}")
    return value


def parse_digits(digits: str) -> int:
    """A whole number from its digits. Raises UsageError for more of them than any size has."""
    if len(digits) > _MOST_DIGITS and len(digits.lstrip("0")) > _MOST_DIGITS:
        raise UsageError(f"{shorten(digits)} is too large a number")
    return int(digits)


def require_known(*named: tuple[str, str, Collection[str]]) -> None:
    """What each is, its value and the values that are known. Raises UnknownNameError for the first that is not."""
    for what, value, known in named:
        if value not in known:
            raise UnknownNameError(what, value, known)


def require_share(what: str, value: object) -> None:
    """Raises UsageError for anything but a number between 0 and 1."""
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(f"{what} {shorten(value)}: it must be a share between 0 and 1, such as 0.003")


def require_seconds(what: str, value: object) -> None:
    """Raises UsageError for anything but a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{what} {shorten(value)}: it must be a number of seconds above 0")


def require_some(what: str, values: object, kind: type) -> None:
    """Raises UsageError for anything but a list of at least one of a kind; a text is no list of its letters."""
    if isinstance(values, str) or not isinstance(values, Collection):
        raise UsageError(f"{what} {shorten(values)}: it must be a list")
    if not values:
        raise UsageError(f"no {what}: name at least one")
    for value in values:
        if not isinstance(value, kind) or value == "":
            raise UsageError(f"{what} {shorten(value)}: each must be a {kind.__name__}")


def require_steps(*counts: int) -> None:
    """Raises UsageError where the product of these counts is more steps than a run may have."""
    steps = math.prod(counts)
    if steps > MOST_STEPS:
        raise UsageError(f"{shorten(steps)} steps are more than {MOST_STEPS}: ask for fewer sizes, or a larger step")


def count_values(values: Collection[object]) -> int:
    """How many there are: ``len`` fails for a range of more than a machine word counts."""
    if isinstance(values, range):
        return max(0, -((values.start - values.stop) // values.step))
    return len(values)


def is_number(value: object) -> bool:
    """Whether it is a finite or infinite number: neither NaN nor yes or no."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def shorten(value: object) -> str:
    """A value in an error, which is to stay a line."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "of thousands of digits"
    return text if len(text) <= 2 * _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


class Sizes:
    """A base of shapes: frozen dataclasses of whole numbers, which ``str`` writes and ``parse`` reads.

    ``pattern``: of the text, a group a field. ``written``: what it is and how it is written, for who writes another.
    """

    __slots__ = ()
    pattern: ClassVar[re.Pattern[str]]
    written: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # derived classes are dataclasses
            object.__setattr__(self, field.name, whole_number(field.name, getattr(self, field.name)))

    @classmethod
    def parse(cls: type[SizesT], text: str) -> SizesT:
        """Raises UsageError for anything but what ``str`` gives."""
        match = cls.pattern.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not {cls.written}")
        return cls(*map(parse_digits, match.groups()))


SizesT = TypeVar("SizesT", bound=Sizes)
