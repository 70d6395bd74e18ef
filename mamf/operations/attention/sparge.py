"""SpargeAttention: SageAttention that skips blocks of keys that it predicts to be irrelevant. Forward only.

How much can be skipped depends on the data. If every block matters, a threshold skips nothing, and skipping a fixed
share gives a wrong result. So the ``topk`` kernels keep only the share of blocks that matter in the problem's inputs
(``AttentionProblem.sparsity``), and each row reports the share of blocks that was skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from mamf.operations.attention.attention_reference import compute_relevant_share
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import ComputeCapability, QuantizedAttention, extract_output

_MIN_TOKENS = 128
#: Keys per block, the larger of the library's two block sizes.
_BLOCK = 128
_FP16_CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))
#: On other cards the library's fp8 functions silently run the float16 kernel.
_FP8_CAPABILITIES = ((8, 9), (9, 0))


class _Sparge(QuantizedAttention):
    library = "SpargeAttn"
    module = "spas_sage_attn"
    distribution = "spas-sage-attn"
    install = "pip install --no-build-isolation git+https://github.com/thu-ml/SpargeAttn"
    head_dims = (64, 128)
    has_gqa = False
    has_unequal_lengths = False
    structured_tolerance = 1.5e-1
    function: ClassVar[str]
    capabilities: ClassVar[tuple[ComputeCapability, ...]]

    def supports_capability(self, capability: ComputeCapability) -> bool:
        return capability in self.capabilities

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.function)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if min(shape.seqlen_q, shape.seqlen_k) < _MIN_TOKENS:
            return f"{self.name} needs at least {_MIN_TOKENS} queries and keys"
        return super().unsupported_shape(problem, shape)

    def options(self, problem: AttentionProblem, shape: AttentionShape) -> dict[str, Any]:
        """Return the options that decide which blocks are skipped; empty for the library's defaults."""
        return {}

    def call(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        return extract_output(
            function(q, k, v, is_causal=shape.causal, tensor_layout="HND", **self.options(problem, shape))
        )

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Add the share of blocks of Q K^T that the kernel skips. A separate launch measures it, because reading it
        synchronizes the device.
        """
        details = super().details(problem, shape, operands)
        options = {"is_causal": shape.causal, "tensor_layout": "HND", **self.options(problem, shape)}
        result = self.import_library_quietly()(*operands, **options, return_sparsity=True)
        if not isinstance(result, tuple):
            return details
        # For causal masks the library counts whole blocks of 128 x 64, so its share can be negative at other lengths.
        return {**details, "sparsity": max(0.0, float(result[1]))}


class _Fp16(_Sparge):
    cards = "sm80, sm86, sm87, sm89 and sm90"
    capabilities = _FP16_CAPABILITIES
    product_dtypes = ("int8", "float16")
    #: int8 has an error of 1.3e-2 on normal data (see sage.py). The remainder allows for the skipped blocks, which
    #: contribute nothing to the output.
    tolerance = 5e-2


class _Fp8(_Sparge):
    cards = "sm89 and sm90"
    capabilities = _FP8_CAPABILITIES
    product_dtypes = ("int8", "float8_e4m3fn")
    #: fp8 has an error of 4e-2 on normal data (see sage.py). The remainder allows for the skipped blocks, which
    #: contribute nothing to the output.
    tolerance = 1e-1

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if shape.causal:
            # The library uses is_causal to choose blocks but does not pass it to the kernel, so the blocks on the
            # diagonal are not masked inside.
            return f"{self.name} masks whole blocks only, so its causal attention is wrong on the diagonal"
        return super().unsupported_shape(problem, shape)


class _TopK(_Sparge):
    """SpargeAttention that keeps a fixed share of the blocks of each row."""

    def options(self, problem: AttentionProblem, shape: AttentionShape) -> dict[str, Any]:
        share = compute_relevant_share(problem.sparsity, shape.seqlen_k)
        # The library truncates share * blocks to an integer. Add a quarter of a block, so that no rounding error loses
        # a block.
        return {"topk": min(1.0, share + 0.25 * _BLOCK / shape.seqlen_k)}


class SpargeFp16Threshold(_Fp16):
    name = "sparge-fp16-threshold"
    function = "spas_sage_attn_meansim_cuda"


class SpargeFp16TopK(_Fp16, _TopK):
    name = "sparge-fp16-topk"
    function = "spas_sage_attn_meansim_topk_cuda"


class SpargeFp8Threshold(_Fp8):
    name = "sparge-fp8-threshold"
    function = "spas_sage2_attn_meansim_cuda"
    instead = "sparge-fp16-threshold"


class SpargeFp8TopK(_Fp8, _TopK):
    name = "sparge-fp8-topk"
    function = "spas_sage2_attn_meansim_topk_cuda"
    instead = "sparge-fp16-topk"
