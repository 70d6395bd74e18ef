"""What kernels over torch's tensors share: arrays as views of the pool's buffers, and verification of every element.

All elements are compared on the device, since an array fills much of its memory, and sampled ones again on the host in
float64, so that a device is never its only judge.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError
from mamf.kernel import Prepared, Verdict, aligned
from mamf.operations.bandwidth.kernel import BandwidthKernel
from mamf.operations.bandwidth.shapes import READS, BandwidthProblem, BandwidthShape
from mamf.operations.outputs import Unchanged, as_words, poison_outputs, sampled_indices, without_torch

#: What is written, and what a triad multiplies by: exact in every dtype, so a triad rounds twice at most.
SCALAR = 3.0
# Elements compared at once: what that takes beside the arrays is a few times 64 MiB.
_CHUNK = 2**24
_SAMPLED = 256
# Operands below this are held to an absolute error: float16 has no smaller steps to be relative in.
_SMALLEST = 1e-3
# Standard deviations within which a sum surely is.
_SURELY = 6


class TorchArrays(BandwidthKernel):
    """A kernel over torch's tensors. Derived kernels say how they launch."""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return without_torch(backend)

    def sums(self, backend: Backend, problem: BandwidthProblem) -> tuple[int, str]:
        """Elements and dtype of what a read writes: sums of parts of the array."""
        return 1, "float32"

    @abstractmethod
    def bind(
        self, backend: Backend, problem: BandwidthProblem, arrays: Mapping[str, torch.Tensor], sums: torch.Tensor
    ) -> tuple[Callable[[], None], float]:
        """The launch, all passes of it, and how many times over its sums hold the array's."""

    def prepare(
        self,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        buffers = problem.buffers(shape, sets)
        whole = {name: pool.take(name, *buffer, fill=name != "a") for name, buffer in buffers.items()}
        count, dtype = self.sums(backend, problem)
        sums = pool.take("sums", aligned(count) * sets, dtype, fill=False)
        passes = [
            PreparedPass(self, backend, problem, shape, whole, sums[aligned(count) * index :][:count], index)
            for index in range(problem.sets(shape, sets))
        ]

        def poison(returned: Sequence[object]) -> None:
            for each, result in zip(passes, returned, strict=True):
                poison_outputs([each.output], result)

        return Prepared(
            launches=[each.launch for each in passes],
            verify=lambda index, result: passes[index].verify(),
            poison=poison,
            changed_operands=Unchanged({name: whole[name] for name in READS[problem.pattern]}),
            rewrite_output=passes[0].output.zero_ if rewrite else None,
        )


class PreparedPass:
    """One operand set: its launch, and what it must leave in its output, from operands as they were before."""

    def __init__(
        self,
        kernel: TorchArrays,
        backend: Backend,
        problem: BandwidthProblem,
        shape: BandwidthShape,
        whole: Mapping[str, torch.Tensor],
        sums: torch.Tensor,
        index: int,
    ) -> None:
        count = problem.elements(shape)
        arrays = {name: tensor[aligned(count) * index :][:count] for name, tensor in whole.items()}
        self._pattern = problem.pattern
        self._operands = [arrays[name] for name in READS[problem.pattern]]
        self.output = arrays.get("a", sums)
        self.launch, self._times = kernel.bind(backend, problem, arrays, sums)
        if self._pattern == "read":
            self._tolerance = 2 * DTYPES[str(sums.dtype).removeprefix("torch.")].tolerance
            device = torch.device("cpu") if backend.unsupported_dtype("float64") else sums.device
            self._sum, self._norm = sum_and_norm(self._operands[0], device)
            require_range(self._times * self._norm, sums.dtype)
        else:
            # Each element is held to it, and is rounded twice.
            self._tolerance = 2 * DTYPES[problem.dtype].tolerance if self._pattern == "triad" else 0.0
            self._sampled = sampled_indices(count, _SAMPLED, random.Random(problem.seed)).to(self.output.device)
            self._sampled_operands = [on_host(operand, self._sampled) for operand in self._operands]

    def verify(self) -> Verdict:
        return Verdict(self._sum_error() if self._pattern == "read" else self._worst_error(), self._tolerance)

    def _sum_error(self) -> float:
        """How far the sum is off, as a share of the array's norm: any element left out shows in a float32's."""
        difference = abs(self.output.cpu().to(torch.float64).sum().item() - self._times * self._sum)
        return difference / (self._times * self._norm) if self._norm else difference and math.inf

    def _worst_error(self) -> float:
        chunks = zip(*(tensor.split(_CHUNK) for tensor in (self.output, *self._operands)), strict=True)
        wide = torch.float64 if self.output.dtype == torch.float64 else torch.float32
        worst = torch.stack([error_of(self._pattern, a, operands, wide) for a, *operands in chunks]).max().item()
        on_sampled = error_of(
            self._pattern, on_host(self.output, self._sampled), self._sampled_operands, torch.float64
        ).item()
        return worst if math.isnan(worst) else max(worst, on_sampled)


def error_of(pattern: str, a: torch.Tensor, operands: Sequence[torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    """Share of elements that are wrong by a bit (copy, write); the largest relative error of one (triad)."""
    if pattern == "copy":
        return (as_words(a) != as_words(operands[0])).to(torch.float32).mean()
    if pattern == "write":
        return (a != SCALAR).to(torch.float32).mean()
    b, c = (operand.to(wide) for operand in operands)
    scale = (b.abs() + SCALAR * c.abs()).clamp_min(_SMALLEST)
    return ((a.to(wide) - (b + SCALAR * c)).abs() / scale).max().to(torch.float32)


def sum_and_norm(array: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """In float64, on a device that has it."""
    total = squares = 0.0
    for chunk in array.split(_CHUNK):
        wide = chunk.to(device).to(torch.float64)
        total += wide.sum().item()
        squares += wide.square().sum().item()
    return total, math.sqrt(squares)


def require_range(norm: float, dtype: torch.dtype) -> None:
    """Raises UnsupportedError where a sum of elements of this norm may be more than its dtype holds."""
    if _SURELY * norm > torch.finfo(dtype).max:
        raise UnsupportedError(f"the sum of an array this long may be more than {dtype} holds".replace("torch.", ""))


def on_host(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, indices).cpu()
