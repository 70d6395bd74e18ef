"""Call FusedSDPA, the attention of Intel's library for Gaudi."""

from __future__ import annotations

from typing import Any

import torch

from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import LibraryAttention


class FusedSdpa(LibraryAttention):
    """The kernel FusedSDPA in its recompute mode.

    In this mode the forward pass does not store the scores, and the backward pass computes them again, as in
    FlashAttention. In its other mode, FusedSDPA stores all scores for the backward pass.
    """

    name = "fused-sdpa"
    library_name = "FusedSDPA"
    module_name = "habana_frameworks.torch.hpex.kernels"
    function_name = "FusedSDPA.apply"
    distribution_name = "habana-torch-plugin"
    install_command = "bash habanalabs-installer.sh install --type pytorch   # docs.habana.ai, 'Installation'"
    runtimes = ("synapse",)
    dtypes = ("bfloat16",)
    # With unequal lengths, the causal mask may be wrong: the documentation does not say to which corner it is aligned.
    supports_unequal_lengths = False

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        mask, dropout, scale, softmax_mode, recompute = None, 0.0, None, "None", True
        return function(q, k, v, mask, dropout, shape.causal, scale, softmax_mode, recompute)
