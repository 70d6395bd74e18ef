"""Call memory_efficient_attention of xFormers, which runs FlashAttention, CUTLASS or Composable Kernel."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from mamf.errors import UnsupportedError
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import LibraryAttention


class XFormers(LibraryAttention):
    name = "xformers"
    library_name = "xFormers"
    module_name = "xformers.ops"
    distribution_name = "xformers"
    # --no-deps, because xFormers requires the torch that it was built with, so pip would replace the installed torch.
    install_command = "pip install --no-deps --no-build-isolation git+https://github.com/facebookresearch/xformers.git"
    runtimes = ("cuda", "hip")
    layout = "bshd"
    dtypes = ("bfloat16", "float16", "float32")
    head_dims = range(8, 513, 8)
    has_unequal_head_dims = True
    # xFormers' LowerTriangularMask is aligned to the top left, which is wrong if lengths differ.
    has_unequal_lengths = False

    def make_repair_command(self, error: Exception) -> str:
        if "flash_attn" in str(error):
            # xFormers takes flash_attn, the namespace package of flash-attn-4, for FlashAttention 2 and fails.
            return "pip install flash-attn --no-build-isolation   # or: pip uninstall flash-attn-4"
        return super().make_repair_command(error)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if problem.has_backward and shape.heads != shape.kv_heads:
            return f"{self.name} has no backward pass with fewer kv heads than heads"
        return super().unsupported_shape(problem, shape)

    def launch_forward(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = group_heads_by_kv_head(shape, q, k, v)
        bias = function.LowerTriangularMask() if shape.causal else None
        try:
            output: torch.Tensor = function.memory_efficient_attention(q, k, v, attn_bias=bias)
        except NotImplementedError as error:
            # No operator supports the inputs. The message describes the inputs, and then says for each operator, whose
            # name is in backticks at the start of a line, why it does not support them.
            reasons = re.sub(r"\A.*?\n(?=`)", "", str(error), flags=re.DOTALL)
            raise UnsupportedError(" ".join(reasons.split())) from error
        return output.flatten(2, 3) if output.ndim == 5 else output

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        details = super().details(problem, shape, operands)
        # Name the operator that xFormers' dispatcher chooses. If this private interface is missing in another release,
        # the measurement must not fail.
        with contextlib.suppress(Exception):
            ops, fmha = self.import_library_quietly(), importlib.import_module("xformers.ops.fmha")
            q, k, v = group_heads_by_kv_head(shape, *operands)
            inputs = fmha.Inputs(query=q, key=k, value=v, attn_bias=ops.LowerTriangularMask() if shape.causal else None)
            details["ran"] = str(fmha.dispatch._dispatch_fw(inputs, problem.has_backward).NAME)
        return details


def group_heads_by_kv_head(
    shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of q, k and v in the shape that xFormers expects if query heads share keys and values.

    The shape is [batch, sequence, kv heads, query heads per kv head, head dimension]. If no heads share keys, return q,
    k and v as they are.
    """
    if shape.heads == shape.kv_heads:
        return q, k, v
    group = shape.heads // shape.kv_heads
    keys, values = (tensor.unsqueeze(3).expand(-1, -1, -1, group, -1) for tensor in (k, v))
    return q.unflatten(2, (shape.kv_heads, group)), keys, values
