"""A product but for its shape, and the contract of a matmul kernel: one implementation of C = A @ B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mamf.backend import Backend
from mamf.dtypes import DTYPES, tolerance
from mamf.errors import UnknownNameError
from mamf.kernel import DATA, Buffer, Kernel, aligned
from mamf.limits import LARGEST_SEED, whole_number
from mamf.operations.matmul.shapes import MatmulShape
from mamf.work import Work

LAYOUTS = ("nt", "nn", "tn", "tt")


@dataclass(frozen=True)
class MatmulProblem:
    """Everything about a product but its shape.

    ``layout`` names how A and B lie in memory, in BLAS terms for row-major storage: ``n`` as multiplied, ``t``
    transposed.
    ``nt`` (B stored N x K) is what a linear layer does, and mamf-finder's.
    """

    operation: ClassVar[str] = "matmul"

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nt"
    data: str = "normal"
    seed: int = 0
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("output dtype", self.out_dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("data", self.data, DATA),
        ):
            if value not in known:
                raise UnknownNameError(what, value, known)
        whole_number("seed", self.seed, 0, LARGEST_SEED)

    @property
    def tolerance(self) -> float:
        return tolerance(self.dtype, self.out_dtype, self.fast_accumulation)

    @property
    def b_dtype(self) -> str:
        """B's dtype: A's own, but float8_e5m2 is multiplied with float8_e4m3fn, as gradients are; no vendor
        multiplies two e5m2.
        """
        return "float8_e4m3fn" if self.dtype == "float8_e5m2" else self.dtype

    def buffers(self, shape: MatmulShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The device buffers a product needs: ``sets`` each of A, B and C, and one to rewrite C from if asked."""
        elements = {name: aligned(count) * sets for name, count in shape.elements.items()}
        needed = {
            "a": Buffer(elements["a"], self.dtype),
            "b": Buffer(elements["b"], self.b_dtype),
            "c": Buffer(elements["c"], self.out_dtype),
        }
        if rewrite:
            needed["c_rewrite"] = Buffer(shape.elements["c"], self.out_dtype)
        return needed

    def work(self, shape: MatmulShape) -> Work:
        nbytes = self.nbytes(shape)
        return Work(shape.flop, nbytes, "2*M*N*K; A and B read, C written, once each")

    def nbytes(self, shape: MatmulShape, sets: int = 1, rewrite: bool = False) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.nbytes for buffer in self.buffers(shape, sets, rewrite).values())


class MatmulKernel(Kernel[MatmulProblem, MatmulShape]):
    """One implementation of a matrix product."""

    operation = "matmul"

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,)
