"""torch.compile with max-autotune: whatever Inductor finds faster than the library, by its own clock."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.kernel import MatmulProblem
from mamf.kernels.flex import with_own_cache
from mamf.kernels.torch_mm import TorchMm

_COMPILERS = ("c++", "g++", "clang++")


class Compiled(TorchMm):
    """Compiles anew for every shape, for seconds to minutes: tried by a search only when asked for."""

    is_default = False
    name = "compiled"
    is_tried_unasked = False

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.name == "mps":
            return Unavailable("Inductor tunes no products on mps", "use --kernel torch.mm")
        if backend.name == "cpu" and not any(map(shutil.which, _COMPILERS)):
            return Unavailable("Inductor needs a C++ compiler", "sudo apt install g++")
        return None

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # Not into C: Inductor would run the product and then copy.
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.mm(left, right)

        own = with_own_cache(multiply)
        product: Any = torch.compile(own, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return lambda: product(a, b), 1.0
