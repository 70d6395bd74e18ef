"""Matrix products written in Triton, with one kernel per configuration; a regime ranks the configurations.

Triton ships with torch on NVIDIA, AMD and Intel. It is faster than libraries for some problems, mainly int8 on Hopper.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.dtypes import DTYPES
from mamf.operations.compilation import check_triton
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.torch_products import TorchMatmul
from mamf.operations.matmul.kernels.triton_configurations import Configuration, configurations
from mamf.operations.matmul.shapes import MatmulShape

_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
# Rows of tiles per group: concurrent programs share their operands.
_GROUP_M = 8
# If the device does not report it.
_COMPUTE_UNITS = 64
# Elements of C per compute unit, all persistent programs together: two of 128 x 128 or one of 128 x 256 fill its
# registers.
_WARPS_PER_UNIT = 8
_DESCRIPTOR_ALIGNMENT = 16  # bytes
_HOPPER = 90


class TritonMatmul(TorchMatmul):
    """``text``: a configuration such as ``128x256x64/8w3s``, by default the most promising one for the dtype.

    ``compute_units``: the number of compute units of the device that it is prepared for.
    """

    dtypes = ("bfloat16", "float16", "tf32", "float32", *_FLOAT8, "int8")
    takes = "a configuration"

    def __init__(self, text: str | None = None, compute_units: int | None = None) -> None:
        self.configuration = None if text is None else Configuration.parse(text)
        self.name = "triton" if text is None else f"triton[{self.configuration}]"
        self._compute_units = compute_units or _COMPUTE_UNITS

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_triton(backend, "torch.mm")

    def unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        outputs = _outputs(problem.dtype)
        if problem.out_dtype not in outputs:
            return f"kernel {self.name} writes {', '.join(outputs)} for {problem.dtype}, not {problem.out_dtype}"
        if problem.fast_accumulation and problem.dtype not in _FLOAT8:
            return f"kernel {self.name} has no fast accumulation for {problem.dtype}; only 8-bit floats have it"
        if not self._is_described:
            return None
        if not has_descriptors(backend):
            return f"kernel {self.name} needs an NVIDIA GPU from Hopper on and a Triton with tensor descriptors"
        if DTYPES[problem.dtype].itemsize != 2 and problem.layout != "nt":
            return f"kernel {self.name} supports {problem.dtype} only in layout nt, not {problem.layout}"
        return None

    def unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if not self._is_described:
            return None
        rows = {
            "A": (shape.m if problem.layout[0] == "t" else shape.k, problem.dtype),
            "B": (shape.k if problem.layout[1] == "t" else shape.n, problem.b_dtype),
            "C": (shape.n, problem.out_dtype),
        }
        for name, (length, dtype) in rows.items():
            if length * DTYPES[dtype].itemsize % _DESCRIPTOR_ALIGNMENT:
                return f"{self.name} needs rows of a multiple of {_DESCRIPTOR_ALIGNMENT} bytes; those of {name} are not"
        return None

    @property
    def _is_described(self) -> bool:
        return self.configuration is not None and self.configuration.schedule == "tma"

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[TritonMatmul]:
        if self.configuration is not None:
            return (self,)
        found = (TritonMatmul(str(each)) for each in configurations(backend.runtime, problem.dtype))
        return [
            each
            for each in found
            if each.unsupported_problem(backend, problem) is None and each.unsupported_shape(problem, shape) is None
        ]

    def refuses(self, error: Exception) -> bool:
        """Whether a configuration is too large for the device or does not compile."""
        from triton.errors import TritonError

        return isinstance(error, TritonError) or "PassManager::run failed" in str(error)

    def details(self, problem: MatmulProblem) -> Mapping[str, str]:
        """The configuration, and how 8-bit floats are summed: Hopper keeps 14 bits unless partial sums are added to
        float32 regularly.
        """
        assert self.configuration is not None, "the kernel that is prepared has one"
        details = {"configuration": str(self.configuration)}
        if problem.dtype not in _FLOAT8:
            return details
        every = f"float32 every {self.configuration.block_k} of K"
        return {**details, "accumulation": "fast" if problem.fast_accumulation else every}

    def configured(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> TritonMatmul:
        chosen = self.variants(backend, problem, shape)[0].configuration
        return TritonMatmul(str(chosen), backend.info.compute_units)

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        from mamf.operations.matmul.kernels import triton_kernels as kernels

        chosen = self.configuration
        assert chosen is not None, "the kernel that is prepared has one"
        (m, k), n = a.shape, b.shape[1]
        programs = chosen.tiles(m, n)
        if chosen.schedule != "tile":
            programs = min(programs, self._compute_units * max(1, _WARPS_PER_UNIT // chosen.warps))
        options: dict[str, Any] = {
            "BLOCK_M": chosen.block_m,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k,
            "GROUP_M": _GROUP_M,
            **_arithmetic(problem, chosen),
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }
        arguments: tuple[Any, ...]
        if chosen.schedule == "tma":
            kernel = kernels.multiply_by_descriptors[(programs,)]
            arguments = (*_describe_operands(a, b, c, problem.layout, chosen), m, n, k)
            options |= {"A_BY_COLUMNS": problem.layout[0] == "t", "B_BY_COLUMNS": problem.layout[1] == "t"}
        else:
            kernel = kernels.multiply_by_pointers[(programs,)]
            arguments = (a, b, c, m, n, k, *a.stride(), *b.stride())
            options["WHOLE_K"] = k % chosen.block_k == 0

        def launch() -> None:
            kernel(*arguments, **options)

        return launch, 1.0


def has_descriptors(backend: Backend) -> bool:
    """Whether the device loads blocks with tensor descriptors, and this Triton release lets the host create them."""
    architecture = backend.info.architecture or ""
    is_known = backend.runtime == "cuda" and architecture.startswith("sm_")
    if not is_known or int(architecture.removeprefix("sm_")) < _HOPPER:
        return False
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def _outputs(dtype: str) -> tuple[str, ...]:
    if dtype in _FLOAT8:
        return ("bfloat16", "float16", "float32")
    return (DTYPES[dtype].default_output,)


def _arithmetic(problem: MatmulProblem, chosen: Configuration) -> dict[str, Any]:
    """How the dtype is multiplied and summed."""
    import triton.language as tl

    is_precise_float8 = problem.dtype in _FLOAT8 and not problem.fast_accumulation
    return {
        "SUMS": tl.int32 if problem.dtype == "int8" else tl.float32,
        "PRECISION": "tf32" if problem.dtype == "tf32" else "ieee",
        # Only Hopper uses this; None keeps sums in the precision of its tensor cores.
        "IMPRECISE": chosen.block_k if is_precise_float8 else None,
    }


def _describe_operands(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, layout: str, chosen: Configuration
) -> list[Any]:
    """Descriptors of A, B and C in their memory layouts; C is stored in halves, to use less shared memory."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    a_block, b_block = [chosen.block_m, chosen.block_k], [chosen.block_k, chosen.block_n]
    if layout[0] == "t":
        a, a_block = a.t(), a_block[::-1]
    if layout[1] == "t":
        b, b_block = b.t(), b_block[::-1]
    blocks = ((a, a_block), (b, b_block), (c, [chosen.block_m, chosen.block_n // 2]))
    return [TensorDescriptor.from_tensor(operand, block) for operand, block in blocks]
