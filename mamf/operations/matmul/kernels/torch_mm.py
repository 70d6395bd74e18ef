"""torch.mm: the vendor's library as every model calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from mamf.backend import Backend
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_matmul import TorchMatmul


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class TorchMm(TorchMatmul):
    name = "torch.mm"
    is_default = True
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        own = "float32" if problem.dtype == "tf32" else problem.dtype
        if problem.out_dtype != own:
            return f"kernel {self.name} writes {own} for {problem.dtype}, not {problem.out_dtype}"
        if problem.fast_accumulation:
            return f"kernel {self.name} has no fast accumulation; it is a mode of 8-bit floats"
        return None

    def settings(self, backend: Backend, problem: MatmulProblem) -> AbstractContextManager[object]:
        # Held for float32 too: a user's global "high" must not turn its ceiling into tf32's.
        return float32_precision("high" if problem.dtype == "tf32" else "highest")

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch.mm(a, b, out=c), 1.0
