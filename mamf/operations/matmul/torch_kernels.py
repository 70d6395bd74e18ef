"""Multiply matrices with torch.mm (directly, under torch.compile, or with TunableOp) and with torch._int_mm.

``TorchMatmul`` is the base class of matmul kernels that call one function with tensors A, B and C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from mamf.backend import Backend, Unavailability
from mamf.operations.compilation import compile_with_static_shapes
from mamf.operations.freivalds import MatmulPart
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem, MatmulShape
from mamf.operations.matmul_operands import (
    BaseTorchMatmul,
    choose_operand_to_change,
    make_matmul_operand_set,
    view_in_layout,
)
from mamf.operations.operand_sets import OperandSet, view_as


class TorchMatmul(BaseTorchMatmul[MatmulProblem, MatmulShape], MatmulKernel):
    """A matmul kernel that calls one function with tensors. Derived classes define ``dtypes`` and ``bind_operands``."""

    @abstractmethod
    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        """Return a function that launches the kernel, and a factor. A launch computes C = factor * A @ B.

        A has the shape (M, K), B has (K, N), and C has (M, N). The function writes the result to C, or returns it in
        another tensor.
        """

    def make_details(self, problem: MatmulProblem, shape: MatmulShape) -> Mapping[str, str]:
        """Return details of the launch for reports, such as the kernel's configuration."""
        return {}

    def make_operand_set(
        self, backend: Backend, problem: MatmulProblem, shape: MatmulShape, buffers: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        a = view_in_layout(buffers["a"], shape.m, shape.k, problem.layout[0], padding=problem.padding_element_count)
        b = view_in_layout(buffers["b"], shape.k, shape.n, problem.layout[1], padding=problem.padding_element_count)
        c = view_as(buffers["c"], shape.m, shape.n)
        launch, scale = self.bind_operands(problem, a, b, c)
        return make_matmul_operand_set(
            problem,
            launch,
            c,
            lambda output: [MatmulPart(a[None], b.mT[None], output[None])],
            choose_operand_to_change(a, b.mT),
            scale,
            self.make_details(problem, shape),
        )


def describe_busy_units(program_count: int, unit_count: int | None) -> dict[str, str]:
    """Return a detail for reports if the launch has too few programs to use all compute units; {} otherwise.

    ``program_count``: the number of Triton programs of the launch. ``unit_count``: the number of compute units of the
    device, None if unknown.
    """
    if program_count < (unit_count or 0):
        return {"ran": f"{program_count} programs, so at most {program_count} of {unit_count} compute units are busy"}
    return {}


class TorchMm(TorchMatmul):
    name = "torch.mm"
    is_default = True
    supports_padding = True
    dtypes = ("bfloat16", "float16", "float32", "tf32", "float64")

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch.mm(a, b, out=c), 1.0


class CompiledTorchMm(TorchMm):
    """The kernel torch.mm under torch.compile.

    Each shape takes seconds to minutes to compile, so a search tries this kernel only if the user names it.
    """

    is_default = False
    name = "compiled"
    is_tried_by_default = False

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return backend.explain_missing_compiler() or super().explain_unavailability(backend)

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        # Do not write to C. Inductor would compute the result in a separate buffer and then copy the buffer to C.
        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.mm(left, right)

        return partial(compile_with_static_shapes(multiply, mode="max-autotune-no-cudagraphs"), a, b), 1.0


class TunableOp(TorchMm):
    """The kernel torch.mm with TunableOp, which selects the fastest algorithm of ROCm's libraries.

    TunableOp measures the algorithms in the first launch of a shape, which mamf does not time.
    """

    is_default = False
    name = "tunableop"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime != "hip":
            # In torch up to 2.13, TunableOp on CUDA has no algorithms to choose from.
            return Unavailability("TunableOp works on ROCm only", "use --backend rocm on an AMD GPU")
        if not hasattr(torch.cuda, "tunable"):
            return Unavailability("this torch has no torch.cuda.tunable", "pip install --upgrade torch")
        return None

    @contextmanager
    def apply_settings(self, backend: Backend, problem: MatmulProblem) -> Iterator[None]:
        tunable = torch.cuda.tunable
        was_enabled, was_tuning = tunable.is_enabled(), tunable.tuning_is_enabled()
        tunable.enable(True)
        tunable.tuning_enable(True)
        try:
            with super().apply_settings(backend, problem):
                yield
        finally:
            tunable.enable(was_enabled)
            tunable.tuning_enable(was_tuning)


# On CUDA, torch._int_mm requires that A has more rows than this.
_MAX_UNSUPPORTED_ROWS = 16


class IntMm(TorchMatmul):
    """The kernel torch._int_mm, which multiplies int8 operands and returns the exact int32 result."""

    name = "int_mm"
    is_default = True
    torch_name = "_int_mm"
    dtypes = ("int8",)

    def explain_unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if shape.m <= _MAX_UNSUPPORTED_ROWS or shape.n % 8 or shape.k % 8:
            return (
                f"{self.name} needs M above {_MAX_UNSUPPORTED_ROWS}, and N and K that are multiples of 8, not {shape}: "
                "choose another shape"
            )
        return None

    def bind_operands(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return lambda: torch._int_mm(a, b, out=c), 1.0
