"""The contract of a collective kernel."""

from __future__ import annotations

from typing import ClassVar

from mamf.backend import Backend
from mamf.kernel import Kernel
from mamf.operations.collective.shapes import CollectiveProblem, CollectiveShape


class CollectiveKernel(Kernel[CollectiveProblem, CollectiveShape]):
    """One library. ``dtypes``: those that it supports. All ranks prepare, launch and verify alike; an error on one rank
    counts for all, so they stop together.
    """

    operation = "collective"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def unsupported(self, backend: Backend, problem: CollectiveProblem) -> str | None:
        return self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.dtype)

    def unsupported_shape(self, problem: CollectiveProblem, shape: CollectiveShape) -> str | None:
        return problem.unsupported_shape(shape)
