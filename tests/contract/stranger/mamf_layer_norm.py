"""Add the operation layer_norm to mamf, as a third party would: with this module and two entry points."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import layer_norm

from mamf.backend import Backend
from mamf.errors import UsageError
from mamf.kernel import Buffer, Verdict, Work, round_up_to_alignment
from mamf.operation import Operation
from mamf.operations.operand_sets import OperandSet, TorchKernel, view_as

_TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Rows:
    rows: int
    width: int

    @classmethod
    def parse(cls, text: str) -> Rows:
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.ASCII)
        if match is None:
            raise UsageError(f"{text!r} is not a shape; write ROWSxWIDTH, such as 4096x8192")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}"


@dataclass(frozen=True)
class LayerNormProblem:
    operation: ClassVar[str] = "layer_norm"

    dtype: str = "bfloat16"
    eps: float = 1e-5
    data: str = "normal"
    seed: int = 0

    def compute_work(self, shape: Rows) -> Work:
        return Work(8 * shape.rows * shape.width, self.count_bytes(shape), "X read, Y written, once each", "TB/s")

    def list_buffers(self, shape: Rows, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        return {"x": Buffer(round_up_to_alignment(shape.rows * shape.width) * sets, self.dtype)}

    def count_bytes(self, shape: Rows, sets: int = 1, rewrite: bool = False) -> int:
        return 2 * self.list_buffers(shape, sets)["x"].nbytes


class TorchLayerNorm(TorchKernel[LayerNormProblem, Rows]):
    name = "torch"
    operation = "layer_norm"

    def explain_unsupported_problem(self, backend: Backend, problem: LayerNormProblem) -> str | None:
        return None if problem.dtype in _TOLERANCES else f"it takes {', '.join(_TOLERANCES)}"

    def make_operand_set(
        self, backend: Backend, problem: LayerNormProblem, shape: Rows, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        normalize = functools.partial(layer_norm, normalized_shape=[shape.width], eps=problem.eps)
        x = view_as(buffers["x"], shape.rows, shape.width)

        def verify(result: torch.Tensor) -> Verdict:
            reference = normalize(x[:16].cpu().double())
            error = (result[:16].cpu().double() - reference).norm() / reference.norm()
            return Verdict(float(error), _TOLERANCES[problem.dtype])

        return OperandSet(functools.partial(normalize, x), verify)


class LayerNorm(Operation[LayerNormProblem, Rows]):
    name = "layer_norm"
    kernel_group = "mamf_layer_norm.kernels"
    kernel_type = TorchLayerNorm
    shape_type = Rows
    problem_type = LayerNormProblem
    shape_example = "4096x8192"
    axis_label = "width"

    def choose_default_shapes(self, backend: Backend) -> Sequence[Rows]:
        return [Rows(4096, width) for width in (1024, 4096, 16384)]

    def find_axis_position(self, shape: Rows) -> float:
        return float(shape.width)
