"""Define the operation ``grouped``, the matmuls of a mixture of experts: its shapes, problems and base kernel."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from mamf.backend import Backend, DeviceInfo
from mamf.errors import parse_size
from mamf.kernel import Kernel, Work
from mamf.measurement import Measurement
from mamf.operation import Preset, describe
from mamf.operations.matmul.operation import BaseMatmulOperation
from mamf.operations.matmul.shapes import BaseMatmulProblem, BaseMatmulShape

Routing = Literal["balanced", "skewed"]
ROUTING_NAMES: tuple[str, ...] = get_args(Routing)


@dataclass(frozen=True, order=True)
class GroupedShape(BaseMatmulShape):
    """The shape of a grouped matmul C[T,N]: each row of A[T,K] is multiplied by the weights B[e] of its expert e.

    B is [E,K,N], for E experts. A shape is written ``e8t16384n14336k4096``. ``tokens``: T, the total number of rows of
    all experts. A token that goes to two experts counts twice.
    """

    text_pattern: ClassVar[re.Pattern[str]] = re.compile(r"e(\d+)t(\d+)n(\d+)k(\d+)", re.ASCII)
    text_description: ClassVar[str] = "the shape of a grouped matmul: write eEtTnNkK, for example e8t16384n14336k4096"

    experts: int = field(metadata=describe("number of experts", parse_text=parse_size))
    tokens: int = field(
        metadata=describe(
            "total rows of A for all experts; a token that goes to two experts counts twice", parse_text=parse_size
        )
    )
    n: int = field(metadata=describe("columns of C", parse_text=parse_size))
    k: int = field(
        metadata=describe(
            "size of the reduction: columns of A and rows of each expert's weights", parse_text=parse_size
        )
    )

    def __str__(self) -> str:
        return f"e{self.experts}t{self.tokens}n{self.n}k{self.k}"

    @property
    def row_counts(self) -> dict[str, int]:
        return {"a": self.tokens, "b": self.experts * self.n}


@dataclass(frozen=True)
class GroupedProblem(BaseMatmulProblem):
    """All parameters of a grouped matmul except its shape: the fields of BaseMatmulProblem, and ``routing``.

    ``routing``: how tokens are distributed over experts. ``balanced`` distributes tokens as evenly as possible.
    ``skewed`` follows Zipf's law: the expert of rank r gets a share of tokens proportional to 1/r, and the seed decides
    which expert has which rank.
    """

    operation: ClassVar[str] = "grouped"
    work_convention: ClassVar[str] = "2*T*N*K; tokens and weights of experts with tokens read, C written, once each"

    routing: Routing = field(
        default="balanced",
        metadata=describe(
            "how tokens are distributed over experts: balanced as equally as possible, or skewed by Zipf's law"
        ),
    )

    def count_tokens_by_expert(self, shape: GroupedShape) -> tuple[int, ...]:
        """Return the number of tokens of each expert, ``shape.tokens`` in total."""
        ranks = list(range(shape.experts))
        random.Random(self.seed).shuffle(ranks)
        return split_total_proportionally(
            shape.tokens, [1.0 if self.routing == "balanced" else 1 / (1 + rank) for rank in ranks]
        )

    def compute_work(self, shape: GroupedShape) -> Work:  # type: ignore[override]
        """Return the FLOP and bytes of one launch. Do not count the weights of experts that have no tokens."""
        busy_experts = sum(tokens > 0 for tokens in self.count_tokens_by_expert(shape))
        unread_bytes = super().count_operand_bytes(shape, "b") // shape.experts * (shape.experts - busy_experts)
        work_of_all_experts = super().compute_work(shape)
        return replace(work_of_all_experts, nbytes=work_of_all_experts.nbytes - unread_bytes)


def split_total_proportionally(total: int, weights: list[float]) -> tuple[int, ...]:
    """Split ``total`` into whole numbers proportional to ``weights``, rounded by the largest remainder method."""
    exact_parts = [total * weight / sum(weights) for weight in weights]
    parts = [int(each) for each in exact_parts]
    indices_by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - exact_parts[index])
    for index in indices_by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


#: The part of each model's mixture-of-experts layer that is on one device: the number of experts, the experts per
#: token, the hidden size (elements per token), and the intermediate size (elements per token inside an expert).
EXPERT_LAYER_SIZES = {
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "deepseek-v3, 32 of 256": (32, 8, 7168, 2048),
}


def _make_expert_preset(tokens: int) -> Preset[GroupedShape]:
    """Return the shapes of the two grouped matmuls of each layer in EXPERT_LAYER_SIZES, with labels.

    One matmul computes the gate and up projections, the other the down projection. ``tokens``: the number of tokens on
    one device.
    """
    label_by_shape: dict[GroupedShape, str] = {}
    for name, (experts, experts_per_token, hidden_size, intermediate_size) in EXPERT_LAYER_SIZES.items():
        rows = tokens * experts_per_token
        label_by_shape[GroupedShape(experts, rows, 2 * intermediate_size, hidden_size)] = f"{name} gate+up"
        label_by_shape[GroupedShape(experts, rows, hidden_size, intermediate_size)] = f"{name} down"
    return Preset(label_by_shape)


EXPERT_PRESETS: Mapping[str, Preset[GroupedShape]] = {
    "moe": _make_expert_preset(tokens=8192),
    "moe-decode": _make_expert_preset(tokens=64),
}


class GroupedKernel(Kernel[GroupedProblem, GroupedShape]):
    """The base class of kernels for grouped matmul."""

    operation = "grouped"


class GroupedOperation(BaseMatmulOperation[GroupedProblem, GroupedShape]):
    name = "grouped"
    kernel_group = "mamf.grouped_kernels"
    kernel_type = GroupedKernel
    shape_type = GroupedShape
    problem_type = GroupedProblem
    shape_example = "e8t16384n14336k4096"
    matmul_counts_for_random_problems = (1, 2, 4, 8, 32)

    def draw_random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        return {**super().draw_random_case(chooser, terms), "routing": chooser.choice(ROUTING_NAMES)}

    def choose_default_shapes(self, backend: Backend) -> Sequence[GroupedShape]:
        """Return shapes with 8 large experts (Mixtral 8x7B), 64 experts (DeepSeek-V2-Lite) and 128 (Qwen3-30B-A3B)."""
        return [
            GroupedShape(8, 16384, 14336, 4096),
            GroupedShape(64, 16384, 1408, 2048),
            GroupedShape(128, 32768, 768, 2048),
        ]

    def list_presets(self) -> Mapping[str, Preset[GroupedShape]]:
        return EXPERT_PRESETS

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return the columns that reports have for every matmul, and the number of tokens of the busiest expert."""
        return {**super().make_columns(row, info), "most tokens": max(row.problem.count_tokens_by_expert(row.shape))}
