"""torch.nn.functional.scaled_dot_product_attention: its own choice of backend, and each backend forced."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mamf.backend import Backend, Unavailable
from mamf.operations.attention.kernels.torch_attention import ON_ANY_DEVICE, TorchAttention
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape


class Sdpa(TorchAttention):
    """torch's choice of backend. The row names the backend that ran."""

    name = "sdpa"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32", "float64")
    head_dims = range(8, 513, 8)
    #: Its causal mask is aligned to the top left.
    has_unequal_lengths = False

    def attend(self, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {"ran": chosen_backend(shape, operands, problem.has_backward)}


def chosen_backend(shape: AttentionShape, operands: Sequence[torch.Tensor], has_backward: bool) -> str:
    """The backend that torch's dispatcher chooses for these operands."""
    q, k, v = (tensor.detach().requires_grad_(has_backward) for tensor in operands)
    gqa = shape.heads != shape.kv_heads
    with torch.set_grad_enabled(has_backward):
        choice = torch._fused_sdp_choice(q, k, v, is_causal=shape.causal, enable_gqa=gqa)
    return SDPBackend(choice).name.lower()


class _Forced(Sdpa):
    """A single backend: if it does not support a shape, the row is unsupported."""

    forced: ClassVar[SDPBackend]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda", "hip")

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime not in self.runtimes:
            return Unavailable(f"torch has no {self.name} on {backend.name}", ON_ANY_DEVICE)
        return None

    def settings(self, backend: Backend, problem: AttentionProblem) -> AbstractContextManager[object]:
        manager: AbstractContextManager[object] = sdpa_kernel(self.forced)
        return manager

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {}


class SdpaFlash(_Forced):
    name = "sdpa-flash"
    dtypes = ("bfloat16", "float16", "float32")
    forced = SDPBackend.FLASH_ATTENTION
    runtimes = ("cuda", "hip", "sycl", "host")
    head_dims = range(8, 257, 8)

    def unsupported(self, backend: Backend, problem: AttentionProblem) -> str | None:
        if backend.runtime != "host" and problem.dtype == "float32":
            return f"{self.name} has no float32 on {backend.name}; it takes bfloat16 and float16"
        return super().unsupported(backend, problem)


class SdpaCudnn(_Forced):
    name = "sdpa-cudnn"
    dtypes = ("bfloat16", "float16")
    forced = SDPBackend.CUDNN_ATTENTION
    runtimes = ("cuda",)


class SdpaEfficient(_Forced):
    name = "sdpa-efficient"
    dtypes = ("bfloat16", "float16", "float32")
    forced = SDPBackend.EFFICIENT_ATTENTION

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if shape.heads != shape.kv_heads:
            return f"{self.name} has no heads that share keys"
        return super().unsupported_shape(problem, shape)


class SdpaMath(_Forced):
    name = "sdpa-math"
    forced = SDPBackend.MATH
    runtimes = ("cuda", "hip", "sycl", "metal", "host")
