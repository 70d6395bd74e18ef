"""Products for Hopper in Gluon, with and without scales of blocks; one kernel per tile, which a regime ranks.

Gluon ships with Triton from 3.6 on. In contrast to Triton it assigns warps: some load, others multiply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.errors import UnsupportedError, UsageError
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.kernels.scaled_formats import FormatMatmul
from mamf.operations.matmul.kernels.torch_products import TorchMatmul
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.operand_sets import TorchKernel
from mamf.operations.quantization import Quantized
from mamf.operations.triton_driver import check_triton

_ARCHITECTURE = "sm_90"
_PATTERN = re.compile(r"(128|192)x(128|256)/([2-8])s", re.ASCII)
# A block of A has as many rows as four warps multiply at once; C is stored in blocks of this width.
_BLOCK_ROWS, _WIDTH = 64, 128
# Of a row of a block of A or B: the widest swizzle of shared memory. Rows in memory must be aligned.
_BLOCK_BYTES, _ALIGNMENT = 128, 16
# Rows of tiles per group: concurrent programs share their operands.
_GROUP_M = 8


class HopperMatmul(TorchKernel[MatmulProblem, MatmulShape], MatmulKernel):
    """``text``: a tile of C and the stages of its ring, such as ``192x256/3s``; by default the most promising one."""

    takes = "a tile"
    is_tried_unasked = False
    #: Tiles that fill the shared memory, most promising first. All have the same width.
    tiles: ClassVar[tuple[str, ...]] = ()
    #: How many run at once: one per compute unit of the device that it is prepared for.
    programs = 1

    def __init__(self, text: str | None = None) -> None:
        self.text = text or self.tiles[0]
        match = _PATTERN.fullmatch(self.text)
        if match is None or f"x{match[2]}/" not in self.tiles[0]:
            raise UsageError(f"{text!r} is not a tile of kernel {self.name}; for example {self.tiles[0]}")
        self.tile = int(match[1]), int(match[2]), int(match[3])
        self.is_named, self.name = text is not None, f"{self.name}[{text}]" if text else self.name

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.info.architecture == _ARCHITECTURE:
            return check_triton(backend, "torch.mm or F.scaled_mm")
        return Unavailable(f"kernel {self.name} is for NVIDIA's Hopper ({_ARCHITECTURE})", "use the default kernel")

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,) if self.is_named else [type(self)(text) for text in self.tiles]

    def configured(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> HopperMatmul:
        chosen = type(self)(self.text)
        chosen.programs = backend.info.compute_units or 1
        return chosen

    def refuses(self, error: Exception) -> bool:
        """Whether a tile does not compile, or needs more than the device has."""
        from triton.errors import TritonError

        return isinstance(error, TritonError)


class Gluon(HopperMatmul, TorchMatmul):
    name = "gluon"
    dtypes = ("bfloat16", "float16")
    tiles = ("128x256/4s", "192x256/3s", "128x256/3s")

    def unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.layout != "nt":
            return f"kernel {self.name} reads A and B by rows of K: --layout nt, not {problem.layout}"
        return super().unsupported_problem(backend, problem)

    def unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        if shape.k * 2 % _ALIGNMENT or shape.n * 2 % _ALIGNMENT:
            return f"{self.name} needs N and K to be multiples of {_ALIGNMENT // 2}"
        return None

    def details(self, problem: MatmulProblem) -> Mapping[str, str]:
        return {"configuration": self.text}

    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        return make_launch(self.tile, self.programs, a, b.t(), c), 1.0


class GluonScaled(HopperMatmul, FormatMatmul):
    """As DeepSeek-V3 trains: each product over 128 of K is scaled and added in float32 while other warps multiply."""

    name = "gluon_scaled"
    dtypes = ("fp8_1x128_128x128",)
    out_dtypes = ("bfloat16", "float16")
    tiles = ("192x128/4s", "128x128/6s", "128x128/4s")

    def bind(
        self, backend: Backend, problem: MatmulProblem, a: Quantized, b: Quantized, c: torch.Tensor
    ) -> Callable[[], object]:
        return make_launch(self.tile, self.programs, a.elements, b.elements, c, (a.scales.t().contiguous(), b.scales))


def make_launch(
    tile: tuple[int, int, int],
    programs: int,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Callable[[], None]:
    """The launch of C (M,N) = A (M,K) @ B^T (N,K). ``tile``: rows, columns, stages. ``scales``: those of A (K/128, M)
    and of B (N/128, K/128). Raises UnsupportedError if Triton has another Gluon or none.
    """
    try:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from mamf.operations.matmul.kernels.gluon_kernels import multiply_in_groups
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this release of Triton lacks the Gluon of Triton 3.6 ({error})") from error
    rows, columns, stages = tile
    (m, k), n, step = a.shape, b.shape[0], _BLOCK_BYTES // a.element_size()
    described = [
        TensorDescriptor.from_tensor(operand, block, NVMMASharedLayout(_BLOCK_BYTES, 8 * operand.element_size(), 2))
        for operand, block in ((a, [_BLOCK_ROWS, step]), (b, [columns, step]), (c, [_BLOCK_ROWS, _WIDTH]))
    ]
    kernel = multiply_in_groups[(min(programs, -(-m // rows) * -(-n // columns)),)]
    options: dict[str, Any] = {"SCALED": scales is not None, "BLOCKS": rows // _BLOCK_ROWS, "STAGES": stages}

    def launch() -> None:
        kernel(*described, *(scales or (0, 0)), m, n, k, **options, GROUP_M=_GROUP_M, num_warps=4)

    return launch
