"""What calls take and give: values alone or as several, problems and shapes by text, and rows to come."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from mamf.backend import Backend
from mamf.errors import UsageError
from mamf.limits import require_some
from mamf.measurement import Measurement
from mamf.operation import Operation, Request, fields_of, sizes_of
from mamf.parameters import Parameter

_Value = TypeVar("_Value")
#: What may be given alone.
OneOrSeveral: TypeAlias = _Value | Iterable[_Value]


class Rows:
    """Rows to come: iterate over it to measure. Leaving the loop ends the run, and ``close`` does."""

    def __init__(self, what: str, rows: Iterator[Measurement]) -> None:
        self._what, self._rows = what, rows

    def __iter__(self) -> Iterator[Measurement]:
        return self

    def __next__(self) -> Measurement:
        return next(self._rows)

    def close(self) -> None:
        if isinstance(self._rows, Generator):
            self._rows.close()

    def __repr__(self) -> str:
        return f"<{self._what}: iterate over it to measure>"


def several(name: str, given: Any, kind: type = str, most: int | None = None) -> tuple[Any, ...] | None:
    """One value or several as a tuple; None stays None. Raises UsageError for values of another kind, for an empty
    list, and for more than ``most``.
    """
    if given is None:
        return None
    values = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else (given,)
    require_some(name, values, kind)
    if most is not None and len(values) > most:
        raise UsageError(f"{name} {', '.join(map(str, values))}: this call measures one; call it for each")
    return values


def problems_and_shapes(
    backend: Backend,
    of: Operation[Any, Any],
    shapes: object,
    problem: Any,
    parameters: Mapping[str, Any],
    call: str,
    most: int | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The problems and shapes of an operation: as given, or every combination of its parameters, with the device's
    defaults. A text alone holds one or several shapes. ``most``: of the values of a field. Raises UsageError, or
    TypeError for an unknown parameter.
    """
    sizes, fields = _values_of(sizes_of(of), parameters), _values_of(fields_of(of), parameters)
    known = {each.keyword or each.name for each in (*sizes_of(of).values(), *fields_of(of).values())}
    for name in parameters.keys() - known:
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    whole = several("shapes", shapes.split() if isinstance(shapes, str) else shapes, object) or ()
    whole = tuple(of.parse_shape(each) if isinstance(each, str) else each for each in whole)
    problems = several("problem", problem, of.problem_type, most) or ()
    for name, values in fields.items():
        several(name, values, object, most)
    if whole:
        require_some("shapes", whole, of.shape_type)
    if (whole and sizes) or (problems and fields):
        both = ("shapes", sizes) if whole and sizes else ("problem", fields)
        raise UsageError(f"{both[0]} names all of them: leave {', '.join(both[1])} out")
    request = Request(of, whole, sizes, fields)
    return problems or request.problems(backend), tuple(request.labeled_shapes(backend))


def _values_of(known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The values of parameters by name, of keywords that are not None."""
    values = {each.name: given.get(each.keyword or each.name) for each in known.values()}
    return {name: known[name].values_of(value) for name, value in values.items() if value is not None}
