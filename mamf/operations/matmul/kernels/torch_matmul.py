"""What torch's matrix products share: operands as views of the pool's buffers, and verification on the host."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.kernel import Verdict
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.products import OperandSet, Sample, TorchProducts, laid_out, output_of, relative_error


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
    """One operand set: its launch, and the sampled entries that its C must have, computed before the first launch."""

    def __init__(
        self, kernel: TorchMatmul, problem: MatmulProblem, shape: MatmulShape, flat: Mapping[str, torch.Tensor]
    ) -> None:
        a = laid_out(flat["a"], shape.m, shape.k, problem.layout[0])
        b = laid_out(flat["b"], shape.k, shape.n, problem.layout[1])
        self.c = flat["c"].view(shape.m, shape.n)
        self.launch, scale = kernel.bind(problem, a, b, self.c)
        self._tolerance, self._details = problem.tolerance, kernel.details(problem)
        self._sample = Sample(shape.m, shape.n, random.Random(problem.seed), a.device)
        self._expected = scale * self._sample.product(a, b)

    def verify(self, result: object) -> Verdict:
        """||C - scale * A @ B|| / ||scale * A @ B|| in float64 over sampled rows and columns, the edges among them."""
        found = self._sample.of(output_of(result, self.c))
        return Verdict(relative_error(found, self._expected), self._tolerance, self._details)
