"""torch.mm with TunableOp: torch's tuning selects the fastest algorithm of ROCm's libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from mamf.backend import Backend, Unavailable
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_products import TorchMm


class TunableOp(TorchMm):
    """Tunes in the first launch of a shape, which is for verification and not timed."""

    is_default = False
    name = "tunableop"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime != "hip":
            # On CUDA, torch up to 2.13 has no algorithms to choose from.
            return Unavailable("TunableOp tunes on ROCm only", "use --backend rocm on an AMD GPU")
        if not hasattr(torch.cuda, "tunable"):
            return Unavailable("this torch has no torch.cuda.tunable", "pip install --upgrade torch")
        return None

    def settings(self, backend: Backend, problem: MatmulProblem) -> AbstractContextManager[object]:
        return _tuning(super().settings(backend, problem))


@contextmanager
def _tuning(precision: AbstractContextManager[object]) -> Iterator[None]:
    tunable = torch.cuda.tunable
    enabled, tuning = tunable.is_enabled(), tunable.tuning_is_enabled()
    tunable.enable(True)
    tunable.tuning_enable(True)
    try:
        with precision:
            yield
    finally:
        tunable.enable(enabled)
        tunable.tuning_enable(tuning)
