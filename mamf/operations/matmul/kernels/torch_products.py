"""torch's own products: torch.mm and torch.compile; operands as views of the pool's buffers, verified on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.operations.compilation import compile_for_shape
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.operand_sets import OperandSet, view_as
from mamf.operations.products import TorchProducts, lay_out, product_set, smaller_operand
from mamf.operations.whole_products import Part


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

    def operand_set(
        self, backend: Backend, problem: MatmulProblem, shape: MatmulShape, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        a = lay_out(flat["a"], shape.m, shape.k, problem.layout[0], padding=problem.padding)
        b = lay_out(flat["b"], shape.k, shape.n, problem.layout[1], padding=problem.padding)
        c = view_as(flat["c"], shape.m, shape.n)
        launch, scale = self.bind(problem, a, b, c)
        return product_set(
            problem,
            launch,
            c,
            lambda output: [Part(a[None], b.mT[None], output[None])],
            smaller_operand(a, b.mT),
            scale,
            self.details(problem),
        )


class TorchMm(TorchMatmul):
    name = "torch.mm"
    is_default = True
    has_padding = True
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch.mm(a, b, out=c), 1.0


class Compiled(TorchMm):
    """Compiles for each shape, which takes seconds to minutes, so a search tries it only on request."""

    is_default = False
    name = "compiled"
    is_tried_unasked = False

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # The product is returned and not written to C: Inductor would compute it and then copy.
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.mm(left, right)

        product = compile_for_shape(multiply, mode="max-autotune-no-cudagraphs")
        return lambda: product(a, b), 1.0
