"""Call torch's own attention over a cache: scaled_dot_product_attention, and FlexAttention with a page table."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from mamf.backend import Backend, Unavailability
from mamf.operations.attention.torch_attention import NO_BACKEND_ERROR_TEXTS
from mamf.operations.attention.torch_kernels import explain_flex_attention_unavailability
from mamf.operations.compilation import compile_with_static_shapes
from mamf.operations.decode.operation import DecodeProblem, DecodeShape
from mamf.operations.decode.torch_decode import CacheTables, PlannedKernel, TorchDecodeKernel
from mamf.torch_backend import TorchBackend


class SdpaKvcache(TorchDecodeKernel):
    """A kernel that calls scaled_dot_product_attention on a contiguous cache. All sequences must have the same length.

    Decode needs a causal mask that is aligned to the bottom right, but torch aligns it to the top left. The two masks
    are the same only if there are as many queries as keys. So this kernel supports this case, and single queries, which
    need no mask.
    """

    name = "sdpa-kvcache"
    dtypes = ("bfloat16", "float16", "float32", "float64")
    supports_pages = False
    supports_ragged_lengths = False
    supports_latent_cache = True
    head_dims = range(8, 513, 8)

    def explain_unsupported_shape(self, problem: DecodeProblem, shape: DecodeShape) -> str | None:
        if shape.queries not in (1, shape.cache_len):
            return f"{self.name} aligns causal masks to the top left: use --query-lens 1, or as many as --cache-lens"
        return super().explain_unsupported_shape(problem, shape)

    def is_refusal(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_BACKEND_ERROR_TEXTS)

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            q, k, v = (each.unflatten(0, (shape.batch, -1)).transpose(1, 2) for each in (q, k, v))
            has_groups, is_causal = shape.heads_per_kv_head > 1, shape.queries > 1
            output = scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=shape.score_scale, enable_gqa=has_groups
            )
            return output.transpose(1, 2)

        return PlannedKernel(attend)


#: The number of keys in the smallest block that FlexAttention supports on all cards.
_MIN_BLOCK_KEYS = 128


class FlexKvcache(TorchDecodeKernel):
    """The kernel FlexAttention over a paged cache, with the page table in its block mask.

    mamf compiles the kernel on accelerators, but not on a CPU.
    """

    name = "flex-kvcache"
    is_tried_by_default = False
    dtypes = ("bfloat16", "float16", "float32")
    supports_contiguous_cache = False
    page_size_multiple = _MIN_BLOCK_KEYS
    supports_ragged_queries = False
    head_dims = (16, 32, 64, 128, 256)

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if reason := explain_flex_attention_unavailability(
            backend, backend.is_accelerator
        ) or super().explain_unavailability(backend):
            return reason
        from torch.nn.attention.flex_attention import BlockMask

        if "seq_lengths" in inspect.signature(BlockMask.from_kv_blocks).parameters:
            return None
        return Unavailability(
            f"FlexAttention of torch {torch.__version__} cannot use a page table", "pip install --upgrade torch"
        )

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        from torch.nn.attention.flex_attention import flex_attention

        mask, has_groups = make_block_mask(shape, tables), shape.heads_per_kv_head > 1

        def attend_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return flex_attention(q, k, v, block_mask=mask, scale=shape.score_scale, enable_gqa=has_groups)

        compiled = compile_with_static_shapes(attend_pages) if backend.is_accelerator else attend_pages
        # The row says that the kernel ran uncompiled.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            q = q.unflatten(0, (shape.batch, -1)).transpose(1, 2)
            return compiled(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None]).transpose(1, 2)

        return PlannedKernel(attend, {} if backend.is_accelerator else {"ran": "uncompiled, as always on a CPU"})


def make_block_mask(shape: DecodeShape, tables: CacheTables) -> Any:
    """Make FlexAttention's block mask, which lets the queries of a sequence see only the pages of that sequence."""
    from torch.nn.attention.flex_attention import BlockMask

    assert shape.page_size is not None
    page_size, lengths, page_count = shape.page_size, tables.sequence_lengths, int(tables.page_starts[-1])
    page_order = lengths.new_full((shape.batch, page_count), -1)
    for sequence, pages in enumerate(tables.pages_by_sequence):
        page_order[sequence, list(pages)] = torch.arange(len(pages), dtype=page_order.dtype, device=page_order.device)

    def is_visible(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        page = page_order[batch, position // page_size]
        last_token = lengths[batch] - shape.queries + query
        return (page >= 0) & (page * page_size + position % page_size <= last_token)

    query_blocks = -(-shape.queries // _MIN_BLOCK_KEYS)
    visible_counts = tables.page_starts.diff()[:, None, None].expand(-1, 1, query_blocks).contiguous()
    padded_table = torch.nn.functional.pad(tables.page_table, (0, page_count - tables.page_table.shape[1]))
    indices = padded_table[:, None, None].expand(-1, 1, query_blocks, -1).contiguous()
    return BlockMask.from_kv_blocks(
        visible_counts,
        indices,
        BLOCK_SIZE=(_MIN_BLOCK_KEYS, page_size),
        mask_mod=is_visible,
        seq_lengths=(shape.queries, page_count * page_size),
    )
