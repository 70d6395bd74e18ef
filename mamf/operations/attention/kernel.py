"""The contract of an attention kernel: one implementation of softmax(Q K^T / sqrt(d)) V, forward and backward."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from mamf.backend import Backend, Unavailable
from mamf.kernel import Kernel
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape


class AttentionKernel(Kernel[AttentionProblem, AttentionShape]):
    """One implementation. ``dtypes`` and ``directions``: those that it supports."""

    operation = "attention"
    reports_memory = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    directions: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd+bwd")

    @abstractmethod
    def unavailable(self, backend: Backend) -> Unavailable | None: ...

    def unsupported(self, backend: Backend, problem: AttentionProblem) -> str | None:
        if problem.direction not in self.directions:
            return f"{self.name} has no {problem.direction}; it has {', '.join(self.directions)}"
        return self._unsupported_dtype(problem)
