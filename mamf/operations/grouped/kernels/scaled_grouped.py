"""torch.nn.functional.scaled_grouped_mm: the products of all experts in fp8 with a scale a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.kernel import Verdict
from mamf.operations.grouped.kernel import GroupedKernel
from mamf.operations.grouped.kernels.torch_grouped import ends_of, sampled_experts
from mamf.operations.grouped.shapes import GroupedProblem, GroupedShape
from mamf.operations.products import OperandSet, multiplied, on_host, relative_error, select, smaller
from mamf.operations.quantization import Quantized
from mamf.operations.scaled_products import ScaledProducts, quantized_operand, rows_of
from mamf.operations.variation import Signs
from mamf.operations.whole_products import Part, whole_verdict


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
    """One operand set: quantized, its launch, and what its C must be: the product of the dequantized."""

    def __init__(
        self,
        kernel: FunctionalScaledGroupedMm,
        backend: Backend,
        problem: GroupedProblem,
        shape: GroupedShape,
        flat: Mapping[str, torch.Tensor],
    ) -> None:
        self._a, self._b = a, b = tuple(quantized_operand(backend, problem, shape, name, flat) for name in ("a", "b"))
        self.c = flat["c"].view(shape.tokens, shape.n)
        self._problem, self._tokens, self._n = problem, problem.tokens_of_experts(shape), shape.n
        self._begins = [0, *accumulate(self._tokens)]
        self.launch = kernel.bind(problem, shape, a, b, ends_of(self._tokens, self.c.device))
        self.signs = Signs(smaller(a.elements, b.elements))
        places, (values, weights) = self._places(), (rows_of(shape, name, flat) for name in ("a", "b"))
        exact = (multiplied(on_host(values, 0, rows), on_host(weights, 0, of).t()) for rows, _, of in places)
        self._details = {"quantization_error": relative_error(self._expected(places), joined(exact))}

    def _places(self) -> list[_Place]:
        """Rows of C, its columns and the rows of B that they are of, of some experts."""
        samples = sampled_experts(self._tokens, self.c).items()
        return [(self._begins[e] + each.rows, each.columns, e * self._n + each.columns) for e, each in samples]

    def _expected(self, places: Iterable[_Place]) -> torch.Tensor:
        return joined(multiplied(self._a.on_host(rows), self._b.on_host(of).t()) for rows, _, of in places)

    def verify(self, output: torch.Tensor) -> Verdict:
        """||C - A @ B|| / ||A @ B|| in float64, A and B dequantized; the error of quantizing them stands apart."""
        places = self._places()
        found = joined(on_host(select(output, 0, rows), 1, columns) for rows, columns, _ in places)
        return Verdict(relative_error(found, self._expected(places)), self._problem.tolerance, self._details)

    def verify_whole(self, output: torch.Tensor) -> Verdict:
        parts, n = [], self._n
        for expert, (start, stop) in enumerate(pairwise(self._begins)):
            if start < stop:
                weights = self._b.part(expert * n, (expert + 1) * n)
                parts.append(Part(self._a.part(start, stop), weights, output[None, start:stop]))
        return whole_verdict(self._problem, parts)


_Place = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def joined(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])
