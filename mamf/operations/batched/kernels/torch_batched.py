"""torch.bmm and torch.matmul over a batch."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch

from mamf.kernel import Verdict
from mamf.operations.batched.kernel import BatchedKernel
from mamf.operations.batched.shapes import BatchedProblem, BatchedShape
from mamf.operations.products import (
    OperandSet,
    Sample,
    TorchProducts,
    laid_out,
    output_of,
    relative_error,
    sampled_indices,
)

# Products of the batch that are compared, the first and the last among them.
_SAMPLED_PRODUCTS = 4


class TorchBatched(TorchProducts[BatchedProblem, BatchedShape], BatchedKernel):
    """A batch by one torch function. Derived kernels say how they launch."""

    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    @abstractmethod
    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
        """The launch over A (B,M,K), B (B,K,N) and C (B,M,N)."""

    def operand_set(self, problem: BatchedProblem, shape: BatchedShape, flat: Mapping[str, torch.Tensor]) -> OperandSet:
        return PreparedBatch(self, problem, shape, flat)


class Bmm(TorchBatched):
    name = "torch.bmm"
    is_default = True

    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.bmm(a, b, out=c)


class BatchedMatmul(TorchBatched):
    """torch.matmul, which reshapes and dispatches before it gets to the same library."""

    name = "torch.matmul"

    def bind(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.matmul(a, b, out=c)


class PreparedBatch:
    """One operand set: its launch, and sampled entries of some of its products, computed before the first launch."""

    def __init__(
        self, kernel: TorchBatched, problem: BatchedProblem, shape: BatchedShape, flat: Mapping[str, torch.Tensor]
    ) -> None:
        a = laid_out(flat["a"], shape.m, shape.k, problem.layout[0], shape.batch)
        b = laid_out(flat["b"], shape.k, shape.n, problem.layout[1], shape.batch)
        self.c = flat["c"].view(shape.batch, shape.m, shape.n)
        self.launch = kernel.bind(a, b, self.c)
        self._tolerance = problem.tolerance
        chooser = random.Random(problem.seed)
        chosen = sampled_indices(shape.batch, _SAMPLED_PRODUCTS, chooser).tolist()
        self._samples = {index: Sample(shape.m, shape.n, chooser, a.device) for index in chosen}
        self._expected = torch.cat([each.product(a[i], b[i]).flatten() for i, each in self._samples.items()])

    def verify(self, result: object) -> Verdict:
        """||C - A @ B|| / ||A @ B|| in float64 over sampled entries of sampled products."""
        output = output_of(result, self.c)
        found = torch.cat([each.of(output[index]).flatten() for index, each in self._samples.items()])
        return Verdict(relative_error(found, self._expected), self._tolerance)
