"""The contract of a bandwidth kernel: one implementation of copy, read, write and triad."""

from __future__ import annotations

from typing import ClassVar

from mamf.backend import Backend
from mamf.kernel import Kernel
from mamf.operations.bandwidth.shapes import PATTERNS, BandwidthProblem, BandwidthShape


class BandwidthKernel(Kernel[BandwidthProblem, BandwidthShape]):
    """One implementation. ``dtypes`` and ``patterns``: those that it supports."""

    operation = "bandwidth"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    patterns: ClassVar[tuple[str, ...]] = PATTERNS

    def unsupported(self, backend: Backend, problem: BandwidthProblem) -> str | None:
        if problem.pattern not in self.patterns:
            return f"{self.name} has no {problem.pattern}; it has {', '.join(self.patterns)}"
        return self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.dtype)

    def unsupported_shape(self, problem: BandwidthProblem, shape: BandwidthShape) -> str | None:
        return problem.unsupported_shape(shape)
