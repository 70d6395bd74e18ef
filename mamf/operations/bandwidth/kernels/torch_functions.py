"""torch's own functions, as models call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mamf.backend import Backend
from mamf.dtypes import DTYPES
from mamf.operations.bandwidth.kernels.arrays import SCALAR, TorchArrays
from mamf.operations.bandwidth.shapes import BandwidthProblem


class TorchFunctions(TorchArrays):
    """``copy_``, ``sum``, ``fill_`` and ``add`` with alpha; several passes are consecutive calls."""

    name = "torch"
    is_default = True
    dtypes = ("float32", "float64", "bfloat16", "float16")

    def sums(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        # Accelerators sum 16-bit elements directly into 32 bits; on a CPU torch would copy the array to 32 bits first.
        widens = backend.is_accelerator and DTYPES[problem.dtype].itemsize < 4
        return 1, "float32" if widens else problem.dtype

    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        return repeat(make_pass(problem.pattern, arrays, sums), problem.warm), 1.0


def make_pass(pattern: str, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor) -> Callable[[], object]:
    if pattern == "read":
        return partial(torch.sum, arrays["b"], 0, dtype=sums.dtype, out=sums[0])
    a = arrays["a"]
    if pattern == "copy":
        return partial(a.copy_, arrays["b"])
    if pattern == "write":
        return partial(a.fill_, SCALAR)
    return partial(torch.add, arrays["b"], arrays["c"], alpha=SCALAR, out=a)


def repeat(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Repeat a call. The launch returns nothing: the output is an array that the caller has."""

    def launch() -> None:
        for _ in range(times):
            call()

    return launch
