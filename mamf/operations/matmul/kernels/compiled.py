"""torch.compile with max-autotune: Inductor chooses between the library and its own kernels with its own timing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mamf.backend import Backend, Unavailable
from mamf.operations.compilation import compile_for_shape
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_mm import TorchMm


class Compiled(TorchMm):
    """Compiles for each shape, which takes seconds to minutes, so a search tries it only on request."""

    is_default = False
    name = "compiled"
    is_tried_unasked = False

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # The product is returned and not written to C: Inductor would compute it and then copy.
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.mm(left, right)

        product = compile_for_shape(multiply, mode="max-autotune-no-cudagraphs")
        return lambda: product(a, b), 1.0
