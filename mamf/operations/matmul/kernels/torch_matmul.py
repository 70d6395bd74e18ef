"""What torch's matrix products share: operands as views of the pool's buffers, and verification on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.kernel import Verdict
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.products import OperandSet, Sample, TorchProducts, laid_out, relative_error, smaller
from mamf.operations.variation import Signs
from mamf.operations.whole_products import Part, whole_verdict


class TorchMatmul(TorchProducts[MatmulProblem, MatmulShape], MatmulKernel):
    """A product by one torch function. Derived kernels say which dtypes they take and how they launch."""

    #: The function of torch that it calls, where a release may lack it.
    function: ClassVar[str] = ""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if self.function and not hasattr(torch, self.function):
            return Unavailable(f"this torch has no torch.{self.function}", "pip install --upgrade torch")
        return super().unavailable(backend)

    @abstractmethod
    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        """The launch over these operands, and the factor by which C differs from A @ B."""

    def details(self, problem: MatmulProblem) -> Mapping[str, str]:
        """What a reader of its rows should know of how it computes."""
        return {}

    def operand_set(self, problem: MatmulProblem, shape: MatmulShape, flat: Mapping[str, torch.Tensor]) -> OperandSet:
        return PreparedProduct(self, problem, shape, flat)


class PreparedProduct:
    """One operand set: its launch, and what its C must be."""

    def __init__(
        self, kernel: TorchMatmul, problem: MatmulProblem, shape: MatmulShape, flat: Mapping[str, torch.Tensor]
    ) -> None:
        a = laid_out(flat["a"], shape.m, shape.k, problem.layout[0])
        b = laid_out(flat["b"], shape.k, shape.n, problem.layout[1])
        self.c = flat["c"].view(shape.m, shape.n)
        self.launch, self._scale = kernel.bind(problem, a, b, self.c)
        self._a, self._b, self._problem, self._details = a, b, problem, kernel.details(problem)
        self.signs = Signs(smaller(a, b.mT))

    def verify(self, output: torch.Tensor) -> Verdict:
        """||C - scale * A @ B|| / ||scale * A @ B|| in float64 over sampled rows and columns, the edges among them."""
        sample = Sample(output)
        expected = self._scale * sample.product(self._a, self._b)
        return Verdict(relative_error(sample.of(output), expected), self._problem.tolerance, self._details)

    def verify_whole(self, output: torch.Tensor) -> Verdict:
        return whole_verdict(self._problem, [Part(self._a[None], self._b.mT[None], output[None])], self._scale)
