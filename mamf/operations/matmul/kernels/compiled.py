"""torch.compile with max-autotune: whatever Inductor finds faster than the library, by its own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.operations.compilation import with_own_cache
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_mm import TorchMm


class Compiled(TorchMm):
    """Compiles anew for every shape, for seconds to minutes: tried by a search only when asked for."""

    is_default = False
    name = "compiled"
    is_tried_unasked = False

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # Not into C: Inductor would run the product and then copy.
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.mm(left, right)

        own = with_own_cache(multiply)
        product: Any = torch.compile(own, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return lambda: product(a, b), 1.0
