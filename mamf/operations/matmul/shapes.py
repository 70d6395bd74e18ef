"""Shapes of matrix products and their exact FLOP counts. Pure: no torch, no clock, no printing."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mamf.errors import UsageError
from mamf.limits import LARGEST_SIZE, Sizes, count_values, require_steps, whole_number


@dataclass(frozen=True, order=True, slots=True)
class MatmulShape(Sizes):
    """C[M,N] = A[M,K] @ B[K,N]; K is the reduction. Printed and parsed as ``MxNxK``."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"(\d+)x(\d+)x(\d+)", re.ASCII)
    written: ClassVar[str] = "a shape; write MxNxK, for example 4096x4096x4096"

    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        m, n, k = self.m, self.n, self.k
        if type(m) is type(n) is type(k) is int and min(m, n, k) > 0 and max(m, n, k) <= LARGEST_SIZE:
            return  # a shortcut for the thousands of shapes of a grid
        for name in ("m", "n", "k"):
            object.__setattr__(self, name, whole_number(name.upper(), getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flop(self) -> int:
        """Floating-point operations of the product: 2*M*N*K (one multiply and one add per term)."""
        return 2 * self.m * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of each operand: ``a`` (M*K), ``b`` (K*N) and ``c`` (M*N)."""
        return {"a": self.m * self.k, "b": self.k * self.n, "c": self.m * self.n}

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows (of K elements) of ``a`` and ``b``."""
        return {"a": self.m, "b": self.n}


def parse_range(start: int, stop: int, step: int) -> range:
    """Sizes from START to STOP (excluded) by STEP, as a range; a START of 0 means STEP, since no dimension is 0.

    Raises UsageError if the step is not positive, the start is negative or the range is empty.

    >>> list(mamf.parse_range(0, 20480, 4096))
    [4096, 8192, 12288, 16384]
    """
    if step < 1:
        raise UsageError(f"range {start} {stop} {step}: the step must be at least 1")
    if start < 0:
        raise UsageError(f"range {start} {stop} {step}: the start must not be negative")
    sizes = range(start or step, stop, step)
    if not sizes:
        raise UsageError(f"range {start} {stop} {step} is empty: the stop is excluded, and a start of 0 means {step}")
    return sizes


@dataclass(frozen=True)
class MatmulGrid:
    """All combinations of these sizes of M, N and K, up to ``most_flop``; sizes need not be evenly spaced."""

    m: Sequence[int]
    n: Sequence[int]
    k: Sequence[int]
    most_flop: float = math.inf

    def accepts(self, shape: MatmulShape) -> bool:
        return shape.flop <= self.most_flop

    def shapes(self) -> list[MatmulShape]:
        return [shape for shape in matmul_grid(self.m, self.n, self.k) if self.accepts(shape)]

    def __len__(self) -> int:
        """The number of combinations of sizes."""
        return len(self.m) * len(self.n) * len(self.k)


def matmul_grid(m: Sequence[int], n: Sequence[int], k: Sequence[int]) -> list[MatmulShape]:
    """All combinations of the sizes, once each, in the given order. Raises UsageError for more than MOST_STEPS.

    >>> [str(shape) for shape in mamf.matmul_grid([1024, 2048], [4096], [4096])]
    ['1024x4096x4096', '2048x4096x4096']
    """
    require_steps(*map(count_values, (m, n, k)))
    return list(dict.fromkeys(MatmulShape(*sizes) for sizes in itertools.product(m, n, k)))
