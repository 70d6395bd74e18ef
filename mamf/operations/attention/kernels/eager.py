"""Attention in plain PyTorch: the baseline for other kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from mamf.backend import Backend, Unavailable
from mamf.operations.attention.kernels.attention_reference import row_blocks
from mamf.operations.attention.kernels.torch_attention import TorchAttention
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape
from mamf.operations.compilation import compile_for_shape, keep_backward_buffers
from mamf.torch_backend import TorchBackend


class Eager(TorchAttention):
    """Two products, a mask and a softmax, every score in memory."""

    name = "eager"
    dtypes = ("bfloat16", "float16", "float32", "float64")
    head_dims = range(1, 1025)
    has_window = True

    def bound(self, problem: AttentionProblem) -> float:
        # Scores kept in 16 bits are rounded too: the largest error in results/ is 5.9e-3 in bfloat16.
        return super().bound(problem) * 2.4

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if shape.causal and shape.seqlen_q > shape.seqlen_k:
            return f"{self.name} has no result for queries that see no key: causal with more queries than keys"
        return super().unsupported_shape(problem, shape)

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        assert isinstance(backend, TorchBackend)
        return make_attention(shape, masked_keys(shape, backend.device))


def masked_keys(shape: AttentionShape, device: torch.device) -> torch.Tensor | None:
    """The mask of keys for each query, made outside the timed launch; None if all queries see all keys."""
    if not shape.causal and shape.window is None:
        return None
    return torch.cat([masked for _, masked in row_blocks(shape, device)])


def make_attention(shape: AttentionShape, masked: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    scale, group = 1 / math.sqrt(shape.head_dim), shape.heads // shape.kv_heads

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q @ k.transpose(-2, -1)) * scale
        if masked is not None:
            scores = scores.masked_fill(masked, -math.inf)
        wide = torch.float32 if q.dtype.itemsize < 4 else q.dtype
        return torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype) @ v

    return attention


class CompiledEager(Eager):
    """The same under torch.compile, without the rewrite into SDPA, which is a separate kernel."""

    name = "compiled-eager"
    is_tried_unasked = False

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return backend.without_compiler() or super().unavailable(backend)

    def settings(self, backend: Backend, problem: AttentionProblem) -> AbstractContextManager[object]:
        return keep_backward_buffers()

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        return compile_for_shape(super().bind(backend, problem, shape), options={"pattern_matcher": False})
