"""What calls take and give: values alone or as several, problems and shapes by text, and rows to come."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from mamf.backend import Backend
from mamf.errors import UsageError
from mamf.limits import require_some
from mamf.measurement import Measurement
from mamf.operation import Operation

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


def problems_of(
    backend: Backend, of: Operation[Any, Any], dtype: Any, problem: Any, most: int | None = None
) -> tuple[Any, ...]:
    """The problems as given, or with the defaults of the device for each dtype."""
    if dtype is not None and problem is not None:
        raise UsageError("a problem has its own dtype: leave dtype out")
    dtypes = several("dtype", dtype, most=most) or (None,)
    given = several("problem", problem, of.problem_type, most)
    return given or tuple(of.problem_for(backend, {"dtype": each} if each else {}) for each in dtypes)


def shapes_of(given: object, of: Operation[Any, Any], backend: Backend) -> tuple[Any, ...]:
    """Shapes of an operation, each given as one or as text; a text alone holds one or several; by default those that
    it proposes. Raises UsageError.
    """
    if given is None:
        return tuple(of.default_shapes(backend))
    shapes = several("shapes", given.split() if isinstance(given, str) else given, object) or ()
    shapes = tuple(of.parse_shape(each) if isinstance(each, str) else each for each in shapes)
    require_some("shapes", shapes, of.shape_type)
    return shapes
