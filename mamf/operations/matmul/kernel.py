"""Matmul problems, and the contract of a matmul kernel, which is one implementation of C = A @ B."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from mamf.backend import Backend
from mamf.dtypes import DTYPES, tolerance
from mamf.kernel import ALL_DATA, Buffer, Kernel, aligned
from mamf.limits import require_known
from mamf.operations.matmul.shapes import MatmulShape
from mamf.parameters import DeclaredProblem, describe
from mamf.work import Work

LAYOUTS = ("nt", "nn", "tn", "tt")
#: The suffixes of a layout: the number of unused elements after each stored row of A and B.
PADDINGS = ("", "+1", "+8", "+24")
_ALL_LAYOUTS = tuple(layout + padding for padding in PADDINGS for layout in LAYOUTS)
# The standard deviation of int8 values for each kind of data; how many standard deviations of C must fit in int8.
_INT8_DEVIATIONS = {"normal": 31.7, "uniform": 73.3, "integers": 1.41, "wide": 1.3, "zeros": 0.0}
_INT8_MAX, _DEVIATIONS_IN_INT8 = 127, 6
#: The dtype of the values before they are quantized to a scaled format.
UNQUANTIZED = "bfloat16"


class ProductShape(Protocol):
    """The shape of one or several matmuls."""

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
        """The number of rows (of K elements) of ``a`` and ``b``, over all matmuls."""


@dataclass(frozen=True)
class ProductProblem(DeclaredProblem):
    """The common fields of single, batched and grouped matmuls. MatmulProblem explains ``layout``."""

    operation: ClassVar[str]
    convention: ClassVar[str]

    dtype: str = "bfloat16"
    out_dtype: str = field(
        default="",
        metadata=describe(
            "dtype of C", default="the dtype of A; bfloat16 for 8-bit floats, int32 for int8", is_rare=True
        ),
    )
    layout: str = field(
        default="nt",
        metadata=describe(
            "how A and B are stored: n as multiplied, t transposed; nt+8 leaves 8 unused elements after each row",
            choices=_ALL_LAYOUTS,
            metavar="LAYOUT",
            is_rare=True,
        ),
    )
    data: str = field(default="normal", metadata=describe("values of the operands", choices=ALL_DATA, is_rare=True))
    seed: int = 0
    fast_accumulation: bool = field(
        default=False, metadata=describe("8-bit floats: use fewer bits for partial sums", is_rare=True)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", DTYPES[self.dtype].default_output)
        require_known(("output dtype", self.out_dtype, DTYPES))

    @property
    def tolerance(self) -> float:
        return tolerance(self.dtype, self.out_dtype, self.fast_accumulation)

    @property
    def rounding(self) -> float:
        """The largest relative error that rounding causes, if partial sums are not rounded to bfloat16."""
        return self.tolerance / (4 if self.dtype == "bfloat16" else 2)

    @property
    def is_rounded(self) -> bool:
        """Whether C is rounded to int8 and saturated."""
        return self.dtype == self.out_dtype == "int8"

    def output_scale(self, k: int) -> float:
        """Return the factor from A @ B to C: a power of two with which few int8 outputs saturate, or else 1."""
        if not self.is_rounded:
            return 1.0
        deviation = _INT8_DEVIATIONS[self.data] ** 2 * math.sqrt(k)
        return 2.0 ** -max(0, math.ceil(math.log2(max(1.0, _DEVIATIONS_IN_INT8 * deviation / _INT8_MAX))))

    @property
    def padding(self) -> int:
        """Unused elements after each stored row of A and B."""
        return int(self.layout[2:] or 0)

    def stored_elements(self, shape: ProductShape, operand: str) -> int:
        """Return the number of elements of ``a`` or ``b``, including the unused ones."""
        is_by_k = self.layout[0] == "n" if operand == "a" else self.layout[1] == "t"
        rows = shape.rows[operand] if is_by_k else shape.elements["b"] // shape.n
        return shape.elements[operand] + rows * self.padding

    @property
    def b_dtype(self) -> str:
        """The dtype of B: that of A, but float8_e4m3fn for float8_e5m2, as for gradients. No vendor supports two e5m2
        operands.
        """
        return "float8_e4m3fn" if self.dtype == "float8_e5m2" else self.dtype

    def buffers(self, shape: ProductShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers: ``sets`` each of A, B and C, and with ``rewrite`` one to overwrite C from.

        For a scaled format, A and B are the values before quantization; launches read ``a_quantized`` and
        ``b_quantized``.
        """
        elements, format = shape.elements, DTYPES[self.dtype].format
        needed = {
            "a": Buffer(aligned(self.stored_elements(shape, "a")) * sets, UNQUANTIZED if format else self.dtype),
            "b": Buffer(aligned(self.stored_elements(shape, "b")) * sets, UNQUANTIZED if format else self.b_dtype),
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
        """Return the bytes of ``a`` or ``b`` that a launch reads, including scales."""
        count, format = shape.elements[operand], DTYPES[self.dtype].format
        if format is None:
            return count * DTYPES[self.dtype].itemsize
        scaling = format.scaling(operand)
        scale_size = 4 if scaling.dtype == "float32" else 1
        return count // format.values_per_byte + scaling.count(shape.rows[operand], shape.k) * scale_size

    def nbytes(self, shape: ProductShape, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of all buffers that launches read or write."""
        buffers = self.buffers(shape, sets, rewrite)
        unread = ("a", "b") if DTYPES[self.dtype].format else ()
        return sum(buffer.nbytes for name, buffer in buffers.items() if name not in unread)


ProductProblemT = TypeVar("ProductProblemT", bound=ProductProblem)
ProductShapeT = TypeVar("ProductShapeT", bound=ProductShape)


@dataclass(frozen=True)
class MatmulProblem(ProductProblem):
    """All parameters of a matmul except its shape.

    ``layout``: how A and B are stored, in BLAS terms for row-major storage: ``n`` as multiplied, ``t`` transposed.
    ``nt`` (B stored as N x K) is the layout of a linear layer and of mamf-finder. ``nt+8``: 8 unused elements follow
    each stored row.
    """

    operation: ClassVar[str] = "matmul"
    convention: ClassVar[str] = "2*M*N*K; A and B read, C written, once each"


class MatmulKernel(Kernel[MatmulProblem, MatmulShape]):
    """One implementation of matmul."""

    operation = "matmul"

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,)
