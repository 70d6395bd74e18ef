"""torch.bmm and torch.matmul over a batch."""

from __future__ import annotations

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
    relative_error,
    sampled_indices,
    smaller,
)
from mamf.operations.variation import Signs
from mamf.operations.whole_products import Part, whole_verdict

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
    """One operand set: its launch, and what its C must be."""

    def __init__(
        self, kernel: TorchBatched, problem: BatchedProblem, shape: BatchedShape, flat: Mapping[str, torch.Tensor]
    ) -> None:
        a = laid_out(flat["a"], shape.m, shape.k, problem.layout[0], shape.batch)
        b = laid_out(flat["b"], shape.k, shape.n, problem.layout[1], shape.batch)
        self.c = flat["c"].view(shape.batch, shape.m, shape.n)
        self.launch = kernel.bind(a, b, self.c)
        self._a, self._b, self._problem = a, b, problem
        self.signs = Signs(smaller(a, b.mT))

    def verify(self, output: torch.Tensor) -> Verdict:
        """||C - A @ B|| / ||A @ B|| in float64 over sampled entries of sampled products."""
        samples = {i: Sample(output[i]) for i in sampled_indices(len(output), _SAMPLED_PRODUCTS).tolist()}
        found = torch.cat([each.of(output[i]).flatten() for i, each in samples.items()])
        expected = torch.cat([each.product(self._a[i], self._b[i]).flatten() for i, each in samples.items()])
        return Verdict(relative_error(found, expected), self._problem.tolerance)

    def verify_whole(self, output: torch.Tensor) -> Verdict:
        return whole_verdict(self._problem, [Part(self._a, self._b.mT, output)])
