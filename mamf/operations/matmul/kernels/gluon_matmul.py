"""Products for Hopper in Gluon; one kernel per tile, which a regime ranks.

Gluon ships with Triton from 3.6 on. In contrast to Triton it assigns warps: some load, others multiply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch

from mamf.backend import Backend, Unavailable
from mamf.errors import UnsupportedError, UsageError
from mamf.operations.compilation import check_triton
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.kernels.torch_products import TorchMatmul
from mamf.operations.matmul.shapes import MatmulShape

_ARCHITECTURE = "sm_90"
_PATTERN = re.compile(r"(128|192)x256/([2-8])s", re.ASCII)
#: Tiles that fill the shared memory, most promising first.
_TILES = ("128x256/4s", "192x256/3s")
_COLUMNS = 256
# A block of A has as many rows as four warps multiply at once; C is stored in blocks of this width.
_BLOCK_ROWS, _WIDTH = 64, 128
# Of a row of a block of A or B: the widest swizzle of shared memory. Rows in memory must be aligned.
_BLOCK_BYTES, _ALIGNMENT = 128, 16
# Rows of tiles per group: concurrent programs share their operands.
_GROUP_M = 8


class Gluon(TorchMatmul):
    """``text``: a tile of C and the stages of its ring, such as ``192x256/3s``; by default the most promising one."""

    dtypes = ("bfloat16", "float16")
    takes = "a tile"
    is_tried_unasked = False
    #: How many run at once: one per compute unit of the device that it is prepared for.
    programs = 1

    def __init__(self, text: str | None = None) -> None:
        self.text = text or _TILES[0]
        match = _PATTERN.fullmatch(self.text)
        if match is None:
            raise UsageError(f"{text!r} is not a tile of kernel gluon; for example {_TILES[0]}")
        self.rows, self.stages = int(match[1]), int(match[2])
        self.is_named, self.name = text is not None, f"gluon[{text}]" if text else "gluon"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.info.architecture == _ARCHITECTURE:
            return check_triton(backend, "torch.mm")
        return Unavailable(f"kernel gluon is for NVIDIA's Hopper ({_ARCHITECTURE})", "use the kernel torch.mm")

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        return (self,) if self.is_named else [Gluon(text) for text in _TILES]

    def configured(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Gluon:
        chosen = Gluon(self.text)
        chosen.programs = backend.info.compute_units or 1
        return chosen

    def refuses(self, error: Exception) -> bool:
        """Whether a tile does not compile, or needs more than the device has."""
        from triton.errors import TritonError

        return isinstance(error, TritonError)

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
        return make_launch(self.rows, self.stages, self.programs, a, b.t(), c), 1.0


def make_launch(
    rows: int, stages: int, programs: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> Callable[[], None]:
    """The launch of C (M,N) = A (M,K) @ B^T (N,K) in tiles with so many rows. Raises UnsupportedError if Triton has
    another Gluon or none.
    """
    try:
        from triton.experimental.gluon.language import NVMMASharedLayout
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        from mamf.operations.matmul.kernels.gluon_kernels import multiply_in_groups
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"this release of Triton lacks the Gluon of Triton 3.6 ({error})") from error
    (m, k), n, step = a.shape, b.shape[0], _BLOCK_BYTES // a.element_size()
    described = [
        TensorDescriptor.from_tensor(operand, block, NVMMASharedLayout(_BLOCK_BYTES, 8 * operand.element_size(), 2))
        for operand, block in ((a, [_BLOCK_ROWS, step]), (b, [_COLUMNS, step]), (c, [_BLOCK_ROWS, _WIDTH]))
    ]
    kernel = multiply_in_groups[(min(programs, -(-m // rows) * -(-n // _COLUMNS)),)]
    options = {"BLOCKS": rows // _BLOCK_ROWS, "STAGES": stages, "GROUP_M": _GROUP_M, "num_warps": 4}
    return lambda: kernel(*described, m, n, k, **options)
