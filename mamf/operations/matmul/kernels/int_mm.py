"""torch._int_mm: int8 operands, exact int32 result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_products import TorchMatmul
from mamf.operations.matmul.shapes import MatmulShape

_CUDA_ROWS_ABOVE = 16


class IntMm(TorchMatmul):
    name = "int_mm"
    is_default = True
    function = "_int_mm"
    dtypes = ("int8",)

    def unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if shape.m <= _CUDA_ROWS_ABOVE or shape.n % 8 or shape.k % 8:
            return f"{self.name} needs M above {_CUDA_ROWS_ABOVE} and N and K to be multiples of 8"
        return None

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch._int_mm(a, b, out=c), 1.0
