"""A product but for its shape, and the contract of a matmul kernel: one implementation of C = A @ B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from mamf.backend import Backend
from mamf.dtypes import DTYPES, tolerance
from mamf.kernel import DATA, Buffer, Kernel, aligned
from mamf.limits import LARGEST_SEED, require_known, whole_number
from mamf.operations.matmul.shapes import MatmulShape
from mamf.work import Work

LAYOUTS = ("nt", "nn", "tn", "tt")
#: What the operands of a scaled format are quantized from.
UNQUANTIZED = "bfloat16"


class ProductShape(Protocol):
    """What a shape of products says of itself."""

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def flop(self) -> int: ...
    @property
    def elements(self) -> Mapping[str, int]:
        """Elements of ``a``, ``b`` and ``c``."""

    @property
    def rows(self) -> Mapping[str, int]:
        """Rows of K elements that ``a`` and ``b`` have, all products together."""


@dataclass(frozen=True)
class ProductProblem:
    """What the problems of one product, of a batch and of groups have in common; ``layout`` as MatmulProblem says."""

    operation: ClassVar[str]
    convention: ClassVar[str]

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nt"
    data: str = "normal"
    seed: int = 0
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        require_known(
            ("dtype", self.dtype, DTYPES),
            ("output dtype", self.out_dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("data", self.data, DATA),
        )
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

    def buffers(self, shape: ProductShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The device buffers that products need: ``sets`` each of A, B and C, and one to rewrite C from if asked.

        Of a scaled format, A and B are what is quantized, and ``a_quantized`` and ``b_quantized`` bytes that launches
        read.
        """
        elements, format = shape.elements, DTYPES[self.dtype].format
        needed = {
            "a": Buffer(aligned(elements["a"]) * sets, UNQUANTIZED if format else self.dtype),
            "b": Buffer(aligned(elements["b"]) * sets, UNQUANTIZED if format else self.b_dtype),
            "c": Buffer(aligned(elements["c"]) * sets, self.out_dtype, fill=False),
        }
        if format:
            for name in ("a", "b"):
                nbytes = elements[name] // format.values_per_byte
                needed[f"{name}_quantized"] = Buffer(aligned(nbytes) * sets, "uint8", fill=False)
        if rewrite:
            needed["c_rewrite"] = Buffer(elements["c"], self.out_dtype)
        return needed

    def work(self, shape: ProductShape) -> Work:
        operands = sum(self.operand_bytes(shape, name) for name in ("a", "b"))
        written = shape.elements["c"] * DTYPES[self.out_dtype].itemsize
        return Work(shape.flop, operands + written, self.convention)

    def operand_bytes(self, shape: ProductShape, operand: str) -> int:
        """Bytes of ``a`` or ``b`` as launches read it, with its scales."""
        count, format = shape.elements[operand], DTYPES[self.dtype].format
        if format is None:
            return count * DTYPES[self.dtype].itemsize
        scaling = format.scaling(operand)
        scale_size = 4 if scaling.dtype == "float32" else 1
        return count // format.values_per_byte + scaling.count(shape.rows[operand], shape.k) * scale_size

    def nbytes(self, shape: ProductShape, sets: int = 1, rewrite: bool = False) -> int:
        """Bytes of all buffers that launches touch."""
        buffers = self.buffers(shape, sets, rewrite)
        unread = ("a", "b") if DTYPES[self.dtype].format else ()
        return sum(buffer.nbytes for name, buffer in buffers.items() if name not in unread)


ProductProblemT = TypeVar("ProductProblemT", bound=ProductProblem)
ProductShapeT = TypeVar("ProductShapeT", bound=ProductShape)


@dataclass(frozen=True)
class MatmulProblem(ProductProblem):
    """Everything about a product but its shape.

    ``layout`` names how A and B lie in memory, in BLAS terms for row-major storage: ``n`` as multiplied, ``t``
    transposed.
    ``nt`` (B stored N x K) is what a linear layer does, and mamf-finder's.
    """

    operation: ClassVar[str] = "matmul"
    convention: ClassVar[str] = "2*M*N*K; A and B read, C written, once each"


class MatmulKernel(Kernel[MatmulProblem, MatmulShape]):
    """One implementation of a matrix product."""

    operation = "matmul"

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,)
