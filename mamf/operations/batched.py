"""Define the operation ``batched``, a batched matmul: its shapes, its problems and the base class of its kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mamf.backend import Backend
from mamf.errors import parse_size
from mamf.kernel import Kernel
from mamf.operation import describe
from mamf.operations.matmul.operation import BaseMatmulOperation
from mamf.operations.matmul.shapes import BaseMatmulProblem, BaseMatmulShape


@dataclass(frozen=True, order=True)
class BatchedShape(BaseMatmulShape):
    """The shape of a batch of matmuls C[B,M,N] = A[B,M,K] @ B[B,K,N], each with separate operands.

    A shape is written ``BxMxNxK``.
    """

    text_pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)", re.ASCII)
    text_description: ClassVar[str] = "the shape of a batched matmul: write BxMxNxK, for example 64x1024x1024x128"

    batch: int = field(metadata=describe("number of matmuls in the batch", parse_text=parse_size))
    m: int = field(metadata=describe("rows of each A and C", parse_text=parse_size))
    n: int = field(metadata=describe("columns of each B and C", parse_text=parse_size))
    k: int = field(
        metadata=describe("size of the reduction: columns of each A and rows of each B", parse_text=parse_size)
    )

    def __str__(self) -> str:
        return f"{self.batch}x{self.m}x{self.n}x{self.k}"

    @property
    def row_counts(self) -> dict[str, int]:
        return {"a": self.batch * self.m, "b": self.batch * self.n}


@dataclass(frozen=True)
class BatchedProblem(BaseMatmulProblem):
    """All parameters of a batched matmul except its shape: the fields of BaseMatmulProblem."""

    operation: ClassVar[str] = "batched"
    work_convention: ClassVar[str] = "2*B*M*N*K; A and B read, C written, once each"


class BatchedKernel(Kernel[BatchedProblem, BatchedShape]):
    """The base class of kernels for batched matmul."""

    operation = "batched"


class BatchedOperation(BaseMatmulOperation[BatchedProblem, BatchedShape]):
    name = "batched"
    kernel_group = "mamf.batched_kernels"
    kernel_type = BatchedKernel
    shape_type = BatchedShape
    problem_type = BatchedProblem
    shape_example = "64x1024x1024x128"
    matmul_counts_for_random_problems = (1, 2, 3, 8, 32)

    def choose_default_shapes(self, backend: Backend) -> Sequence[BatchedShape]:
        """Return batches like those of attention scores (short and long sequences), and a batch of square matmuls."""
        return [
            BatchedShape(64, 1024, 1024, 128),
            BatchedShape(16, 4096, 4096, 128),
            BatchedShape(32, 2048, 2048, 2048),
        ]
