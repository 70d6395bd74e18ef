"""torch.nn.functional.scaled_grouped_mm: the products of all experts in fp8 with a scale a row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.kernel import Verdict
from mamf.operations.grouped.kernel import GroupedKernel
from mamf.operations.grouped.kernels.torch_grouped import ends_of, sampled_experts
from mamf.operations.grouped.shapes import GroupedProblem, GroupedShape
from mamf.operations.products import OperandSet, multiplied, on_host, output_of, relative_error, select
from mamf.operations.quantization import Quantized
from mamf.operations.scaled_products import ScaledProducts, quantized_operand, rows_of


class FunctionalScaledGroupedMm(ScaledProducts[GroupedProblem, GroupedShape], GroupedKernel):
    """One launch for all experts, of tokens by rows and weights as a linear layer stores them."""

    name = "F.scaled_grouped_mm"
    dtypes = ("fp8_rowwise",)
    out_dtypes = ("bfloat16",)

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if not hasattr(torch.nn.functional, "scaled_grouped_mm"):
            return Unavailable(f"torch {torch.__version__} has no scaled_grouped_mm", "pip install 'torch>=2.10'")
        return super().unavailable(backend)

    def bind(
        self, problem: GroupedProblem, shape: GroupedShape, a: Quantized, b: Quantized, ends: torch.Tensor
    ) -> Callable[[], object]:
        """The launch over A (T,K) and B (E*N,K); where the rows of each expert end."""
        functional: Any = torch.nn.functional
        weights = b.elements.view(shape.experts, shape.n, shape.k).transpose(-2, -1)
        scale_a, scale_b = a.scales.view(-1), b.scales.view(shape.experts, shape.n)
        recipe, fast = functional.ScalingType.RowWise, problem.fast_accumulation

        def launch() -> object:
            return functional.scaled_grouped_mm(
                a.elements, weights, scale_a, recipe, scale_b, recipe, offs=ends, use_fast_accum=fast
            )

        return launch

    def operand_set(
        self, backend: Backend, problem: GroupedProblem, shape: GroupedShape, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        return PreparedScaledGroups(self, backend, problem, shape, flat)


class PreparedScaledGroups:
    """One operand set: quantized, its launch, and sampled entries of some experts' products of the dequantized."""

    def __init__(
        self,
        kernel: FunctionalScaledGroupedMm,
        backend: Backend,
        problem: GroupedProblem,
        shape: GroupedShape,
        flat: Mapping[str, torch.Tensor],
    ) -> None:
        a, b = (quantized_operand(backend, problem, shape, name, flat) for name in ("a", "b"))
        self.c = flat["c"].view(shape.tokens, shape.n)
        tokens = problem.tokens_of_experts(shape)
        self.launch = kernel.bind(problem, shape, a, b, ends_of(tokens, self.c.device))
        self._tolerance = problem.tolerance
        begins = [0, *accumulate(tokens)]
        samples = sampled_experts(tokens, shape.n, random.Random(problem.seed), self.c.device)
        #: Rows of C, its columns and the rows of B that they are of, by expert.
        self._places = [
            (begins[e] + each.rows, each.columns, e * shape.n + each.columns) for e, each in samples.items()
        ]
        self._expected = joined(multiplied(a.on_host(rows), b.on_host(of).t()) for rows, _, of in self._places)
        values, weights = rows_of(shape, "a", flat), rows_of(shape, "b", flat)
        unquantized = joined(
            multiplied(on_host(values, 0, rows), on_host(weights, 0, of).t()) for rows, _, of in self._places
        )
        self._details = {"quantization_error": relative_error(self._expected, unquantized)}

    def verify(self, result: object) -> Verdict:
        """||C - A @ B|| / ||A @ B|| in float64, A and B dequantized; the error of quantizing them stands apart."""
        output = output_of(result, self.c)
        found = joined(on_host(select(output, 0, rows), 1, columns) for rows, columns, _ in self._places)
        return Verdict(relative_error(found, self._expected), self._tolerance, self._details)


def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])
