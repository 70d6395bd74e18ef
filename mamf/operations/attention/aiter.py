"""Call the attention kernels of AMD's library AITER, which run on Instinct MI300 and MI350."""

from __future__ import annotations

from typing import Any

import torch

from mamf.backend import Backend, Unavailability
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import KernelLibrary, LibraryAttention, get_window_size

_SUPPORTED_ARCHITECTURES = ("gfx942", "gfx950")


class AiterLibrary(KernelLibrary):
    """AMD's library AITER. It compiles a kernel when the kernel is first launched. mamf does not time this launch."""

    library_name = "AITER"
    module_name = "aiter"
    distribution_name = "amd-aiter"
    install_command = "git clone --recursive https://github.com/ROCm/aiter && cd aiter && python setup.py develop"
    runtimes = ("hip",)

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime == "hip" and backend.info.architecture not in _SUPPORTED_ARCHITECTURES:
            return Unavailability(
                f"AITER supports only {' and '.join(_SUPPORTED_ARCHITECTURES)}, not {backend.info.architecture}",
                "mamf attention --kernel sdpa-flash",
            )
        return super().explain_unavailability(backend)


class AiterAttention(AiterLibrary, LibraryAttention):
    name = "aiter"
    function_name = "flash_attn_func"
    layout = "bshd"
    supports_window = True
    supports_unequal_head_dims = True

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        return function(
            q,
            k,
            v,
            causal=shape.causal,
            window_size=get_window_size(shape, -1),
            # AITER's default is True, but with True AITER cannot use its fast backward kernel on gfx950.
            deterministic=False,
            # AITER requires return_lse=True if gradients will be computed.
            return_lse=problem.has_backward_pass,
        )
