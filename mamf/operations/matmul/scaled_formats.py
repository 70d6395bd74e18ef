"""Multiply matrices in scaled formats with torch's functions for these formats, or in float32 after dequantization."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mamf.backend import Backend
from mamf.operations.freivalds import MatmulPart
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMatmul
from mamf.operations.matmul_operands import BaseScaledMatmul, make_scaled_operand_set
from mamf.operations.operand_sets import OperandSet, use_float32_precision, view_as
from mamf.operations.quantization import QuantizedOperand, swizzle_scales
from mamf.torch_backend import get_torch_dtype

#: The name in torch.nn.functional.ScalingType for each block size (rows, columns). The values in a block share a scale.
#: If the number of columns is None, a block spans all of K.
_TORCH_SCALING_NAME_BY_BLOCK_SIZE = {
    (1, None): "RowWise",
    (1, 128): "BlockWise1x128",
    (128, 128): "BlockWise128x128",
    (1, 32): "BlockWise1x32",
    (1, 16): "BlockWise1x16",
}
#: The output dtypes that torch._scaled_mm supports, by the dtype of A.
_OUTPUT_DTYPES_BY_DTYPE = {
    dtype: ("bfloat16", "float16", "float32", MatmulProblem(dtype).b_dtype)
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
}


class ScaledFormatMatmul(BaseScaledMatmul[MatmulProblem, MatmulShape], MatmulKernel):
    """A matmul of operands in a scaled format. Derived classes implement ``bind_operands``."""

    @abstractmethod
    def bind_operands(
        self, backend: Backend, problem: MatmulProblem, a: QuantizedOperand, b: QuantizedOperand, c: torch.Tensor
    ) -> Callable[[], object]:
        """Return a function that launches C = A @ B^T, with A (M, K), B (N, K) and C (M, N)."""

    def make_operand_set(
        self, backend: Backend, problem: MatmulProblem, shape: MatmulShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        c = view_as(buffers["c"], shape.m, shape.n)
        return make_scaled_operand_set(
            *(backend, problem, shape, buffers, c),
            bind_operands=lambda a, b: self.bind_operands(backend, problem, a, b, c),
            split_into_parts=lambda a, b, output: [MatmulPart(a, b, output[None])],
        )


class FunctionalScaledMm(ScaledFormatMatmul):
    """The kernel torch.nn.functional.scaled_mm, for the scaled formats that the vendor's library supports."""

    name = "F.scaled_mm"
    torch_name = "scaled_mm"
    is_default = True

    def bind_operands(
        self, backend: Backend, problem: MatmulProblem, a: QuantizedOperand, b: QuantizedOperand, c: torch.Tensor
    ) -> Callable[[], object]:
        functional: Any = torch.nn.functional
        needs_swizzle = backend.runtime != "hip"
        scale_a, scale_b = lay_out_scales(a, needs_swizzle), lay_out_scales(b, needs_swizzle)
        if b.scaling.block_rows > 1 or b.scaling.block_columns is None:
            scale_b = scale_b.t()
        options: dict[str, Any] = {"output_dtype": c.dtype, "use_fast_accum": problem.fast_accumulation}
        if a.scaling.scale_dtype != "float32":
            swizzle_types = functional.SwizzleType
            swizzle_type = swizzle_types.SWIZZLE_32_4_4 if needs_swizzle else swizzle_types.NO_SWIZZLE
            options |= {"swizzle_a": swizzle_type, "swizzle_b": swizzle_type}
        recipe_a, recipe_b = (
            getattr(
                functional.ScalingType,
                _TORCH_SCALING_NAME_BY_BLOCK_SIZE[each.scaling.block_rows, each.scaling.block_columns],
            )
            for each in (a, b)
        )
        left, right = a.packed_elements, b.packed_elements.t()
        return lambda: functional.scaled_mm(left, right, scale_a, recipe_a, scale_b, recipe_b, **options)


def lay_out_scales(operand: QuantizedOperand, needs_swizzle: bool) -> torch.Tensor:
    """Return the scales of an operand in the memory layout that torch's scaled_mm and cuBLASLt require.

    Store scales of 1x128 blocks by columns, and pad scales of 128x128 blocks along K. Flatten scales of MX and NVFP4
    formats. If ``needs_swizzle``, first reorder these scales with ``swizzle_scales``, because the libraries for NVIDIA
    GPUs require this order.
    """
    scales, scaling = operand.scales, operand.scaling
    if scaling.scale_dtype != "float32":
        return (swizzle_scales(scales) if needs_swizzle else scales.reshape(-1)).view(
            getattr(torch, scaling.scale_dtype)
        )
    if scaling.block_rows > 1:
        # cuBLAS expects a multiple of 4 scales along K.
        return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    return scales if scaling.block_columns is None else scales.t().contiguous().t()


class DequantizedMatmul(ScaledFormatMatmul):
    """A kernel that dequantizes both operands and multiplies them in float32. Its time includes the dequantization.

    This kernel also runs on devices that do not support the format.
    """

    name = "dequantized"
    is_tried_by_default = False

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblem) -> str | None:
        return (
            f"kernel {self.name} does not support fast accumulation: use --no-fast-accumulation"
            if problem.fast_accumulation
            else None
        )

    def apply_settings(self, backend: Backend, problem: MatmulProblem) -> AbstractContextManager[object]:
        return use_float32_precision("highest")

    def bind_operands(
        self, backend: Backend, problem: MatmulProblem, a: QuantizedOperand, b: QuantizedOperand, c: torch.Tensor
    ) -> Callable[[], object]:
        return lambda: c.copy_(torch.mm(a.dequantize(), b.dequantize().t()))


class ScaledMm(TorchMatmul):
    name = "scaled_mm"
    is_default = True
    torch_name = "_scaled_mm"
    dtypes = tuple(_OUTPUT_DTYPES_BY_DTYPE)
    output_dtypes_by_dtype = _OUTPUT_DTYPES_BY_DTYPE
    fast_accumulation_dtypes = dtypes

    def explain_unsupported_options(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.layout != "nt":
            return f"kernel {self.name} needs A stored by rows and B by columns: use --layout nt, not {problem.layout}"
        return super().explain_unsupported_options(backend, problem)

    def explain_unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        return (
            f"{self.name} needs N and K to be multiples of 16, not {shape.n} and {shape.k}: choose another shape"
            if shape.n % 16 or shape.k % 16
            else None
        )

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # Scale C by 1 / sqrt(K), so that C has the magnitude of A and B, and an 8-bit C does not saturate for any K.
        scale = torch.tensor(1 / math.sqrt(a.shape[1]), dtype=torch.float32).item()
        scale_a = torch.ones((), dtype=torch.float32, device=a.device)
        scale_b = torch.full((), scale, dtype=torch.float32, device=a.device)
        out_dtype = get_torch_dtype(problem.out_dtype)
        is_fast = problem.fast_accumulation
        return (
            lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=is_fast, out=c),
            scale,
        )
