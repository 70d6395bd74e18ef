"""Batches of products: their shapes and exact FLOP and byte counts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from mamf.limits import Sizes
from mamf.operations.matmul.kernel import ProductProblem


@dataclass(frozen=True, order=True)
class BatchedShape(Sizes):
    """C[B,M,N] = A[B,M,K] @ B[B,K,N], with separate operands for each product. Written ``BxMxNxK``."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)", re.ASCII)
    written: ClassVar[str] = "the shape of a batch; write BxMxNxK, for example 64x1024x1024x128"

    batch: int
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.m}x{self.n}x{self.k}"

    @property
    def flop(self) -> int:
        """2*B*M*N*K: one multiply and one add per term."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of ``a``, ``b`` and ``c`` for the whole batch."""
        batch, m, n, k = self.batch, self.m, self.n, self.k
        return {"a": batch * m * k, "b": batch * k * n, "c": batch * m * n}

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows (of K elements) of ``a`` and ``b``."""
        return {"a": self.batch * self.m, "b": self.batch * self.n}


@dataclass(frozen=True)
class BatchedProblem(ProductProblem):
    """All parameters of a batch of products except its shape; the fields are those of all products."""

    operation: ClassVar[str] = "batched"
    convention: ClassVar[str] = "2*B*M*N*K; A and B read, C written, once each"
