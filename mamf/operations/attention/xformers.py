"""Call memory_efficient_attention of xFormers, which runs FlashAttention, CUTLASS or Composable Kernel."""

from __future__ import annotations

import re
from typing import Any

import torch

from mamf.errors import UnsupportedError
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import LibraryAttention


class XFormersAttention(LibraryAttention):
    name = "xformers"
    library_name = "xFormers"
    module_name = "xformers.ops"
    distribution_name = "xformers"
    # Without --no-deps, pip would replace the installed torch with the version that xFormers was built with.
    install_command = "pip install --no-deps --no-build-isolation git+https://github.com/facebookresearch/xformers.git"
    runtimes = ("cuda", "hip")
    layout = "bshd"
    dtypes = ("bfloat16", "float16", "float32")
    head_dims = range(8, 513, 8)
    supports_unequal_head_dims = True
    # xFormers' LowerTriangularMask is aligned to the top left. mamf expects a mask that is aligned to the bottom right,
    # which is a different mask if there are more or fewer queries than keys.
    supports_unequal_lengths = False

    def explain_unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if problem.has_backward_pass and shape.heads != shape.kv_heads:
            return f"{self.name} has no backward pass with fewer kv heads than query heads: use --direction fwd"
        return super().explain_unsupported_shape(problem, shape)

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        if shape.heads != shape.kv_heads:
            # If query heads share keys and values, xFormers expects operands of the shape [batch, sequence, kv heads,
            # query heads per kv head, head dimension].
            heads_per_kv_head = shape.heads // shape.kv_heads
            q = q.unflatten(2, (shape.kv_heads, heads_per_kv_head))
            k, v = (tensor.unsqueeze(3).expand(-1, -1, -1, heads_per_kv_head, -1) for tensor in (k, v))
        bias = function.LowerTriangularMask() if shape.causal else None
        try:
            output: torch.Tensor = function.memory_efficient_attention(q, k, v, attn_bias=bias)
        except NotImplementedError as error:
            # No operator of xFormers supports the inputs. The error message first describes the inputs. After that, a
            # line that begins with an operator's name in backticks says why this operator cannot run. Remove the
            # description of the inputs.
            reasons = re.sub(r"\A.*?\n(?=`)", "", str(error), flags=re.DOTALL)
            raise UnsupportedError(" ".join(reasons.split())) from error
        return output.flatten(2, 3) if output.ndim == 5 else output
