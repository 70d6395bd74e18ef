"""Passes written in Triton: a grid that stays on the device and strides over the arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared
from mamf.operations.bandwidth.kernels.arrays import SCALAR, TorchArrays
from mamf.operations.bandwidth.shapes import BandwidthProblem, BandwidthShape

# Programs a compute unit: with 8 warps each they fill the 2048 threads that one holds.
_PROGRAMS_PER_UNIT = 8
# Where the device does not tell.
_COMPUTE_UNITS = 64
_WARPS = 8
# Of an array, that a program moves at once: two loads of 16 bytes a thread.
_BLOCK_BYTES = _WARPS * 32 * 32


class TritonPasses(TorchArrays):
    """All passes of a launch within one kernel, so that a warm one shows the caches and no gaps between kernels."""

    name = "triton"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if not backend.is_accelerator:
            return Unavailable("Triton's kernels run on a GPU", "use the kernel torch, which runs everywhere")
        if importlib.util.find_spec("triton") is None:
            return Unavailable("Triton is not installed", "pip install triton")
        try:
            driven = active_device().type
        except Exception as error:  # whatever a vendor's driver throws
            return Unavailable(f"Triton finds no GPU that it can drive ({error})", "use the kernel torch")
        if driven != getattr(backend, "device_type", None):
            return Unavailable(f"Triton drives {driven} here, not {backend.name}", "use the kernel torch")
        return None

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
        # Those that multiply or write take the scalar.
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


def active_device() -> torch.device:
    """What Triton's driver runs kernels on. Raises whatever the driver does where there is none."""
    from triton.runtime import driver

    device = driver.active.get_active_torch_device()
    assert isinstance(device, torch.device)
    return device
