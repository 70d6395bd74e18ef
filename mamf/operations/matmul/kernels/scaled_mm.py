"""torch._scaled_mm: 8-bit floats with one scale per tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mamf.backend import Backend
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_matmul import TorchMatmul
from mamf.operations.matmul.shapes import MatmulShape
from mamf.torch_backend import torch_dtype


class ScaledMm(TorchMatmul):
    name = "scaled_mm"
    is_default = True
    function = "_scaled_mm"
    dtypes = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")

    def unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.layout != "nt":
            return f"kernel {self.name} takes A by rows and B by columns: --layout nt, not {problem.layout}"
        outputs = ("bfloat16", "float16", "float32", problem.b_dtype)
        if problem.out_dtype not in outputs:
            return f"kernel {self.name} writes {', '.join(outputs)} for {problem.dtype}, not {problem.out_dtype}"
        return None

    def unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if shape.n % 16 or shape.k % 16:
            return f"{self.name} needs N and K to be multiples of 16"
        return None

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # C is scaled back to the magnitude of A and B, so that no 8-bit output saturates whatever K is.
        scale = torch.tensor(1 / math.sqrt(a.shape[1]), dtype=torch.float32).item()
        scale_a = torch.ones((), dtype=torch.float32, device=a.device)
        scale_b = torch.full((), scale, dtype=torch.float32, device=a.device)
        out_dtype = torch_dtype(problem.out_dtype)
        fast = problem.fast_accumulation
        return (
            lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=fast, out=c),
            scale,
        )
