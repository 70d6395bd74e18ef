"""Validates the types of a log's values and names the first field that is wrong.

A schema is a type (``str``, ``bool``, ``int``, ``float``; a float is finite and may be written as a whole number), a
list of one schema, or a mapping of fields to schemas. ``name?`` may be missing, ``Nullable`` may be null, ``ANY_NAME``
stands for fields of any name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ANY_NAME = "*"
#: What a field of a shape or of a problem may be: anything but an object, or a list of such.
PLAIN = object()
# JSON writes whole numbers of any length; what nothing here can be is refused before it is computed with.
_LARGEST = 2**63
#: Raises _Misfit for a value that does not match its schema.
_Check = Callable[[Any], None]


@dataclass(frozen=True)
class Nullable:
    schema: Any


class _Misfit(Exception):
    """What is wrong with a value; ``path``: the steps that lead to it, the last one first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.path: list[str] = []


def is_nested_deeper(record: object, most: int) -> bool:
    """Whether objects and lists are nested more than ``most`` deep: functions that call themselves would fail."""
    level = [record]
    for _ in range(most):
        values = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        level = [value for value in itertools.chain.from_iterable(values) if isinstance(value, (dict, list))]
    return bool(level)


# A schema is compiled once, for a log has thousands of records of it. It is kept, so that no other one has its id.
_compiled: dict[int, tuple[Any, _Check]] = {}


def require(value: object, schema: Any, name: str = "") -> None:
    """Raises ValueError naming the first field that is missing or not of its type; ``name``: of the value itself."""
    if id(schema) not in _compiled:
        _compiled[id(schema)] = schema, _check_of(schema)
    try:
        _compiled[id(schema)][1](value)
    except _Misfit as misfit:
        path = "".join((name, *reversed(misfit.path)))
        raise ValueError(f"field {path.removeprefix('.')}{misfit}") from None


def _check_of(schema: Any) -> _Check:
    if isinstance(schema, Nullable):
        return _nullable(_check_of(schema.schema))
    if isinstance(schema, list):
        return _numbers if schema == [float] else _list_of(_check_of(schema[0]))
    return _object_of(schema) if isinstance(schema, dict) else _SIMPLE[schema]


def _nullable(check: _Check) -> _Check:
    def nullable(value: Any) -> None:
        if value is not None:
            check(value)

    return nullable


def _list_of(check: _Check) -> _Check:
    def list_of(value: Any) -> None:
        _LIST(value)
        number = 0
        try:
            for number, each in enumerate(value):  # noqa: B007 (the handler uses it)
                check(each)
        except _Misfit as misfit:
            misfit.path.append(f"[{number}]")
            raise

    return list_of


def _object_of(schema: Mapping[str, Any]) -> _Check:
    fields = [(name.removesuffix("?"), _check_of(of), name.endswith("?")) for name, of in schema.items()]
    of_any_name = next((check for name, check, _ in fields if name == ANY_NAME), None)
    named = [field for field in fields if field[0] != ANY_NAME]

    def object_of(value: Any) -> None:
        _OBJECT(value)
        name = ""
        try:
            for name, check, may_be_missing in named:
                if name in value:
                    check(value[name])
                elif not may_be_missing:
                    raise _Misfit(" is missing")
            if of_any_name is not None:
                for name, each in value.items():  # noqa: B007 (likewise)
                    of_any_name(each)
        except _Misfit as misfit:
            misfit.path.append(f".{name}")
            raise

    return object_of


def _type(kind: type, called: str) -> _Check:
    def of_type(value: Any) -> None:
        if type(value) is not kind:  # a bool is not an int here
            raise _Misfit(f": {called} is due, not {_shorten(value)}")

    return of_type


_INTEGER, _LIST, _OBJECT = _type(int, "a whole number"), _type(list, "a list"), _type(dict, "an object")


def _whole(value: Any) -> None:
    _INTEGER(value)
    if not -_LARGEST < value < _LARGEST:
        raise _Misfit(f": {_shorten(value)} is beyond what anything counts")


def _number(value: Any) -> None:
    if not _is_number(value):
        raise _Misfit(f": a finite number is due, not {_shorten(value)}")


_each_number = _list_of(_number)


def _numbers(value: Any) -> None:
    """Samples are most of a log."""
    if type(value) is not list or not all(map(_is_number, value)):
        _each_number(value)


def _plain(value: Any) -> None:
    if any(isinstance(each, (dict, list)) for each in (value if isinstance(value, list) else [value])):
        raise _Misfit(f": one value or a list of them is due, not {_shorten(value)}")


_SIMPLE: Mapping[Any, _Check] = {
    str: _type(str, "text"),
    bool: _type(bool, "true or false"),
    int: _whole,
    float: _number,
    PLAIN: _plain,
}


def _is_number(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and -_LARGEST < value < _LARGEST)


def _shorten(value: object) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
