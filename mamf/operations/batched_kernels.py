"""Run batched matmul with torch.bmm and with torch.matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from mamf.backend import Backend
from mamf.operations.batched import BatchedKernel, BatchedProblem, BatchedShape
from mamf.operations.freivalds import MatmulPart
from mamf.operations.matmul_operands import (
    BaseTorchMatmul,
    choose_operand_to_change,
    make_matmul_operand_set,
    view_in_layout,
)
from mamf.operations.operand_sets import OperandSet, view_as


class Bmm(BaseTorchMatmul[BatchedProblem, BatchedShape], BatchedKernel):
    """The kernel torch.bmm. Derived classes set ``function`` to the name of another torch function to call."""

    name = "torch.bmm"
    torch_name = "bmm"
    is_default = True
    supports_padding = True
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def bind_operands(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Callable[[], object]:
        return partial(getattr(torch, self.torch_name), a, b, out=c)

    def make_operand_set(
        self, backend: Backend, problem: BatchedProblem, shape: BatchedShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        a = view_in_layout(
            buffers["a"], shape.m, shape.k, problem.layout[0], shape.batch, padding=problem.padding_element_count
        )
        b = view_in_layout(
            buffers["b"], shape.k, shape.n, problem.layout[1], shape.batch, padding=problem.padding_element_count
        )
        c = view_as(buffers["c"], shape.batch, shape.m, shape.n)
        return make_matmul_operand_set(
            problem,
            self.bind_operands(a, b, c),
            c,
            lambda output: [MatmulPart(a, b.mT, output)],
            choose_operand_to_change(a, b.mT),
        )


class BatchedMatmul(Bmm):
    """The kernel torch.matmul, which reshapes its operands and then calls the same library function as torch.bmm."""

    name = "torch.matmul"
    torch_name = "matmul"
    is_default = False
