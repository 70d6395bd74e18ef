"""cuBLASLt via nvmath-python: all algorithms that its heuristic proposes, not only the first.

``torch.mm`` runs the heuristic's first choice, which is not the fastest for some shapes. nvmath's autotune ranks the
algorithms in a loop at an uncontrolled clock; a search for a ceiling ranks them in its own regime (``variants``).
"""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.errors import UnsupportedError
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_products import TorchMatmul
from mamf.operations.matmul.shapes import MatmulShape

# The number of proposals requested from the heuristic; later ones are less and less likely to be fast.
_ALGORITHMS = 8


class CublasLt(TorchMatmul):
    """``rank``: the index of the heuristic's proposal, the first by default."""

    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank or 0
        self.name = "cublaslt" if rank is None else f"cublaslt[{rank}]"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime != "cuda":
            return Unavailable("cuBLASLt runs on NVIDIA GPUs only", "use --backend cuda on an NVIDIA GPU")
        if importlib.util.find_spec("nvmath") is None:
            return Unavailable("nvmath-python is not installed", "pip install 'mamf[cublaslt]'")
        return None

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[CublasLt]:
        return [CublasLt(rank) for rank in range(_ALGORITHMS)]

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        try:
            from nvmath.linalg.advanced import Matmul, MatmulOptions, MatmulPlanPreferences
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(f"this nvmath-python does not support cuBLASLt products ({error})") from error

        # With beta = 0 and in place, C is written and never read.
        product = Matmul(a, b, c=c, alpha=1.0, beta=0.0, options=MatmulOptions(inplace=True, **_precision(problem)))
        found = product.plan(preferences=MatmulPlanPreferences(limit=_ALGORITHMS))
        if self.rank >= len(found):
            product.free()
            raise UnsupportedError(f"cuBLASLt proposes only {len(found)} algorithms for this shape")
        algorithm = found[self.rank]

        def launch() -> object:
            return product.execute(algorithm=algorithm)

        weakref.finalize(launch, product.free)
        return launch, 1.0


def _precision(problem: MatmulProblem) -> dict[str, Any]:
    from nvmath.linalg.advanced import MatmulComputeType

    if problem.dtype == "tf32":
        return {"compute_type": MatmulComputeType.COMPUTE_32F_FAST_TF32}
    return {} if problem.dtype == "float64" else {"compute_type": MatmulComputeType.COMPUTE_32F}
