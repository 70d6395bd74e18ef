"""Call SpargeAttention, a variant of SageAttention that predicts which blocks of keys are irrelevant and skips them.

SpargeAttention has no backward pass. How many blocks a kernel can skip depends on the data. On random data, every block
matters. A kernel that skips blocks below a threshold then skips nothing, and a kernel that skips a fixed share of the
blocks ("topk") gives a wrong result.

So mamf can generate inputs in which only a given share of the blocks matters (see ``AttentionProblem.sparsity``). It
tells a ``topk`` kernel to keep this share. mamf reports the share of blocks that a kernel skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mamf.operations.attention.attention_reference import compute_attended_share
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import QuantizedAttention

#: The number of tokens in a block. SpargeAttention uses blocks of 128 and of 64 tokens; this is the larger number.
_KEYS_PER_BLOCK = 128


class _SpargeAttention(QuantizedAttention):
    library_name = "SpargeAttn"
    module_name = "spas_sage_attn"
    distribution_name = "spas-sage-attn"
    install_command = "pip install --no-build-isolation git+https://github.com/thu-ml/SpargeAttn"
    head_dims = (64, 128)
    supports_gqa = False
    supports_unequal_lengths = False

    def make_keyword_arguments(self, problem: AttentionProblem, shape: AttentionShape) -> dict[str, Any]:
        """Return the keyword arguments of the library's function. For a ``topk`` function, they include the share of
        key blocks that the kernel keeps.
        """
        keyword_arguments = {"is_causal": shape.causal, "tensor_layout": "HND"}
        if "topk" not in self.function_name:
            return keyword_arguments
        share = compute_attended_share(problem.sparsity, shape.seqlen_k)
        # The library multiplies the share by the number of blocks and truncates the result to an integer. Add a quarter
        # of a block, so that a rounding error in the share does not reduce this integer by 1.
        return {**keyword_arguments, "topk": min(1.0, share + 0.25 * _KEYS_PER_BLOCK / shape.seqlen_k)}

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Any:
        return function(q, k, v, **self.make_keyword_arguments(problem, shape))

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return the details of a launch, including the share of the blocks of Q K^T that the kernel skips.

        Measure this share in a launch that is not timed, because reading the share synchronizes the device.
        """
        _, sparsity = self.import_library_quietly()(
            *operands, **self.make_keyword_arguments(problem, shape), return_sparsity=True
        )
        # The library's sparsity can be negative with a causal mask, because the library assumes that the lengths are
        # multiples of its blocks of 128 x 64. Report 0 instead.
        return {**super().make_details(problem, shape, operands), "sparsity": max(0.0, float(sparsity))}


class _SpargeFp16(_SpargeAttention):
    capability_range = (8, 0), (9, 0)
    matmul_dtypes = ("int8", "float16")
    #: Rounding to int8 causes an error of 1.3e-2 on normal data (see sage.py). The limit is larger, because skipped
    #: blocks would contribute a little to the output.
    tolerance = 5e-2


class _SpargeFp8(_SpargeAttention):
    # The library has fp8 kernels only for these compute capabilities. On other cards its fp8 functions silently run the
    # float16 kernel.
    capability_range = (8, 9), (9, 0)
    matmul_dtypes = ("int8", "float8_e4m3fn")
    #: Rounding to fp8 causes an error of 4e-2 on normal data (see sage.py). The limit is larger, because skipped blocks
    #: would contribute a little to the output.
    tolerance = 1e-1

    def explain_unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if shape.causal:
            # The library uses is_causal to choose blocks, but does not pass is_causal to the kernel. So in blocks on
            # the diagonal, the kernel does not mask the keys that come after a query.
            return f"{self.name} masks only whole blocks of keys, which is wrong with a causal mask: remove --causal"
        return super().explain_unsupported_shape(problem, shape)


class SpargeFp16Threshold(_SpargeFp16):
    name = "sparge-fp16-threshold"
    function_name = "spas_sage_attn_meansim_cuda"


class SpargeFp16TopK(_SpargeFp16):
    name = "sparge-fp16-topk"
    function_name = "spas_sage_attn_meansim_topk_cuda"


class SpargeFp8Threshold(_SpargeFp8):
    name = "sparge-fp8-threshold"
    function_name = "spas_sage2_attn_meansim_cuda"
    alternative_nvidia_install_command = "mamf attention --kernel sparge-fp16-threshold"


class SpargeFp8TopK(_SpargeFp8):
    name = "sparge-fp8-topk"
    function_name = "spas_sage2_attn_meansim_topk_cuda"
    alternative_nvidia_install_command = "mamf attention --kernel sparge-fp16-topk"
