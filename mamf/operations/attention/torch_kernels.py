"""Call torch's own attention: scaled_dot_product_attention (SDPA) and each of its backends, and FlexAttention.

``EagerAttention`` computes attention from plain torch functions, as a baseline for the other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import get_first_message_line
from mamf.operations.attention.attention_reference import yield_row_blocks
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.attention.torch_attention import PORTABLE_COMMAND, TorchAttention
from mamf.operations.compilation import compile_with_static_shapes, keep_backward_buffers
from mamf.operations.operand_sets import split_buffers_into_sets, take_pool_buffers
from mamf.torch_backend import TorchBackend, require_free_memory


class Sdpa(TorchAttention):
    """The kernel scaled_dot_product_attention with torch's choice of backend. Its details name the backend that ran."""

    name = "sdpa"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32", "float64")
    head_dims = range(8, 513, 8)
    # scaled_dot_product_attention aligns its causal mask to the top left. mamf expects a mask that is aligned to the
    # bottom right, which is a different mask if there are more or fewer queries than keys.
    supports_unequal_lengths = False

    def attend(self, shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        q, k, v = (tensor.detach().requires_grad_(problem.has_backward_pass) for tensor in operands)
        with torch.set_grad_enabled(problem.has_backward_pass):
            choice = torch._fused_sdp_choice(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)
        return {"ran": SDPBackend(choice).name.lower()}


class _SdpaWithBackend(Sdpa):
    """A kernel that runs scaled_dot_product_attention with one backend, ``forced_backend``, and no other."""

    forced_backend: ClassVar[SDPBackend]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda", "hip")

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.runtime not in self.runtimes:
            return Unavailability(f"torch has no {self.name} for {backend.name}", PORTABLE_COMMAND)
        return None

    def apply_settings(self, backend: Backend, problem: AttentionProblem) -> Any:
        return sdpa_kernel(self.forced_backend)

    def make_details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {}


class SdpaFlash(_SdpaWithBackend):
    name = "sdpa-flash"
    dtypes = ("bfloat16", "float16", "float32")
    forced_backend = SDPBackend.FLASH_ATTENTION
    runtimes = ("cuda", "hip", "sycl", "host")
    head_dims = range(8, 257, 8)

    def explain_unsupported_problem(self, backend: Backend, problem: AttentionProblem) -> str | None:
        if backend.runtime != "host" and problem.dtype == "float32":
            return f"{self.name} does not support float32 on {backend.name}: use bfloat16 or float16"
        return super().explain_unsupported_problem(backend, problem)


class SdpaCudnn(_SdpaWithBackend):
    name = "sdpa-cudnn"
    dtypes = ("bfloat16", "float16")
    forced_backend = SDPBackend.CUDNN_ATTENTION
    runtimes = ("cuda",)


class SdpaEfficient(_SdpaWithBackend):
    name = "sdpa-efficient"
    dtypes = ("bfloat16", "float16", "float32")
    forced_backend = SDPBackend.EFFICIENT_ATTENTION
    supports_gqa = False


class SdpaMath(_SdpaWithBackend):
    name = "sdpa-math"
    forced_backend = SDPBackend.MATH
    runtimes = ("cuda", "hip", "sycl", "metal", "host")

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        _require_memory_for_scores(backend, problem, shape)
        return super().bind_operands(backend, problem, shape)


#: The FLOP of a softmax per score: 1 each for the maximum, the difference, the exponential, the sum and the quotient.
_SOFTMAX_FLOP_PER_SCORE = 5


def _require_memory_for_scores(
    backend: Backend, problem: AttentionProblem, shape: AttentionShape, float32_copies: int = 0
) -> None:
    """Raise MemoryError if a CPU has too little free memory for several copies of all scores: two in the problem's
    dtype, and ``float32_copies`` in float32. Without this check, the operating system would kill the process. Other
    devices raise an error themselves.
    """
    if not backend.is_accelerator:
        score_count = shape.batch * shape.heads * shape.seqlen_q * shape.seqlen_k
        itemsize = DTYPES[problem.dtype].itemsize
        require_free_memory(backend, score_count * (2 * itemsize + float32_copies * max(4, itemsize)))


# -- plain PyTorch, the baseline for other kernels ---------------------------------------------------------------------


class EagerAttention(TorchAttention):
    """A kernel of plain torch functions: two matmuls, a mask and a softmax. It writes all scores to memory."""

    name = "eager"
    dtypes = ("bfloat16", "float16", "float32", "float64")
    head_dims = range(1, 1025)
    supports_window = True
    #: The number of float32 copies of the scores that exist at the same time: the operand and the result of softmax.
    float32_score_copy_count: ClassVar[int] = 2

    def get_error_bound(self, problem: AttentionProblem) -> float:
        # Allow larger errors than for other kernels, because this kernel also rounds the scores to 16 bits. The largest
        # error in results/ is 7.5e-3, in bfloat16.
        return super().get_error_bound(problem) * 2.4

    def explain_unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if shape.causal and shape.seqlen_q > shape.seqlen_k:
            return f"{self.name} gives NaN for queries that see no key: use at most as many queries as keys"
        return super().explain_unsupported_shape(problem, shape)

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        assert isinstance(backend, TorchBackend)
        _require_memory_for_scores(backend, problem, shape, self.float32_score_copy_count)
        heads_per_kv_head, masked = shape.heads // shape.kv_heads, make_dense_mask(shape, backend.device)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if heads_per_kv_head > 1:
                k, v = k.repeat_interleave(heads_per_kv_head, dim=1), v.repeat_interleave(heads_per_kv_head, dim=1)
            return compute_softmax_weights(q @ k.transpose(-2, -1), shape.head_dim, masked) @ v

        return attend

    def make_part_launches(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape, pool: OperandPool
    ) -> dict[str, tuple[int, Callable[[], object]]]:
        """Return the FLOP and the launch function of each part of the forward pass: ``scores``, ``softmax`` and
        ``values``.

        The FLOP include masked pairs of a query and a key.
        """
        assert isinstance(backend, TorchBackend)
        (buffers,) = split_buffers_into_sets(take_pool_buffers(pool, problem.list_buffers(shape, 1)), 1)
        q, k, v = (self.view_operands(problem, shape, buffers)[name] for name in "qkv")
        heads_per_kv_head, masked = shape.heads // shape.kv_heads, make_dense_mask(shape, backend.device)
        k, v = k.repeat_interleave(heads_per_kv_head, dim=1), v.repeat_interleave(heads_per_kv_head, dim=1)
        unscaled_scores = q @ k.transpose(-2, -1)
        weights = compute_softmax_weights(unscaled_scores, shape.head_dim, masked)
        return {
            "scores": (2 * unscaled_scores.numel() * shape.head_dim, lambda: q @ k.transpose(-2, -1)),
            "softmax": (
                _SOFTMAX_FLOP_PER_SCORE * unscaled_scores.numel(),
                lambda: compute_softmax_weights(unscaled_scores, shape.head_dim, masked),
            ),
            "values": (2 * unscaled_scores.numel() * v.shape[-1], lambda: weights @ v),
        }


def make_dense_mask(shape: AttentionShape, device: torch.device) -> torch.Tensor | None:
    """Make a mask [queries, keys] that is True where a key is masked; None if all queries see all keys."""
    if not shape.causal and shape.window is None:
        return None
    return torch.cat([masked for _, masked in yield_row_blocks(shape, device)])


def compute_softmax_weights(unscaled_scores: torch.Tensor, head_dim: int, masked: torch.Tensor | None) -> torch.Tensor:
    """Scale and mask the elements of Q K^T, and return their softmax. ``masked``: True where a key is masked."""
    scores = unscaled_scores * (1 / math.sqrt(head_dim))
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    wide = torch.float32 if unscaled_scores.dtype.itemsize < 4 else unscaled_scores.dtype
    return torch.softmax(scores, dim=-1, dtype=wide).to(unscaled_scores.dtype)


class CompiledEagerAttention(EagerAttention):
    """The kernel ``eager``, compiled with torch.compile. Compiler passes that would replace it with SDPA are off."""

    name = "compiled-eager"
    is_tried_by_default = False
    float32_score_copy_count = 0

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return backend.explain_missing_compiler() or super().explain_unavailability(backend)

    def apply_settings(self, backend: Backend, problem: AttentionProblem) -> AbstractContextManager[object]:
        return keep_backward_buffers()

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        return compile_with_static_shapes(
            super().bind_operands(backend, problem, shape), options={"pattern_matcher": False}
        )


# -- FlexAttention -----------------------------------------------------------------------------------------------------


#: The largest number of pairs of a query and a key for which mamf makes a block mask from a dense mask. A dense mask
#: takes several bytes of memory per pair.
_MAX_DENSE_MASK_PAIRS = 2**28


def explain_flex_attention_unavailability(backend: Backend, needs_compiler: bool = True) -> Unavailability | None:
    """Return why FlexAttention cannot run on this backend, or None if it can.

    ``needs_compiler``: whether the caller compiles FlexAttention with torch.compile.
    """
    if needs_compiler and (reason := backend.explain_missing_compiler()):
        return reason
    try:
        import torch.nn.attention.flex_attention  # noqa: F401
    except Exception as error:  # The import fails if the build of torch has no compiler.
        return Unavailability(
            f"FlexAttention cannot be loaded: {get_first_message_line(error)}", "pip install --upgrade torch"
        )
    return None


class FlexAttention(TorchAttention):
    """The kernel FlexAttention, compiled with torch.compile. Without compilation, it would write all scores to memory.

    mamf compiles the kernel and makes its block mask outside of the timed launches.
    """

    name = "flex"
    is_tried_by_default = False
    dtypes = ("bfloat16", "float16", "float32")
    head_dims = range(16, 257, 8)
    supports_window = True

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_flex_attention_unavailability(backend) or super().explain_unavailability(backend)

    def explain_unsupported_problem(self, backend: Backend, problem: AttentionProblem) -> str | None:
        if backend.runtime == "host" and problem.has_backward_pass:
            return f"{self.name} has no backward pass on a CPU: use --direction fwd"
        return super().explain_unsupported_problem(backend, problem)

    def apply_settings(self, backend: Backend, problem: AttentionProblem) -> AbstractContextManager[object]:
        return keep_backward_buffers()

    def bind_operands(
        self, backend: Backend, problem: AttentionProblem, shape: AttentionShape
    ) -> Callable[..., torch.Tensor]:
        assert isinstance(backend, TorchBackend)
        from torch.nn.attention.flex_attention import flex_attention

        mask, has_groups = make_flex_block_mask(shape, backend.device), shape.heads != shape.kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=has_groups)

        return compile_with_static_shapes(attend)


def make_flex_block_mask(shape: AttentionShape, device: torch.device) -> Any:
    """Make FlexAttention's block mask, which says which key blocks each query block sees; None if all queries see all
    keys.
    """
    if not shape.causal and shape.window is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    offset = shape.seqlen_k - shape.seqlen_q
    after = 0 if shape.causal or shape.window is None else shape.window

    def is_visible(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = query + offset - key
        seen = distance >= -after
        return seen if shape.window is None else seen & (distance <= shape.window)

    is_small = shape.seqlen_q * shape.seqlen_k <= _MAX_DENSE_MASK_PAIRS
    # If there are many pairs, compile create_block_mask. The compiled function does not allocate a dense mask, which
    # would take 17 GB for 131072 tokens.
    create_mask: Any = create_block_mask if is_small else torch.compile(create_block_mask)
    return create_mask(is_visible, None, None, shape.seqlen_q, shape.seqlen_k, device=str(device))
