"""The contract of an operation: what is computed, how its shapes are written, and what its rate counts.

An operation is one folder (or one module of somebody else's) and one entry point of the group ``mamf.operations``. It
joins what measuring, logs and reports must know of it; its problems say what a launch does, its kernels do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Generic

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import canonical_name
from mamf.kernel import AnyKernel, ProblemT, ShapeT
from mamf.measurement import Measurement
from mamf.peaks import fastest_possible_flops, find_peak


class Operation(ABC, Generic[ProblemT, ShapeT]):
    """``kernel_group``: the entry point group of its kernels, ``kernel_type`` what they derive from.

    ``shape_type`` and ``problem_type`` are frozen dataclasses of plain values: a log holds their fields. A shape has
    ``parse``, which reads what ``str`` gives, such as ``shape_example``.
    """

    name: ClassVar[str]
    kernel_group: ClassVar[str]
    kernel_type: ClassVar[type[AnyKernel]]
    shape_type: ClassVar[type[Any]]
    problem_type: ClassVar[type[Any]]
    shape_example: ClassVar[str]
    #: What ``axis`` counts.
    axis_label: ClassVar[str] = "size"
    #: Whether its work is a model's FLOP, whose shares of datasheet and ceiling are called MFU and MAMFU.
    counts_model_flop: ClassVar[bool] = False
    #: Whether reports rank its kernels shape by shape, not over all shapes of a problem.
    ranks_by_shape: ClassVar[bool] = False
    #: Whether it measures what devices of a machine share, so that two at once hold each other back.
    is_of_links: ClassVar[bool] = False

    @abstractmethod
    def default_shapes(self, backend: Backend) -> Sequence[ShapeT]:
        """What is measured where no shapes are asked for."""

    def presets(self) -> Mapping[str, Mapping[ShapeT, str]]:
        """Shapes that people compare by, each with what it is (the layer of a model), by the name to ask for them."""
        return {}

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> ProblemT:
        """A problem of the fields asked for, with the device's defaults. Raises UsageError for what means nothing."""
        dtype = backend.resolve_dtype(canonical_name(asked.get("dtype") or backend.default_dtype))
        return self.problem_type(**{**asked, "dtype": dtype})  # type: ignore[no-any-return]

    def fastest_possible(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT | None = None) -> float | None:
        """What the device's physics bound its rate to, in what the rate counts a second; None where nobody knows.

        ``shape``: of what is measured, where the bound depends on it (what fits in a cache).
        """
        return None

    def peak(self, info: DeviceInfo, problem: ProblemT) -> float | None:
        """The datasheet's figure for it, in what the rate counts a second, or None."""
        return None

    def may_be_ceiling(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT) -> bool:
        """Whether a rate at this shape may be the ceiling: False where a cache answers in place of the memory, say."""
        return True

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Columns of its own beside those of every row, by name and in their order of importance.

        ``info``: of the device that it was measured on, where that is known.
        """
        return {}

    def words(self, problem: ProblemT) -> Sequence[str]:
        """What sets a problem apart, beside its dtype; normal data and the first seed go without saying."""
        usual = {"data": "normal", "seed": 0, "dtype": problem.dtype}
        fields = self.problem_record(problem).items()
        return [f"{name} {value}" for name, value in fields if name not in usual or usual[name] != value]

    def describe_problem(self, problem: ProblemT) -> Sequence[str]:
        """What sets a problem apart, beside its dtype, in the words of a report."""
        return self.words(problem)

    def describe_shape(self, shape: ShapeT) -> str:
        """A shape in the words of a report."""
        return str(shape)

    def axis(self, shape: ShapeT) -> float:
        """Where a shape stands on the axis of a chart."""
        raise NotImplementedError(f"{self.name} has no axis to be drawn along")

    # -- what a log holds --------------------------------------------------------------------------------------------

    def parse_shape(self, text: str) -> ShapeT:
        """Raises UsageError for anything but what ``str`` of a shape gives."""
        return self.shape_type.parse(text)  # type: ignore[no-any-return]

    def shape_record(self, shape: ShapeT) -> dict[str, Any]:
        return plain_fields(shape)

    def shape_from_record(self, record: Mapping[str, Any]) -> ShapeT:
        return self.shape_type(**record)  # type: ignore[no-any-return]

    def problem_record(self, problem: ProblemT) -> dict[str, Any]:
        return plain_fields(problem)

    def problem_from_record(self, record: Mapping[str, Any]) -> ProblemT:
        return self.problem_type(**record)  # type: ignore[no-any-return]


class FlopOperation(Operation[ProblemT, ShapeT]):
    """An operation whose rate counts FLOP, which the device's peak for the dtype bounds."""

    def fastest_possible(self, info: DeviceInfo, problem: ProblemT, shape: ShapeT | None = None) -> float | None:
        return fastest_possible_flops(info, problem.dtype)

    def peak(self, info: DeviceInfo, problem: ProblemT) -> float | None:
        """The datasheet's FLOP a second; a share of it is MFU."""
        found = find_peak(info.name, problem.dtype, info.compute_units)
        return None if found is None else found.flops


def plain_fields(of: Any) -> dict[str, Any]:
    """What ``dataclasses.asdict`` gives where values are plain, in a fifth of its time: once for each row of a log."""
    return {field.name: getattr(of, field.name) for field in fields(of)}
