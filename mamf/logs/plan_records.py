"""Converts plans to and from the JSON values in run logs: one form, for every kind and operation.

A plan, and each object in it, is an object of its fields. What belongs to the operation is written and read by it.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from mamf.operations.matmul.shapes import SearchOptions
from mamf.operations.unknown import AnyOperation, Unknown, operation_called
from mamf.plans import (
    FIND,
    GUARD,
    REPRODUCE,
    SWEEP,
    VERIFY,
    GuardOptions,
    Plan,
    Problem,
    ReproduceOptions,
    Shape,
    SweepOptions,
    VerifyOptions,
)

#: The options of each kind of run that has any.
OPTIONS: Mapping[str, type] = {
    SWEEP: SweepOptions,
    FIND: SearchOptions,
    GUARD: GuardOptions,
    REPRODUCE: ReproduceOptions,
    VERIFY: VerifyOptions,
}
#: Logs name the kind of a plan so.
_KIND = "command"


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values, with shapes as their operation prints them."""
    of = operation_called(plan.operation)
    record = {name: _written(value, of) for name, value in vars(plan).items() if name not in ("kind", "options")}
    options = _written(plan.options, of) or {}
    if not plan.is_shared:
        options = {name: value for name, value in options.items() if name not in ("rank", "ranks")}
    return {_KIND: plan.kind, **record, "options": options}


def _written(value: Any, of: AnyOperation) -> Any:
    if isinstance(value, Plan):
        return plan_record(value)
    if isinstance(value, of.shape_type):
        return str(value)
    if isinstance(value, of.problem_type):
        return of.problem_record(value)
    if is_dataclass(value):
        return {each.name: _written(getattr(value, each.name), of) for each in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _written(each, of) for name, each in value._asdict().items()}
    if isinstance(value, tuple):
        return [_written(each, of) for each in value]
    return None if value == math.inf else value


def require_current(record: object) -> None:
    """Raises ValueError for a plan as release 0.2.0 wrote it."""
    if isinstance(record, dict) and "options" not in record:
        raise ValueError("the plan is in the form of release 0.2.0: read the log with that release, or measure again")


def plan_from_record(record: Mapping[str, Any]) -> Plan:
    """The plan in the header of a log. Raises KeyError, TypeError or ValueError for a record that is not one."""
    of = operation_called(record["operation"])
    given = {name: _read(record[name], kind, of) for name, kind in _types(Plan).items() if name in record}
    options = record["options"] and _read(record["options"], OPTIONS.get(record[_KIND], type(None)), of)
    return Plan(**{**given, "kind": record[_KIND], "options": options or None})


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read(value: Any, kind: Any, of: AnyOperation) -> Any:
    """A JSON value as a value of this type."""
    if kind == Shape:
        return value if isinstance(of, Unknown) else of.parse_shape(value)
    if kind == Problem:
        return of.problem_from_record(value)
    if kind is Plan:
        return plan_from_record(value)
    if kind is float:  # JSON has no infinity
        return math.inf if value is None else value
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _read(value, get_args(kind)[0], of)
    if get_origin(kind) is tuple:
        return tuple(_read(each, get_args(kind)[0], of) for each in value)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(**{name: _read(value[name], each, of) for name, each in _types(kind).items() if name in value})
    return value
