"""Fakes of libraries for attention over a KV cache. They compute with plain torch.

Each fake has the signatures, tensor layouts and restrictions of its library, and records its calls in the list
``recorded_calls``. The signatures are those of flash-attention 0251105a (flash_attn_interface.py and
hopper/flash_attn_interface.py), flashinfer 0.5.3 (decode.py, prefill.py, mla.py) and ROCm/aiter e4048607 (ops/mha.py,
mla.py).
"""

import itertools
import math
from types import SimpleNamespace

import torch
from attention_fakes import install, pretend_versions, require


def compute_attention(q, k, v, scale, causal):
    """Compute attention for one sequence. All tensors have the shape [tokens, heads, head dimension].

    A causal mask is aligned to the bottom right.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        last_visible_key = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(torch.arange(k.shape[0]) > last_visible_key, -math.inf)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v).to(q.dtype)


def compute_by_sequence(q, starts, read_tokens, scale, causal):
    """Compute attention for each sequence separately, and return the concatenated outputs.

    ``q``: the queries of all sequences, one sequence after another. ``starts``: the index of the first query of each
    sequence, and the total number of queries at the end. ``read_tokens``: a function that takes the index of a sequence
    and returns its keys and values.
    """
    starts = [int(each) for each in starts]
    rows = [slice(*pair) for pair in itertools.pairwise(starts)]
    outputs = [compute_attention(q[each], *read_tokens(index), scale, causal) for index, each in enumerate(rows)]
    return torch.cat(outputs)


def read_pages(cache, pages, length):
    """Return the first ``length`` tokens from these pages of the cache."""
    return cache[[int(page) for page in pages]].flatten(0, 1)[: int(length)]


def require_int32(*tensors):
    assert all(each.dtype == torch.int32 for each in tensors if each is not None), "lengths and tables must be int32"


# -- FlashAttention ----------------------------------------------------------------------------------------------------


def compute_with_kvcache(q, k_cache, v_cache, lengths, table, starts, scale, causal, qv=None):
    """Compute attention over the cache, as ``flash_attn_with_kvcache`` does.

    Without ``starts``, ``q`` has the shape [batch, queries, heads, head dimension]. With ``starts``, sequences may have
    different numbers of queries (see ``compute_by_sequence``). ``qv``: more columns of the queries, which are
    multiplied by the values instead of the keys.
    """
    if qv is not None:
        q, k_cache = torch.cat((q, qv), -1), torch.cat((k_cache, v_cache), -1)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1

    def read_tokens(index):
        if table is None:
            length = k_cache.shape[1] if lengths is None else int(lengths[index])
            return k_cache[index, :length], v_cache[index, :length]
        count = -(-int(lengths[index]) // k_cache.shape[1])
        return tuple(read_pages(each, table[index, :count], lengths[index]) for each in (k_cache, v_cache))

    if starts is not None:
        return compute_by_sequence(q, starts, read_tokens, scale, causal)
    return torch.stack([compute_attention(q[index], *read_tokens(index), scale, causal) for index in range(len(q))])


def compute_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, table, scale, causal):
    lengths = cu_seqlens_k.diff()

    def read_tokens(index):
        if table is None:
            rows = slice(int(cu_seqlens_k[index]), int(cu_seqlens_k[index + 1]))
            return k[rows], v[rows]
        count = -(-int(lengths[index]) // k.shape[1])
        return tuple(read_pages(each, table[index, :count], lengths[index]) for each in (k, v))

    return compute_by_sequence(q, cu_seqlens_q, read_tokens, scale, causal)


def flash_attn_2(monkeypatch, recorded_calls):
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        require_int32(cache_seqlens, block_table)
        refuse_page(k_cache, block_table)
        recorded_calls.append("kvcache")
        return compute_with_kvcache(q, k_cache, v_cache, cache_seqlens, block_table, None, softmax_scale, causal)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        require_int32(cu_seqlens_q, cu_seqlens_k, block_table)
        refuse_page(k, block_table)
        require(max(cu_seqlens_q.diff()) <= max_seqlen_q and max(cu_seqlens_k.diff()) <= max_seqlen_k, "max_seqlen")
        recorded_calls.append("varlen")
        return compute_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, softmax_scale, causal)

    def refuse_page(cache, table):
        require(table is None or cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")

    pretend_versions(monkeypatch, flash_attn="2.8.3")
    functions = {"flash_attn_with_kvcache": flash_attn_with_kvcache, "flash_attn_varlen_func": flash_attn_varlen_func}
    return install(monkeypatch, "flash_attn", flash_attn_func=None, **functions)


def flash_attn_3(monkeypatch, recorded_calls):
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        require_int32(cache_seqlens, page_table, cu_seqlens_q)
        require((cu_seqlens_q is None) == (max_seqlen_q is None), "max_seqlen_q must be provided with cu_seqlens_q")
        require(qv is None or (q.shape[-1] <= 64 and v_cache.shape[-1] >= 256), "q_v is for hdim 64 and hdim_v 256")
        recorded_calls.append("kvcache" if qv is None else "kvcache with qv")
        return compute_with_kvcache(
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, softmax_scale, causal, qv
        )

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        require_int32(cu_seqlens_q, cu_seqlens_k)
        recorded_calls.append("varlen")
        return compute_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, None, softmax_scale, causal)

    pretend_versions(monkeypatch, flash_attn_3="3.0.0")
    functions = {"flash_attn_with_kvcache": flash_attn_with_kvcache, "flash_attn_varlen_func": flash_attn_varlen_func}
    return install(monkeypatch, "flash_attn_interface", flash_attn_func=None, **functions)


# -- FlashInfer --------------------------------------------------------------------------------------------------------


def flashinfer(monkeypatch, recorded_calls):
    def compute_by_pages(q, starts, indptr, indices, lengths, caches, scale, causal):
        def read_tokens(index):
            pages = indices[int(indptr[index]) : int(indptr[index + 1])]
            return tuple(read_pages(each, pages, lengths[index]) for each in caches)

        return compute_by_sequence(q, starts, read_tokens, scale, causal)

    def compute_lengths(indptr, last_page_len, page_size):
        return (indptr.diff() - 1) * page_size + last_page_len

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
            paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
            backend="auto", jit_args=None,
        ):  # fmt: skip
            assert kv_layout == "NHD"
            assert not float_workspace_buffer.any(), "the workspace must be initialized to 0"
            recorded_calls.append({"tensor cores": use_tensor_cores, "graph": use_cuda_graph})

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
            data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None,
            seq_lens=None, fixed_split_size=None, disable_split_kv=False,
        ):  # fmt: skip
            require_int32(indptr, indices, last_page_len)
            self.planned = indptr, indices, compute_lengths(indptr, last_page_len, page_size), sm_scale
            self.dtypes = q_data_type, kv_data_type
            recorded_calls.append("plan")

        def run(
            self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=1,
        ):  # fmt: skip
            assert self.dtypes == (q.dtype, paged_kv_cache[0].dtype)
            indptr, indices, lengths, scale = self.planned
            starts = torch.arange(len(q) + 1)
            return compute_by_pages(q, starts, indptr, indices, lengths, paged_kv_cache, scale, False)

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(
            self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
            paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None,
            custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        ):  # fmt: skip
            assert kv_layout == "NHD"

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
            pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
            logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
            non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
            max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
            max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
        ):  # fmt: skip
            require_int32(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            lengths = compute_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size)
            self.planned = qo_indptr, paged_kv_indptr, paged_kv_indices, lengths
            self.scale, self.causal = sm_scale, causal
            recorded_calls.append("plan")

        def run(
            self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
            return_lse=False, enable_pdl=None, window_left=None, sinks=None,
        ):  # fmt: skip
            return compute_by_pages(q, *self.planned, paged_kv_cache, self.scale, self.causal)

    class BatchMLAPagedAttentionWrapper:
        def __init__(
            self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
            kv_len_arr=None, backend="auto",
        ):  # fmt: skip
            pass

        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
            causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
        ):  # fmt: skip
            require_int32(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            require((head_dim_ckv, head_dim_kpe) == (512, 64), "latents are 512 and 64")
            self.planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr
            self.scale, self.causal = sm_scale, causal
            recorded_calls.append("plan")

        def run(
            self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None,
            kv_len=None, page_table=None, return_lse_base_on_e=False,
        ):  # fmt: skip
            assert ckv_cache.ndim == kpe_cache.ndim == 3
            k = torch.cat((ckv_cache, kpe_cache), -1)[:, :, None]
            q = torch.cat((q_nope, q_pe), -1)
            return compute_by_pages(q, *self.planned, (k, ckv_cache[:, :, None]), self.scale, self.causal)

    pretend_versions(monkeypatch, flashinfer_python="0.5.3")
    return install(
        monkeypatch,
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper),
    )


# -- AITER -------------------------------------------------------------------------------------------------------------


def aiter(monkeypatch, recorded_calls):
    def make_token_reader(caches, indptr, indices, last_page_lens):
        def read_tokens(index):
            pages = indices[int(indptr[index]) : int(indptr[index + 1])]
            length = (len(pages) - 1) * caches[0].shape[1] + int(last_page_lens[index])
            return tuple(read_pages(each, pages, length) for each in caches)

        return read_tokens

    def mha_batch_prefill_func(
        q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1), alibi_slopes=None,
        deterministic=False, return_lse=False, return_attn_probs=False, out=None, kv_last_page_lens=None,
        block_table=None, seqlen_k=None, q_descale=None, k_descale=None, v_descale=None, kv_block_descale=None,
        sink_ptr=None, sink_size=0,
    ):  # fmt: skip
        require(k.dim() == v.dim() == 4, "Batch prefill requires 5D vectorized, 4D linear, or 3D linear K/V tensors")
        require_int32(cu_seqlens_q, kv_indptr, kv_page_indices, kv_last_page_lens)
        recorded_calls.append("prefill")
        token_reader = make_token_reader((k, v), kv_indptr, kv_page_indices, kv_last_page_lens)
        return compute_by_sequence(q, cu_seqlens_q, token_reader, softmax_scale, causal)

    def mla_decode_fwd(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1, nhead_kv=1,
        sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None,
        work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None,
        q_scale=None, kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False, g_kv_indptr=None,
        cp_world_size=1, cp_rank=0, causal=True,
    ):  # fmt: skip
        _, size, heads, _ = kv_buffer.shape
        assert (size, heads) == (page_size, nhead_kv)
        recorded_calls.append("mla")
        caches = kv_buffer, kv_buffer[..., : o.shape[-1]]
        token_reader = make_token_reader(caches, kv_indptr, kv_indices, kv_last_page_lens)
        o.copy_(compute_by_sequence(q, qo_indptr, token_reader, sm_scale, causal))
        return None, None

    pretend_versions(monkeypatch, amd_aiter="0.1.12")
    module = install(monkeypatch, "aiter", mha_batch_prefill_func=mha_batch_prefill_func)
    install(monkeypatch, "aiter.mla", mla_decode_fwd=mla_decode_fwd)
    return module


#: By kernel: the fixture that simulates the vendor, the compute capability of the device, and the fake library.
LIBRARIES = {
    "flash-attn-2-kvcache": ("cuda", (8, 0), flash_attn_2),
    "flash-attn-3-kvcache": ("cuda", (9, 0), flash_attn_3),
    "flashinfer-decode": ("cuda", (9, 0), flashinfer),
    "flashinfer-prefill": ("cuda", (9, 0), flashinfer),
    "flashinfer-mla": ("cuda", (9, 0), flashinfer),
    "aiter-kvcache": ("rocm", (9, 4), aiter),
    "aiter-mla": ("rocm", (9, 4), aiter),
}
