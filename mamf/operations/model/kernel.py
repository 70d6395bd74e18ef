"""The contract of a model kernel: one way to run a training step."""

from __future__ import annotations

from typing import ClassVar

from mamf.backend import Backend
from mamf.kernel import Kernel
from mamf.operations.model.shapes import ModelProblem, ModelShape


class ModelKernel(Kernel[ModelProblem, ModelShape]):
    """One way to run a training step. ``dtypes``: those that it supports; not float16, whose gradients need scaling."""

    operation = "model"
    reports_memory = True
    reports_reserved = True
    must_fit_a_train = True
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float32")

    def unsupported(self, backend: Backend, problem: ModelProblem) -> str | None:
        if problem.autocast and problem.dtype == problem.parameter_dtype:
            return f"parameters are {problem.dtype} already: leave autocast out"
        return self._unsupported_dtype(problem) or backend.unsupported_dtype(problem.dtype)

    def unsupported_shape(self, problem: ModelProblem, shape: ModelShape) -> str | None:
        return problem.unsupported_shape(shape)
