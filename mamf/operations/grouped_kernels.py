"""Run grouped matmul with torch: with its grouped_mm kernels, and with a loop of matmuls over experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from mamf.backend import Backend, Unavailability
from mamf.operations.freivalds import MatmulOperand, MatmulPart, slice_rows
from mamf.operations.grouped import GroupedKernel, GroupedProblem, GroupedShape
from mamf.operations.matmul_operands import (
    BaseScaledMatmul,
    BaseTorchMatmul,
    choose_operand_to_change,
    make_matmul_operand_set,
    make_scaled_operand_set,
    view_in_layout,
)
from mamf.operations.operand_sets import OperandSet, view_as
from mamf.operations.quantization import QuantizedOperand

#: Texts in the errors that grouped_mm raises if it does not support a shape, a layout or a device.
_UNSUPPORTED_ERROR_TEXTS = ("Expected mat_", "expected mat", "strides should be multiple of", "is only supported on")


class TorchGroupedMatmul(BaseTorchMatmul[GroupedProblem, GroupedShape], GroupedKernel):
    """The base class of torch kernels for grouped matmul. Derived classes define ``dtypes`` and ``bind_operands``."""

    @abstractmethod
    def bind_operands(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tokens_by_expert: Sequence[int]
    ) -> Callable[[], object]:
        """Return a function that launches the kernel on A (T,K), B (E,K,N) and C (T,N), for T tokens and E experts."""

    def make_operand_set(
        self, backend: Backend, problem: GroupedProblem, shape: GroupedShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        a = view_in_layout(buffers["a"], shape.tokens, shape.k, problem.layout[0])
        b = view_in_layout(buffers["b"], shape.k, shape.n, problem.layout[1], shape.experts)
        c, tokens_by_expert = view_as(buffers["c"], shape.tokens, shape.n), problem.count_tokens_by_expert(shape)

        def split_into_parts(output: torch.Tensor) -> list[MatmulPart]:
            groups = zip(a.split(list(tokens_by_expert)), b.mT, output.split(list(tokens_by_expert)), strict=True)
            return [
                MatmulPart(rows[None], weights[None], output_rows[None])
                for rows, weights, output_rows in groups
                if len(rows)
            ]

        return make_matmul_operand_set(
            problem,
            self.bind_operands(a, b, c, tokens_by_expert),
            c,
            split_into_parts,
            choose_operand_to_change(a, b.mT),
        )


class GroupedMm(TorchGroupedMatmul):
    """The kernel torch.nn.functional.grouped_mm, or torch._grouped_mm before torch 2.10: one launch for all experts."""

    name = "F.grouped_mm"
    is_default = True
    dtypes = ("bfloat16", "float16", "float32")

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if get_grouped_mm_function() is None:
            return Unavailability(f"torch {torch.__version__} has no grouped_mm", "pip install 'torch>=2.8'")
        return super().explain_unavailability(backend)

    def explain_unsupported_options(self, backend: Backend, problem: GroupedProblem) -> str | None:
        if problem.layout[0] == "t":
            return f"kernel {self.name} needs tokens stored row by row: use --layout nt or nn, not {problem.layout}"
        return super().explain_unsupported_options(backend, problem)

    def is_refusal(self, error: Exception) -> bool:
        is_known = isinstance(error, (RuntimeError, ValueError)) and any(
            text in str(error) for text in _UNSUPPORTED_ERROR_TEXTS
        )
        return super().is_refusal(error) or is_known

    def bind_operands(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tokens_by_expert: Sequence[int]
    ) -> Callable[[], object]:
        return partial(get_grouped_mm_function(), a, b, offs=compute_row_ends(tokens_by_expert, a.device))


def compute_row_ends(tokens_by_expert: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the index after the last row of each expert, as an int32 tensor on the device."""
    return torch.tensor(tokens_by_expert, device=device).cumsum(0, dtype=torch.int32)


def get_grouped_mm_function() -> Any:
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class MatmulLoop(TorchGroupedMatmul):
    """A kernel that calls torch.mm for each expert that has tokens.

    This is the baseline: a grouped kernel is useful only if it is faster than this loop.
    """

    name = "loop"
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def bind_operands(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tokens_by_expert: Sequence[int]
    ) -> Callable[[], object]:
        groups = zip(a.split(list(tokens_by_expert)), b.unbind(), c.split(list(tokens_by_expert)), strict=True)
        matmuls = [group for group in groups if group[0].shape[0]]

        def launch() -> None:
            for rows, weights, output in matmuls:
                torch.mm(rows, weights, out=output)

        return launch


class FunctionalScaledGroupedMm(BaseScaledMatmul[GroupedProblem, GroupedShape], GroupedKernel):
    """The kernel torch.nn.functional.scaled_grouped_mm: one launch for all experts, with a scale per row.

    Weights are stored as in a linear layer, [experts, N, K].
    """

    name = "F.scaled_grouped_mm"
    torch_name = "scaled_grouped_mm"
    dtypes = ("fp8_rowwise",)
    out_dtypes = ("bfloat16",)

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime == "host":
            return Unavailability(
                f"torch has no {self.torch_name} for {backend.name}", "mamf sweep --operation grouped --kernel loop"
            )
        return super().explain_unavailability(backend)

    def bind_operands(
        self,
        problem: GroupedProblem,
        shape: GroupedShape,
        a: QuantizedOperand,
        b: QuantizedOperand,
        row_ends: torch.Tensor,
    ) -> Callable[[], object]:
        """Return a function that launches the kernel on A (T,K) and B (E*N,K), for T tokens and E experts.

        ``row_ends``: the result of ``compute_row_ends``.
        """
        functional: Any = torch.nn.functional
        weights = b.elements.view(shape.experts, shape.n, shape.k).transpose(-2, -1)
        scale_a, scale_b = a.scales.view(-1), b.scales.view(shape.experts, shape.n)
        recipe, is_fast = functional.ScalingType.RowWise, problem.fast_accumulation
        return lambda: functional.scaled_grouped_mm(
            a.elements, weights, scale_a, recipe, scale_b, recipe, offs=row_ends, use_fast_accum=is_fast
        )

    def make_operand_set(
        self, backend: Backend, problem: GroupedProblem, shape: GroupedShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        c, tokens_by_expert, n = (
            view_as(buffers["c"], shape.tokens, shape.n),
            problem.count_tokens_by_expert(shape),
            shape.n,
        )
        ranges = [(expert, *each) for expert, each in enumerate(pairwise([0, *accumulate(tokens_by_expert)]))]
        expert_ranges = [(start, stop, expert * n, (expert + 1) * n) for expert, start, stop in ranges if start < stop]

        def split_into_parts(a: MatmulOperand, b: MatmulOperand, output: torch.Tensor) -> list[MatmulPart]:
            return [
                MatmulPart(
                    slice_rows(a, token_start, token_stop),
                    slice_rows(b, weight_start, weight_stop),
                    output[None, token_start:token_stop],
                )
                for token_start, token_stop, weight_start, weight_stop in expert_ranges
            ]

        return make_scaled_operand_set(
            *(backend, problem, shape, buffers, c),
            bind_operands=lambda a, b: self.bind_operands(
                problem, shape, a, b, compute_row_ends(tokens_by_expert, c.device)
            ),
            split_into_parts=split_into_parts,
        )
