"""Products with scales of blocks, as in DeepSeek-V3's training, in Triton; a regime ranks the configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mamf.backend import Backend, Unavailable
from mamf.errors import UsageError
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.kernels.scaled_formats import FormatMatmul
from mamf.operations.matmul.kernels.triton_configurations import Configuration
from mamf.operations.matmul.kernels.triton_matmul import TritonMatmul, has_descriptors
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.quantization import Quantized
from mamf.operations.triton_driver import check_triton

_CONFIGURATIONS = ("128x128x128/8w4s/tma", "128x128x128/8w3s/tma", "64x128x128/4w4s/tma")
_BLOCK, _GROUP_M = 128, 8
_WARPS_PER_UNIT = 8


class TritonScaled(FormatMatmul):
    """Each product over 128 of K is scaled and added in float32. ``text``: a configuration such as
    ``128x128x128/8w4s/tma``, by default the most promising one. It has tensor descriptors and one scale of B per step.
    """

    dtypes = ("fp8_1x128_128x128",)
    takes = "a configuration"
    is_tried_unasked = False

    def __init__(self, text: str | None = None) -> None:
        self.configuration = chosen = Configuration.parse(text or _CONFIGURATIONS[0])
        if chosen.schedule != "tma" or chosen.block_k != _BLOCK or chosen.block_n > _BLOCK:
            raise UsageError(f"{text!r}: kernel triton_scaled has blocks of 128 along K, at most 128 columns, and tma")
        self.text = text
        self.name = "triton_scaled" if text is None else f"triton_scaled[{chosen}]"

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if reason := check_triton(backend, "F.scaled_mm"):
            return reason
        if not has_descriptors(backend):
            return Unavailable("it needs an NVIDIA GPU from Hopper on and tensor descriptors", "use F.scaled_mm")
        return None

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[TritonScaled]:
        return (self,) if self.text else [TritonScaled(text) for text in _CONFIGURATIONS]

    def refuses(self, error: Exception) -> bool:
        return TritonMatmul().refuses(error)

    def bind(
        self, backend: Backend, problem: MatmulProblem, a: Quantized, b: Quantized, c: torch.Tensor
    ) -> Callable[[], object]:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from mamf.operations.matmul.kernels.triton_kernels import multiply_scaled_blocks

        chosen = self.configuration
        (m, k), n = a.shape, b.shape[0]
        blocks = (
            (a.elements, (chosen.block_m, _BLOCK)),
            (b.elements, (chosen.block_n, _BLOCK)),
            (c, (chosen.block_m, chosen.block_n)),
        )
        described = [TensorDescriptor.from_tensor(operand, list(block)) for operand, block in blocks]
        scales = (a.scales.t().contiguous(), b.scales)
        programs = (backend.info.compute_units or 1) * max(1, _WARPS_PER_UNIT // chosen.warps)
        kernel = multiply_scaled_blocks[(min(programs, chosen.tiles(m, n)),)]
        options: dict[str, Any] = {
            "BLOCK_M": chosen.block_m,
            "BLOCK_N": chosen.block_n,
            "BLOCK_K": _BLOCK,
            "GROUP_M": _GROUP_M,
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }

        def launch() -> None:
            kernel(*described, *scales, m, n, k, **options)

        return launch
