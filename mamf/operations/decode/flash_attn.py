"""Call FlashAttention 2 and 3 over a cache of keys and values.

The kernels call ``flash_attn_with_kvcache`` if it supports the lengths of the sequences, and ``flash_attn_varlen_func``
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mamf.operations.attention.flash_attn import FlashAttention2Library, FlashAttention3Library
from mamf.operations.decode.operation import DecodeProblem, DecodeShape
from mamf.operations.decode.torch_decode import CacheTables, LibraryDecodeKernel, PlannedKernel, view_as_pages
from mamf.torch_backend import TorchBackend


class _FlashKvcacheKernel(LibraryDecodeKernel):
    #: The name of the library's keyword argument for the page table.
    page_table_keyword: str
    #: Whether ``flash_attn_with_kvcache`` supports sequences with different numbers of queries, that is, whether it has
    #: the argument ``cu_seqlens_q``.
    supports_ragged_kvcache_queries = False

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        module, is_paged = self.import_library_quietly(), shape.page_size is not None
        options: dict[str, Any] = {"causal": shape.queries > 1, "softmax_scale": shape.score_scale}
        if is_paged:
            options[self.page_table_keyword] = tables.page_table
        if shape.lengths == "equal" or (
            is_paged and (shape.has_equal_query_counts or self.supports_ragged_kvcache_queries)
        ):
            if is_paged:
                options["cache_seqlens"] = tables.sequence_lengths
            if not shape.has_equal_query_counts:
                options |= {"cu_seqlens_q": tables.query_starts, "max_seqlen_q": shape.queries}
            return PlannedKernel(partial(_attend_with_kvcache, module.flash_attn_with_kvcache, options, shape))
        options |= {
            "cu_seqlens_q": tables.query_starts,
            "cu_seqlens_k": tables.token_starts,
            "max_seqlen_q": shape.queries,
            "max_seqlen_k": shape.cache_len,
        }
        return PlannedKernel(partial(_attend_varlen, module.flash_attn_varlen_func, options, shape))


def _attend_with_kvcache(
    function: Any, options: Mapping[str, Any], shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> object:
    if shape.has_equal_query_counts:
        q = q.unflatten(0, (shape.batch, -1))
    k, v = view_as_pages(shape, k), view_as_pages(shape, v)
    if not shape.is_latent:
        return function(q, k, v, **options)
    # If the cache contains latents, the library expects each cached vector in two parts: the last elements, which
    # encode the position, as k, and the elements before them as v. Split each query in the same way into q and qv.
    q, qv, k = q[..., shape.head_dim_v :], q[..., : shape.head_dim_v], k[..., shape.head_dim_v :]
    return function(q, k, v, qv=qv, **options)


def _attend_varlen(
    function: Any, options: Mapping[str, Any], shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> object:
    if shape.page_size is not None:
        k, v = view_as_pages(shape, k), view_as_pages(shape, v)
    return function(q, k, v, **options)


class FlashAttention2Kvcache(FlashAttention2Library, _FlashKvcacheKernel):
    name = "flash-attn-2-kvcache"
    page_table_keyword = "block_table"
    page_size_multiple = 256


class FlashAttention3Kvcache(FlashAttention3Library, _FlashKvcacheKernel):
    name = "flash-attn-3-kvcache"
    page_table_keyword = "page_table"
    alternative_nvidia_install_command = "mamf attention --operation decode --kernel flash-attn-2-kvcache"
    supports_ragged_kvcache_queries = True
    supports_latent_cache = True

    def explain_unsupported_shape(self, problem: DecodeProblem, shape: DecodeShape) -> str | None:
        if shape.is_latent and (shape.page_size is None and shape.lengths != "equal"):
            return f"{self.name} needs a paged latent cache if sequences differ in length: use --page-sizes 64"
        return super().explain_unsupported_shape(problem, shape)
