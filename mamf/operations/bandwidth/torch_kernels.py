"""Measure memory bandwidth with torch tensors. One kernel calls torch's functions, as models do. Another is written in
Triton.

Their base class verifies all elements on the device, because the arrays are too large to copy to the host. The host
then verifies a sample of the elements in float64, in case the check on the device is wrong.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError
from mamf.kernel import PreparedKernel, Verdict
from mamf.operations.bandwidth.operation import (
    SOURCE_ARRAYS_BY_PATTERN,
    BandwidthKernel,
    BandwidthProblem,
    BandwidthShape,
)
from mamf.operations.compilation import explain_triton_unavailability
from mamf.operations.operand_sets import OperandSet, TorchKernel, draw_sample_indices, view_as_words

#: The value that the pattern ``write`` writes, and the factor s of a triad, a = b + s * c. Every dtype represents this
#: value exactly. So an element of a triad is rounded at most twice: after the multiplication and after the addition.
PATTERN_SCALAR = 3.0
# The number of elements that verification compares at once. This takes a few times 64 MiB of temporary memory.
_ELEMENTS_PER_CHUNK = 2**24
_SAMPLED_ELEMENT_COUNT = 256
# Verification divides the error of an element of a triad by |b| + PATTERN_SCALAR * |c|. If this sum is smaller than the
# constant below, verification divides by the constant, because small values in float16 have large relative errors.
_MIN_ERROR_DIVISOR = 1e-3
# The range of a dtype must include the sum of an array, even if the sum is this many standard deviations from its mean.
_MAX_SUM_DEVIATIONS = 6


class TorchBandwidthKernel(TorchKernel[BandwidthProblem, BandwidthShape], BandwidthKernel):
    """A kernel that passes over torch tensors. Derived classes define the launch."""

    @abstractmethod
    def bind_operands(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], object], torch.Tensor, float]:
        """Return the launch function, its output and, for the pattern ``read``, how many times the output counts each
        element.

        The launch runs all passes. The output is the array that the passes write or, for the pattern ``read``, a new
        tensor of partial sums.
        """

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        return super().prepare(backend, problem, shape, pool, problem.limit_operand_set_count(shape, sets), rewrite)

    def make_operand_set(
        self, backend: Backend, problem: BandwidthProblem, shape: BandwidthShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        arrays = {name: buffers[name][: problem.count_elements(shape)] for name in problem.array_names}
        launch, output, count_per_element = self.bind_operands(backend, problem, arrays)
        operands = [arrays[name] for name in SOURCE_ARRAYS_BY_PATTERN[problem.pattern]]
        if problem.pattern == "read":
            device = torch.device("cpu") if backend.explain_unsupported_dtype("float64") else output.device
            verify = make_sum_check(operands[0], output, count_per_element, device)
        else:
            verify = make_element_check(problem, operands, output)
        return OperandSet(launch, verify, outputs=[output])


def make_sum_check(
    array: torch.Tensor, sums: torch.Tensor, count_per_element: float, device: torch.device
) -> Callable[[object], Verdict]:
    """Return a function that checks whether ``sums`` add up to ``count_per_element`` times the sum of an array.

    The error is relative to the norm of the array. In float32 the check detects any missing element. ``device``: a
    device with float64, which computes the expected sum. Raises UnsupportedError if the sum of the array may exceed the
    range of the dtype of ``sums``.
    """
    tolerance = 2 * DTYPES[str(sums.dtype).removeprefix("torch.")].tolerance
    expected_sum = square_sum = 0.0
    for chunk in array.split(_ELEMENTS_PER_CHUNK):
        float64_chunk = chunk.to(device).to(torch.float64)
        expected_sum += count_per_element * float64_chunk.sum().item()
        square_sum += float64_chunk.square().sum().item()
    norm = count_per_element * math.sqrt(square_sum)
    if _MAX_SUM_DEVIATIONS * norm > torch.finfo(sums.dtype).max:
        raise UnsupportedError(
            f"the sum of an array of this size may exceed the range of {sums.dtype}: choose a smaller --size".replace(
                "torch.", ""
            )
        )

    def verify(result: object) -> Verdict:
        difference = abs(sums.cpu().to(torch.float64).sum().item() - expected_sum)
        return Verdict(difference / norm if norm else difference and math.inf, tolerance)

    return verify


def make_element_check(
    problem: BandwidthProblem, operands: Sequence[torch.Tensor], output: torch.Tensor
) -> Callable[[object], Verdict]:
    """Return a function that checks all elements of the output on the device, and sampled elements on the host."""
    # An element of a triad may be rounded twice: after the multiply and after the add.
    tolerance = 2 * DTYPES[problem.dtype].tolerance if problem.pattern == "triad" else 0.0
    sample_indices = draw_sample_indices(output.numel(), _SAMPLED_ELEMENT_COUNT, random.Random(problem.seed)).to(
        output.device
    )
    sampled_operands = [copy_samples_to_host(operand, sample_indices) for operand in operands]
    sum_dtype = torch.float64 if output.dtype == torch.float64 else torch.float32

    def verify(result: object) -> Verdict:
        chunks = zip(*(tensor.split(_ELEMENTS_PER_CHUNK) for tensor in (output, *operands)), strict=True)
        device_error = (
            torch.stack(
                [compute_pattern_error(problem.pattern, a, chunk_operands, sum_dtype) for a, *chunk_operands in chunks]
            )
            .max()
            .item()
        )
        host_error = compute_pattern_error(
            problem.pattern, copy_samples_to_host(output, sample_indices), sampled_operands, torch.float64
        ).item()
        return Verdict(device_error if math.isnan(device_error) else max(device_error, host_error), tolerance)

    return verify


def compute_pattern_error(
    pattern: str, a: torch.Tensor, operands: Sequence[torch.Tensor], sum_dtype: torch.dtype
) -> torch.Tensor:
    """Return the largest relative error of ``a`` for a triad, and for other patterns the share of wrong elements."""
    if pattern == "copy":
        return (view_as_words(a) != view_as_words(operands[0])).to(torch.float32).mean()
    if pattern == "write":
        return (a != PATTERN_SCALAR).to(torch.float32).mean()
    b, c = (operand.to(sum_dtype) for operand in operands)
    divisor = (b.abs() + PATTERN_SCALAR * c.abs()).clamp_min(_MIN_ERROR_DIVISOR)
    return ((a.to(sum_dtype) - (b + PATTERN_SCALAR * c)).abs() / divisor).max().to(torch.float32)


def copy_samples_to_host(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, indices).cpu()


# -- torch's functions -------------------------------------------------------------------------------------------------


class TorchFunctions(TorchBandwidthKernel):
    """A kernel that calls torch's ``copy_``, ``sum``, ``fill_``, or ``add`` with alpha, once for each pass."""

    name = "torch"
    is_default = True
    dtypes = ("float32", "float64", "bfloat16", "float16")

    def bind_operands(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], object], torch.Tensor, float]:
        array = arrays[problem.array_names[0]]
        # On accelerators, torch sums 16-bit elements in float32 without a converted copy of the array. On a CPU, torch
        # would first convert the whole array to float32. So on a CPU, request a sum in the dtype of the array.
        has_float32_sums = backend.is_accelerator and array.dtype.itemsize < 4
        sums = array.new_empty(1, dtype=torch.float32 if has_float32_sums else array.dtype)
        # Pass ``sums`` as an unused placeholder for each array that the pattern does not have.
        a, b, c = (arrays.get(name, sums) for name in ("a", "b", "c"))
        run_pass = {
            "copy": partial(a.copy_, b),
            "read": partial(torch.sum, b, 0, dtype=sums.dtype, out=sums[0]),
            "write": partial(a.fill_, PATTERN_SCALAR),
            "triad": partial(torch.add, b, c, alpha=PATTERN_SCALAR, out=a),
        }[problem.pattern]

        def launch() -> None:
            for _ in range(problem.warm):
                run_pass()

        return launch, a, 1.0


# -- passes in Triton --------------------------------------------------------------------------------------------------


# The number of Triton programs per compute unit. Each program has 8 warps of 32 threads, so these programs use all 2048
# threads of a unit.
_PROGRAMS_PER_UNIT = 8
# The number of compute units that mamf assumes for a device that does not report the number.
_DEFAULT_COMPUTE_UNITS = 64
_WARPS_PER_PROGRAM = 8
# The bytes of an array that a program moves at once: 32 bytes, or two loads of 16 bytes, per thread.
_BLOCK_BYTES = _WARPS_PER_PROGRAM * 32 * 32


class TritonPasses(TorchBandwidthKernel):
    """A persistent Triton kernel: each of its programs processes many blocks of the arrays.

    A launch runs all passes in one kernel, so that there are no gaps between the passes when they measure a cache.
    """

    name = "triton"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_triton_unavailability(backend, "torch")

    def bind_operands(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], object], torch.Tensor, float]:
        from mamf.operations.bandwidth import triton_kernels as kernels

        operands = [arrays[name] for name in problem.array_names]
        element_count, block_elements = operands[0].numel(), _BLOCK_BYTES // operands[0].element_size()
        program_count = (backend.info.compute_units or _DEFAULT_COMPUTE_UNITS) * _PROGRAMS_PER_UNIT
        triton_kernel: Any = getattr(kernels, f"run_{problem.pattern}_passes")[(program_count,)]
        output = arrays.get("a", operands[0].new_empty(program_count, dtype=torch.float32))
        if problem.pattern == "read":
            operands.append(output)
        # Only the Triton kernels of the patterns write and triad have a parameter for the scalar.
        scalar = (PATTERN_SCALAR,) if problem.pattern in ("write", "triad") else ()

        launch = partial(
            triton_kernel,
            *operands,
            *scalar,
            element_count,
            problem.warm,
            BLOCK=block_elements,
            num_warps=_WARPS_PER_PROGRAM,
        )
        launch()  # Triton compiles the kernel during the first launch.
        return launch, output, float(problem.warm)
