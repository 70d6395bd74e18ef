"""Batches of products: their shapes and exact FLOP and byte counts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from mamf.errors import UsageError
from mamf.limits import number_of, whole_number
from mamf.operations.matmul.kernel import ProductProblem

_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)", re.ASCII)


@dataclass(frozen=True, order=True)
class BatchedShape:
    """C[B,M,N] = A[B,M,K] @ B[B,K,N], each product of the batch with operands of its own. Written ``BxMxNxK``."""

    batch: int
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name in ("batch", "m", "n", "k"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.batch}x{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str) -> BatchedShape:
        """Raises UsageError for anything but what ``str`` gives."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is not the shape of a batch; write BxMxNxK, for example 64x1024x1024x128")
        return cls(*map(number_of, match.groups()))

    @property
    def flop(self) -> int:
        """2*B*M*N*K: a multiply and an add each."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of ``a``, ``b`` and ``c``, the whole batch of each."""
        batch, m, n, k = self.batch, self.m, self.n, self.k
        return {"a": batch * m * k, "b": batch * k * n, "c": batch * m * n}

    @property
    def rows(self) -> dict[str, int]:
        """Rows of K elements that ``a`` and ``b`` have."""
        return {"a": self.batch * self.m, "b": self.batch * self.n}


@dataclass(frozen=True)
class BatchedProblem(ProductProblem):
    """Everything about a batch of products but its shape; its fields are those of all products."""

    operation: ClassVar[str] = "batched"
    convention: ClassVar[str] = "2*B*M*N*K; A and B read, C written, once each"
