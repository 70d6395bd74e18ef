"""torch.mm: the vendor's library as every model calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_matmul import TorchMatmul


class TorchMm(TorchMatmul):
    name = "torch.mm"
    is_default = True
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch.mm(a, b, out=c), 1.0
