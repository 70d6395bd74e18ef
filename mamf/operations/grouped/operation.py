"""The operation ``grouped``: grouped products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mamf.backend import Backend, DeviceInfo
from mamf.measurement import Measurement
from mamf.operations.grouped.kernel import GroupedKernel
from mamf.operations.grouped.presets import PRESETS
from mamf.operations.grouped.shapes import GroupedProblem, GroupedShape
from mamf.operations.matmul.operation import ProductOperation


class Grouped(ProductOperation[GroupedProblem, GroupedShape]):
    name = "grouped"
    kernel_group = "mamf.grouped_kernels"
    kernel_type = GroupedKernel
    shape_type = GroupedShape
    problem_type = GroupedProblem
    shape_example = "e8t16384n14336k4096"
    axis_label = "FLOP"

    def default_shapes(self, backend: Backend) -> Sequence[GroupedShape]:
        """Few large experts (Mixtral 8x7B), more (DeepSeek-V2-Lite) and many small ones (Qwen3-30B-A3B)."""
        return [
            GroupedShape(8, 16384, 14336, 4096),
            GroupedShape(64, 16384, 1408, 2048),
            GroupedShape(128, 32768, 768, 2048),
        ]

    def presets(self) -> Mapping[str, Mapping[GroupedShape, str]]:
        return PRESETS

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """The columns of all products, and the most tokens of an expert."""
        return {**super().columns(row, info), "most tokens": max(row.problem.tokens_of_experts(row.shape))}
