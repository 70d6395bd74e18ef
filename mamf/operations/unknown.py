"""Look up operations by name, with a placeholder for operations that are not installed.

With the placeholder, mamf can show rows of a log whose operation belongs to a package that this machine does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mamf.backend import Backend
from mamf.errors import UnavailableError, UnknownNameError
from mamf.kernel import Buffer, Kernel, Work
from mamf.operation import Operation
from mamf.plugins.discovery import make_operation


@dataclass(frozen=True)
class UnknownShape:
    """A shape of an operation that is not installed, with the fields, FLOP and bytes that the log contains."""

    record_fields: tuple[tuple[str, Any], ...]
    work: Work = field(compare=False)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.record_fields)


@dataclass(frozen=True)
class UnknownProblem:
    operation: str  # type: ignore[misc]  # This name differs by instance, that of other problems by class.
    record_fields: tuple[tuple[str, Any], ...]

    @property
    def dtype(self) -> str:
        return str(dict(self.record_fields).get("dtype", "unknown"))

    @property
    def data(self) -> str:
        return str(dict(self.record_fields).get("data", "normal"))

    @property
    def seed(self) -> int:
        return int(dict(self.record_fields).get("seed", 0))

    def compute_work(self, shape: UnknownShape) -> Work:
        return shape.work

    def list_buffers(self, shape: UnknownShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        raise UnavailableError(f"the operation {self.operation} is not installed: install its package")

    def count_bytes(self, shape: UnknownShape, sets: int = 1, rewrite: bool = False) -> int:
        return shape.work.nbytes


class UnknownOperation(Operation[Any, Any]):
    """A placeholder for an operation that is not installed.

    ``record``: the row of a log that names the operation, with the FLOP, the bytes and the unit of the shape.
    """

    kernel_group = ""
    kernel_type = Kernel  # type: ignore[type-abstract]  # A placeholder has no kernels.
    shape_type = UnknownShape
    problem_type = UnknownProblem
    shape_example = ""

    def __init__(self, name: str, record: Mapping[str, Any]) -> None:
        self.name = name  # type: ignore[misc]
        self._row_record = record

    def choose_default_shapes(self, backend: Backend) -> Sequence[UnknownShape]:
        return ()

    def parse_shape(self, text: str) -> UnknownShape:
        """Return a placeholder for the shape of a ceiling in a log. Reports show it as ``text``.

        The FLOP and bytes of the placeholder are 0, because logs do not record them for ceilings.
        """
        return UnknownShape(
            (("shape", text),),
            Work(0.0, 0, "as the log of the row counts it", str(self._row_record.get("unit", "TFLOPS"))),
        )

    def read_shape_record(self, record: Mapping[str, Any]) -> UnknownShape:
        row = self._row_record
        work = Work(float(row["flop"]), int(row["bytes"]), "as the log of the row counts it", str(row["unit"]))
        return UnknownShape(make_hashable_record(record), work)

    def make_shape_record(self, shape: UnknownShape) -> dict[str, Any]:
        return restore_record(shape.record_fields)

    def read_problem_record(self, record: Mapping[str, Any]) -> UnknownProblem:
        return UnknownProblem(self.name, make_hashable_record(record))

    def make_problem_record(self, problem: UnknownProblem) -> dict[str, Any]:
        return restore_record(problem.record_fields)


def make_hashable_record(record: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((str(name), tuple(value) if isinstance(value, list) else value) for name, value in record.items())


def restore_record(fields: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}


AnyOperation = Operation[Any, Any]


def sets_compute_ceiling(name: str) -> bool:
    """Return whether the highest rate of the operation ``name`` is the device's compute limit, as it is for matmul.

    Reports show the rates of other operations as shares of this limit, the "roof" of a roofline chart.
    """
    return get_operation(name).sets_compute_ceiling


_get_installed_operation = functools.cache(make_operation)


def get_operation(name: str, record: Mapping[str, Any] | None = None) -> AnyOperation:
    """Return the operation ``name``, or a placeholder that can show its rows if the operation is not installed.

    ``record``: the row of a log that names the operation, for the placeholder.
    """
    try:
        return _get_installed_operation(name)
    except UnknownNameError:
        return UnknownOperation(name, record or {})
