"""Measure memory bandwidth with torch tensors: with torch's functions, as models call them, and with Triton kernels.

The base class of these kernels verifies all elements on the device, because the arrays are too large to copy to the
host. The host verifies sampled elements again in float64, so that the device does not only check itself.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError
from mamf.kernel import Prepared, Verdict
from mamf.operations.bandwidth.operation import READ_ARRAYS, BandwidthKernel, BandwidthProblem, BandwidthShape
from mamf.operations.compilation import check_triton_backend
from mamf.operations.operand_sets import OperandSet, TorchKernel, draw_sample_indices, view_as_words
from mamf.torch_backend import to_torch_dtype

#: The value that the pattern ``write`` writes, and the factor of a triad. It is exact in every dtype, so an element of
#: a triad is rounded at most twice.
SCALAR = 3.0
# Number of elements that verification compares at once. Comparing them takes a few times 64 MiB of temporary memory.
_CHUNK_ELEMENTS = 2**24
_SAMPLE_COUNT = 256
# Smallest value by which verification divides an error, because float16 is too coarse for relative errors of smaller
# values.
_MIN_SCALE = 1e-3
# Number of standard deviations from its mean up to which a sum must fit in the range of its dtype.
_MAX_DEVIATIONS = 6


class TorchArrays(TorchKernel[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """A kernel that passes over torch tensors. Derived classes define the launch."""

    def get_sum_layout(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        """Return how many sums the pattern ``read`` writes, each over a part of the array, and the sums' dtype."""
        return 1, "float32"

    @abstractmethod
    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        """Return the launch with all its passes, and how many times its sums count each element of the array."""

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        return super().prepare(backend, problem, shape, pool, problem.limit_operand_sets(shape, sets), rewrite)

    def operand_set(
        self, backend: Backend, problem: BandwidthProblem, shape: BandwidthShape, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        (count, dtype), device = self.get_sum_layout(backend, problem), next(iter(flat.values())).device
        sums = torch.empty(count, dtype=to_torch_dtype(dtype), device=device)
        arrays = {name: flat[name][: problem.elements(shape)] for name in problem.arrays}
        launch, times = self.bind(backend, problem, arrays, sums)
        operands, output = [arrays[name] for name in READ_ARRAYS[problem.pattern]], arrays.get("a", sums)
        if problem.pattern == "read":
            verify = make_sum_check(operands[0], sums, times, "cpu" if backend.unsupported_dtype("float64") else device)
        else:
            verify = make_element_check(problem, operands, output)
        return OperandSet(launch, verify, outputs=[output])


def make_sum_check(
    array: torch.Tensor, sums: torch.Tensor, times: float, device: torch.device | str
) -> Callable[[object], Verdict]:
    """Return a function that checks whether ``sums`` add up to ``times`` times the sum of an array.

    The error is relative to the norm of the array. In float32 the check detects any missing element. ``device``: a
    device that supports float64, for the expected sum. Raises UnsupportedError if the sum of the array may exceed the
    range of its dtype.
    """
    tolerance = 2 * DTYPES[str(sums.dtype).removeprefix("torch.")].tolerance
    total, norm = (times * each for each in compute_sum_and_norm(array, device))
    if _MAX_DEVIATIONS * norm > torch.finfo(sums.dtype).max:
        raise UnsupportedError(
            f"the sum of an array of this size may exceed the range of {sums.dtype}".replace("torch.", "")
        )

    def verify(result: object) -> Verdict:
        difference = abs(sums.cpu().to(torch.float64).sum().item() - total)
        return Verdict(difference / norm if norm else difference and math.inf, tolerance)

    return verify


def make_element_check(
    problem: BandwidthProblem, operands: Sequence[torch.Tensor], output: torch.Tensor
) -> Callable[[object], Verdict]:
    """Return a function that checks all elements of the output on the device, and sampled elements on the host."""
    # An element of a triad may be rounded twice: after the multiply and after the add.
    tolerance = 2 * DTYPES[problem.dtype].tolerance if problem.pattern == "triad" else 0.0
    sampled = draw_sample_indices(output.numel(), _SAMPLE_COUNT, random.Random(problem.seed)).to(output.device)
    sampled_operands = [copy_samples_to_host(operand, sampled) for operand in operands]
    wide_dtype = torch.float64 if output.dtype == torch.float64 else torch.float32

    def verify(result: object) -> Verdict:
        chunks = zip(*(tensor.split(_CHUNK_ELEMENTS) for tensor in (output, *operands)), strict=True)
        worst = (
            torch.stack(
                [compute_max_error(problem.pattern, a, chunk_operands, wide_dtype) for a, *chunk_operands in chunks]
            )
            .max()
            .item()
        )
        by_host = compute_max_error(
            problem.pattern, copy_samples_to_host(output, sampled), sampled_operands, torch.float64
        ).item()
        return Verdict(worst if math.isnan(worst) else max(worst, by_host), tolerance)

    return verify


def compute_max_error(
    pattern: str, a: torch.Tensor, operands: Sequence[torch.Tensor], wide_dtype: torch.dtype
) -> torch.Tensor:
    """Return the largest relative error of ``a`` for a triad; for copy and write, the share of elements that differ."""
    if pattern == "copy":
        return (view_as_words(a) != view_as_words(operands[0])).to(torch.float32).mean()
    if pattern == "write":
        return (a != SCALAR).to(torch.float32).mean()
    b, c = (operand.to(wide_dtype) for operand in operands)
    scale = (b.abs() + SCALAR * c.abs()).clamp_min(_MIN_SCALE)
    return ((a.to(wide_dtype) - (b + SCALAR * c)).abs() / scale).max().to(torch.float32)


def compute_sum_and_norm(array: torch.Tensor, device: torch.device | str) -> tuple[float, float]:
    """Return the sum and the norm of an array, computed in float64 on ``device``, which must support float64."""
    total = squares = 0.0
    for chunk in array.split(_CHUNK_ELEMENTS):
        wide_chunk = chunk.to(device).to(torch.float64)
        total += wide_chunk.sum().item()
        squares += wide_chunk.square().sum().item()
    return total, math.sqrt(squares)


def copy_samples_to_host(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, indices).cpu()


# -- torch's functions -------------------------------------------------------------------------------------------------


class TorchFunctions(TorchArrays):
    """A kernel that calls torch's ``copy_``, ``sum``, ``fill_``, or ``add`` with alpha, once for each pass."""

    name = "torch"
    is_default = True
    dtypes = ("float32", "float64", "bfloat16", "float16")

    def get_sum_layout(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        # On accelerators torch sums 16-bit elements directly into 32 bits. On a CPU it would first convert the whole
        # array to 32 bits, so the sum keeps the array's dtype.
        is_widened = backend.is_accelerator and DTYPES[problem.dtype].itemsize < 4
        return 1, "float32" if is_widened else problem.dtype

    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        return make_repeated_launch(make_pass_call(problem.pattern, arrays, sums), problem.warm), 1.0


def make_pass_call(pattern: str, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor) -> Callable[[], object]:
    if pattern == "read":
        return partial(torch.sum, arrays["b"], 0, dtype=sums.dtype, out=sums[0])
    a = arrays["a"]
    if pattern == "copy":
        return partial(a.copy_, arrays["b"])
    if pattern == "write":
        return partial(a.fill_, SCALAR)
    return partial(torch.add, arrays["b"], arrays["c"], alpha=SCALAR, out=a)


def make_repeated_launch(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a launch that makes a call ``times`` times. It returns None, because the caller has the output array."""

    def launch() -> None:
        for _ in range(times):
            call()

    return launch


# -- passes in Triton --------------------------------------------------------------------------------------------------


# Number of Triton programs per compute unit. With 8 warps of 32 threads each, they fill its 2048 threads.
_PROGRAMS_PER_UNIT = 8
# Assumed number of compute units of a device that does not report it.
_DEFAULT_COMPUTE_UNITS = 64
_WARPS_PER_PROGRAM = 8
# Bytes of an array that a program moves at once: 32 bytes, or two loads of 16 bytes, per thread.
_BLOCK_BYTES = _WARPS_PER_PROGRAM * 32 * 32


class TritonPasses(TorchArrays):
    """A persistent Triton kernel whose programs stride over the arrays.

    A launch runs all its passes in one kernel on the device, so that several passes measure a cache without gaps
    between kernels.
    """

    name = "triton"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_triton_backend(backend, "torch")

    def get_sum_layout(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        return count_programs(backend), "float32"

    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        from mamf.operations.bandwidth import triton_kernels as kernels

        operands = [arrays[name] for name in problem.arrays]
        kernel: Any = getattr(kernels, f"{problem.pattern}_passes")[(count_programs(backend),)]
        if problem.pattern == "read":
            operands.append(sums)
        count, block = operands[0].numel(), _BLOCK_BYTES // operands[0].element_size()
        # Only the Triton kernels of the patterns write and triad have a parameter for the scalar.
        scalar = (SCALAR,) if problem.pattern in ("write", "triad") else ()

        def launch() -> None:
            kernel(*operands, *scalar, count, problem.warm, BLOCK=block, num_warps=_WARPS_PER_PROGRAM)

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
        prepared.launches[0]()  # Let Triton compile the kernel, which it does in the first launch.
        backend.synchronize()
        return prepared


def count_programs(backend: Backend) -> int:
    return (backend.info.compute_units or _DEFAULT_COMPUTE_UNITS) * _PROGRAMS_PER_UNIT
