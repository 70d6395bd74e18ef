"""Call AITER on a paged cache: its batched prefill kernel, which also supports decode, and its MLA decode kernel."""

from __future__ import annotations

import torch

from mamf.operations.attention.aiter import AiterLibrary
from mamf.operations.decode.operation import DecodeProblem, DecodeShape
from mamf.operations.decode.torch_decode import CacheTables, LibraryDecodeKernel, PlannedKernel, view_as_pages
from mamf.torch_backend import TorchBackend


class AiterKvcache(AiterLibrary, LibraryDecodeKernel):
    name = "aiter-kvcache"
    function_name = "mha_batch_prefill_func"
    supports_contiguous_cache = False
    head_dims = (64, 128, 256)

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        function = self.import_library_quietly()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            return function(
                q,
                view_as_pages(shape, k),
                view_as_pages(shape, v),
                tables.query_starts,
                tables.page_starts,
                tables.concatenated_pages,
                shape.queries,
                shape.cache_len,
                softmax_scale=shape.score_scale,
                causal=shape.queries > 1,
                kv_last_page_lens=tables.last_page_lengths,
            )

        return PlannedKernel(attend)


class AiterMla(AiterLibrary, LibraryDecodeKernel):
    """AITER's decode kernel for MLA, where the cache has one latent vector per token instead of keys and values.

    Each launch allocates the output, because AITER's function does not.
    """

    name = "aiter-mla"
    module_name = "aiter.mla"
    function_name = "mla_decode_fwd"
    supports_contiguous_cache = False
    supports_latent_cache = True
    head_dims = ()

    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        function = self.import_library_quietly()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            output = q.new_empty(*q.shape[:-1], shape.head_dim_v)
            function(
                q,
                view_as_pages(shape, k),
                output,
                tables.query_starts,
                tables.page_starts,
                tables.concatenated_pages,
                tables.last_page_lengths,
                shape.queries,
                page_size=shape.page_size,
                sm_scale=shape.score_scale,
                causal=shape.queries > 1,
            )
            return output

        return PlannedKernel(attend)
