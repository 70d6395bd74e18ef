"""Passes written in Triton: a persistent grid that strides over the arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared
from mamf.operations.bandwidth.kernels.torch_functions import SCALAR, TorchArrays
from mamf.operations.bandwidth.shapes import BandwidthProblem, BandwidthShape
from mamf.operations.compilation import check_triton

# Programs per compute unit: with 8 warps each they fill its 2048 threads.
_PROGRAMS_PER_UNIT = 8
# If the device does not report it.
_COMPUTE_UNITS = 64
_WARPS = 8
# Bytes of an array that a program moves at once: two loads of 16 bytes per thread.
_BLOCK_BYTES = _WARPS * 32 * 32


class TritonPasses(TorchArrays):
    """All passes of a launch in one kernel, so warm passes measure the caches without gaps between kernels."""

    name = "triton"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_triton(backend, "torch")

    def sums(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        return programs(backend), "float32"

    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        from mamf.operations.bandwidth.kernels import triton_kernels as kernels

        operands = [arrays[name] for name in problem.arrays]
        kernel: Any = getattr(kernels, f"{problem.pattern}_passes")[(programs(backend),)]
        if problem.pattern == "read":
            operands.append(sums)
        count, block = operands[0].numel(), _BLOCK_BYTES // operands[0].element_size()
        # Patterns that multiply or fill take the scalar.
        scalar = (SCALAR,) if problem.pattern in ("write", "triad") else ()

        def launch() -> None:
            kernel(*operands, *scalar, count, problem.warm, BLOCK=block, num_warps=_WARPS)

        return launch, float(problem.warm)

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        prepared = super().prepare(backend, problem, shape, pool, sets, rewrite)
        prepared.launches[0]()  # compiles
        backend.synchronize()
        return prepared


def programs(backend: Backend) -> int:
    return (backend.info.compute_units or _COMPUTE_UNITS) * _PROGRAMS_PER_UNIT
