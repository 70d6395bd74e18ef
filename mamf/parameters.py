"""The parameters of an operation: the sizes of its shapes and the fields of its problems.

Each is a field of a dataclass. The options of the command line, the keywords of the Python API and their help are made
from its type, its default and the metadata that ``describe`` adds.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mamf.dtypes import DTYPES
from mamf.errors import UsageError
from mamf.kernel import DATA
from mamf.limits import (
    LARGEST_SEED,
    LARGEST_SIZE,
    count_values,
    parse_digits,
    require_known,
    require_steps,
    shorten,
    whole_number,
)

_KEY = "mamf"
_WORDS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class Parameter:
    """A size or a field: one value of a shape or a problem.

    - ``name``, ``kind``: the dataclass field and its type.
    - ``help``, ``default``: texts for the help; ``default`` may be empty.
    - ``choices``: the allowed values; empty for any. ``minimum``, ``maximum``: bounds of a whole number.
    - ``keyword``: the name of its option and of its keyword in the API (plural if it takes several values), if that is
      not ``name``.
    - ``metavar``: the placeholder of a value in help.
    - ``read``: parses a value from text; None parses it by its type.
    - ``has_range``: whether it also has an option ``--NAME-range START STOP STEP``.
    - ``is_rare``: whether only --help-all shows its option.
    """

    name: str
    kind: Any
    help: str = ""
    default: str = ""
    choices: Collection[Any] = ()
    minimum: int = 1
    maximum: int = LARGEST_SIZE
    keyword: str = ""
    metavar: str = ""
    read: Callable[[str], Any] | None = None
    has_range: bool = False
    is_rare: bool = False

    @property
    def option(self) -> str:
        return f"--{(self.keyword or self.name).replace('_', '-')}"

    @property
    def is_readable(self) -> bool:
        """Whether its values can be given as text."""
        return self.read is not None or _required(self.kind) in (str, int, float, bool) or bool(self.choices)

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def convert(self, text: str) -> Any:
        """Convert text to a value, which need not be one of the choices. Raises UsageError for invalid text."""
        return self.read(text) if self.read else _convert(self.kind, text)

    def parse(self, text: str) -> Any:
        """Convert text to an allowed value. Raises UsageError for any other text."""
        value = self.convert(text)
        if self.choices:
            require_known((self.name.replace("_", " "), value, self.choices))
        return value

    def values_of(self, given: Any) -> tuple[Any, ...]:
        """The values of a keyword, which may be one or several, as text or as values. Raises UsageError."""
        several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        return tuple(self.parse(str(each)) if self.read or isinstance(each, str) else each for each in several)


def describe(help: str = "", **more: Any) -> Mapping[str, Any]:
    """Make the ``metadata`` of a dataclass field: its help and ``more`` attributes of its Parameter."""
    return {_KEY: {"help": help, **more}}


#: The metadata of the fields that every problem has.
_OF_EVERY_PROBLEM: Mapping[str, Mapping[str, Any]] = {
    "data": {"help": "values of the operands", "choices": DATA, "is_rare": True},
    "seed": {
        "help": "seed of all random choices",
        "metavar": "N",
        "minimum": 0,
        "maximum": LARGEST_SEED,
        "is_rare": True,
    },
}
#: The metadata of a field that follows from other fields, so that it is not a parameter.
DERIVED: Mapping[str, Any] = {_KEY: None}


def parameters_of(kind: Any) -> Mapping[str, Parameter]:
    """The parameters of a dataclass of shapes or problems, by name."""
    return _read_parameters(kind)


@functools.cache  # used to check the problem of each row of a log
def _read_parameters(kind: Any) -> Mapping[str, Parameter]:
    hints, found = get_type_hints(kind), dict[str, Parameter]()
    for field in fields(kind):
        more = field.metadata.get(_KEY, _OF_EVERY_PROBLEM.get(field.name, {}))
        if not field.init or more is None:
            continue
        if get_origin(hints[field.name]) is Literal:
            more = {"choices": get_args(hints[field.name]), **more}
        default = "" if field.default in (MISSING, None) else _write(field.default)
        found[field.name] = Parameter(field.name, hints[field.name], **{"default": default, **more})
    return found


class DeclaredProblem:
    """Base class of problems, which are dataclasses: checks that the values of all fields are allowed."""

    dtype: str

    def __post_init__(self) -> None:
        """Raises UsageError for a value that is not allowed."""
        require_known(("dtype", self.dtype, DTYPES))
        for name, parameter in parameters_of(type(self)).items():
            if parameter.choices:
                require_known((name.replace("_", " "), getattr(self, name), parameter.choices))
            elif parameter.kind is int:
                whole_number(name, getattr(self, name), parameter.minimum, parameter.maximum)
            elif parameter.is_switch and not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {shorten(getattr(self, name))}: it must be true or false")

    @property
    def out_dtype(self) -> str:
        return self.dtype


def combine(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values, by name. Raises UsageError if there are more than a run may have rows."""
    require_steps(*map(count_values, values.values()))
    return (dict(zip(values, each, strict=True)) for each in itertools.product(*values.values()))


def parse_range(start: int, stop: int, step: int) -> range:
    """Sizes from START up to, but not including, STOP, as a range. START 0 begins at STEP, because no dimension is 0.

    Raises UsageError if the step is less than 1, the start is negative or the range is empty.

    >>> list(mamf.parse_range(0, 20480, 4096))
    [4096, 8192, 12288, 16384]
    """
    if step < 1:
        raise UsageError(f"range {start} {stop} {step}: the step must be at least 1")
    if start < 0:
        raise UsageError(f"range {start} {stop} {step}: the start must not be negative")
    sizes = range(start or step, stop, step)
    if not sizes:
        raise UsageError(f"range {start} {stop} {step} is empty: STOP is not included, and START 0 begins at {step}")
    return sizes


def _write(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _required(kind: Any) -> Any:
    """The type of a parameter without None."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    return next(each for each in get_args(kind) if each is not type(None))


def _convert(kind: Any, text: str) -> Any:
    """Convert text to a value of a type: Literal, optional or plain. Raises UsageError."""
    required = _required(kind)
    if text.lower() == "none" and required is not kind:
        return None
    if get_origin(required) is Literal:
        return next((each for each in get_args(required) if str(each) == text), text)
    if required is bool:
        if text.lower() not in _WORDS:
            raise UsageError(f"{shorten(text)!r} is not yes or no")
        return _WORDS[text.lower()]
    if required is int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise UsageError(f"{shorten(text)!r} is not a whole number")
        return parse_digits(digits) * (-1 if text.startswith("-") else 1)
    if required not in (str, float):
        raise UsageError("it cannot be given as text")
    try:
        return required(text)
    except ValueError:
        raise UsageError(f"{shorten(text)!r} is not a number") from None
