"""Base class for products of scaled formats (single and grouped): operands are quantized from values, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.dtypes import DTYPES, FORMATS
from mamf.operations.matmul.kernel import ProductProblem, ProductProblemT, ProductShape, ProductShapeT
from mamf.operations.operand_sets import TorchKernel, view_as
from mamf.operations.quantization import Quantized, quantize
from mamf.torch_backend import torch_dtype


class ScaledProducts(TorchKernel[ProductProblemT, ProductShapeT]):
    """Products of quantized operands with scales. Derived kernels supply the launch."""

    dtypes: ClassVar[tuple[str, ...]] = FORMATS
    read_only = ("a_quantized", "b_quantized")
    out_dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32")

    #: The function of torch.nn.functional that it calls, if some releases lack it.
    function: ClassVar[str] = ""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if self.function and not hasattr(torch.nn.functional, self.function):
            return Unavailable(f"torch {torch.__version__} has no {self.function}", "pip install 'torch>=2.10'")
        return super().unavailable(backend)

    def unsupported(self, backend: Backend, problem: ProductProblemT) -> str | None:
        if reason := self._unsupported_dtype(problem):
            return reason
        if problem.layout != "nt":
            return f"scales run along K, which must be the last dimension of both: --layout nt, not {problem.layout}"
        if problem.out_dtype not in self.out_dtypes:
            return f"kernel {self.name} writes {', '.join(self.out_dtypes)}, not {problem.out_dtype}"
        return self.unsupported_problem(backend, problem)

    def unsupported_problem(self, backend: Backend, problem: ProductProblemT) -> str | None:
        """Why this format is not supported with this accumulation on this device, or None."""
        if problem.fast_accumulation and problem.dtype != "fp8_rowwise":
            return f"{problem.dtype} has no fast accumulation; only fp8_rowwise and fp8 have it"
        return backend.unsupported_dtype(backend.resolve_dtype("fp8"))

    def unsupported_shape(self, problem: ProductProblemT, shape: ProductShapeT) -> str | None:
        format = DTYPES[problem.dtype].format
        n, k = format.multiples if format else (1, 1)
        if shape.n % n or shape.k % k:
            return f"{problem.dtype} needs N to be a multiple of {n} and K of {k}"
        return None

    def refuses(self, error: Exception) -> bool:
        # The library has no algorithm, or torch knows that it has none.
        return "STATUS_NOT_SUPPORTED" in str(error) or isinstance(error, (NotImplementedError, ValueError))


def rows_of(shape: ProductShape, operand: str, flat: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values of an operand: (rows, K)."""
    return view_as(flat[operand], shape.rows[operand], shape.k)


def quantized_operand(
    backend: Backend, problem: ProductProblem, shape: ProductShape, operand: str, flat: Mapping[str, torch.Tensor]
) -> Quantized:
    """The operand quantized to the problem's format, with the 8-bit floats that the device supports."""
    e4m3, format = torch_dtype(backend.resolve_dtype("fp8")), DTYPES[problem.dtype].format
    nbytes = shape.elements[operand] // (format.values_per_byte if format else 1)
    memory = flat[f"{operand}_quantized"][:nbytes]
    return quantize(rows_of(shape, operand, flat), problem.dtype, operand, memory, e4m3)
