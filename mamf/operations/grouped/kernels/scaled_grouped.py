"""torch.nn.functional.scaled_grouped_mm: the products of all experts in fp8 with one scale per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from mamf.backend import Backend
from mamf.operations.grouped.kernel import GroupedKernel
from mamf.operations.grouped.kernels.torch_grouped import ends_of
from mamf.operations.grouped.shapes import GroupedProblem, GroupedShape
from mamf.operations.operand_sets import OperandSet, view_as
from mamf.operations.products import product_set, smaller_operand
from mamf.operations.quantization import Quantized
from mamf.operations.scaled_products import ScaledProducts, quantized_operand, rows_of
from mamf.operations.whole_products import Part


class FunctionalScaledGroupedMm(ScaledProducts[GroupedProblem, GroupedShape], GroupedKernel):
    """One launch for all experts, with tokens by rows and weights stored as in a linear layer."""

    name = "F.scaled_grouped_mm"
    function = "scaled_grouped_mm"
    dtypes = ("fp8_rowwise",)
    out_dtypes = ("bfloat16",)

    def bind(
        self, problem: GroupedProblem, shape: GroupedShape, a: Quantized, b: Quantized, ends: torch.Tensor
    ) -> Callable[[], object]:
        """The launch over A (T,K) and B (E*N,K), given where the rows of each expert end."""
        functional: Any = torch.nn.functional
        weights = b.elements.view(shape.experts, shape.n, shape.k).transpose(-2, -1)
        scale_a, scale_b = a.scales.view(-1), b.scales.view(shape.experts, shape.n)
        recipe, fast = functional.ScalingType.RowWise, problem.fast_accumulation
        return lambda: functional.scaled_grouped_mm(
            a.elements, weights, scale_a, recipe, scale_b, recipe, offs=ends, use_fast_accum=fast
        )

    def operand_set(
        self, backend: Backend, problem: GroupedProblem, shape: GroupedShape, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        a, b = (quantized_operand(backend, problem, shape, name, flat) for name in ("a", "b"))
        values, weights = (rows_of(shape, name, flat) for name in ("a", "b"))
        c, tokens, n = view_as(flat["c"], shape.tokens, shape.n), problem.tokens_of_experts(shape), shape.n
        ranges = [(expert, *each) for expert, each in enumerate(pairwise([0, *accumulate(tokens)]))]
        busy = [(start, stop, expert * n, (expert + 1) * n) for expert, start, stop in ranges if start < stop]

        def parts(output: torch.Tensor) -> list[Part]:
            return [Part(a.part(m, to), b.part(of, until), output[None, m:to]) for m, to, of, until in busy]

        def exact(output: torch.Tensor) -> list[Part]:
            return [Part(values[None, m:to], weights[None, of:until], output[None, m:to]) for m, to, of, until in busy]

        launch = self.bind(problem, shape, a, b, ends_of(tokens, c.device))
        return product_set(problem, launch, c, parts, smaller_operand(a.elements, b.elements), exact=exact)
