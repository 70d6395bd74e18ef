"""Attention as an operation."""

from __future__ import annotations

from collections.abc import Sequence

from mamf.backend import Backend
from mamf.operation import FlopOperation
from mamf.operations.attention.kernel import AttentionKernel
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.plugins.discovery import kernel_of

_LENGTHS = (1024, 4096, 16384)
_TOKENS = 16384


class Attention(FlopOperation[AttentionProblem, AttentionShape]):
    name = "attention"
    kernel_group = "mamf.attention_kernels"
    kernel_type = AttentionKernel
    shape_type = AttentionShape
    problem_type = AttentionProblem
    shape_example = "b1h16q4096k4096d128c"

    def default_shapes(self, backend: Backend) -> Sequence[AttentionShape]:
        return [AttentionShape(_TOKENS // length, 16, 16, length, length, 128, 128) for length in _LENGTHS]

    def axis(self, shape: AttentionShape) -> float:
        return float(shape.seqlen_k)


def attention_kernel(name: str) -> AttentionKernel:
    """A kernel by name. Raises as ``kernel_of`` does."""
    return kernel_of(Attention(), name)  # type: ignore[return-value]
