"""The operation ``copies``: copies between memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import MIB, Backend
from mamf.operation import Operation
from mamf.operations.copies.kernel import CopyKernel
from mamf.operations.copies.shapes import CopyProblem, CopyShape


class Copies(Operation[CopyProblem, CopyShape]):
    name = "copies"
    kernel_group = "mamf.copy_kernels"
    kernel_type = CopyKernel
    shape_type = CopyShape
    problem_type = CopyProblem
    shape_example = "256MiB"
    is_of_links = True

    def default_shapes(self, backend: Backend) -> Sequence[CopyShape]:
        return [CopyShape(size * MIB) for size in (1, 16, 256)]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> CopyProblem:
        """As in Operation; the dtype is always int8, because copies count bytes."""
        return super().problem_for(backend, {**asked, "dtype": asked.get("dtype") or CopyProblem.dtype})

    def axis(self, shape: CopyShape) -> float:
        """Bytes."""
        return float(shape.nbytes)
