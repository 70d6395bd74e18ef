"""Fake attention libraries with the signatures, layouts, return types and pitfalls of the real libraries.

They compute correct results with plain torch on the CPU. Each call appends its options to the list ``recorded_calls``.
"""

import functools
import importlib.metadata
import math
import sys
import types

import torch

from mamf.machine.environment import get_package_version

BLOCK_Q, BLOCK_K = 128, 64


def attention(q, k, v, causal=False, window=(None, None), used_pairs=None):
    """Compute attention for tensors (batch, heads, length, width). Masks are aligned to the bottom right.

    ``used_pairs``: a boolean mask of the pairs of query and key to use; None for all pairs.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = q.float() @ k.float().transpose(-2, -1) / math.sqrt(q.shape[-1])
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    left, right = window
    masked = keys > rows if causal else torch.zeros(scores.shape[-2:], dtype=torch.bool)
    if left is not None:
        masked = masked | (keys < rows - left)
    if right is not None:
        masked = masked | (keys > rows + right)
    if used_pairs is not None:
        masked = masked | ~used_pairs
    return (torch.softmax(scores.masked_fill(masked, -math.inf), -1) @ v.float()).to(q.dtype)


def attention_bshd(q, k, v, **options):
    """Compute attention like ``attention``, but for tensors (batch, length, heads, width)."""
    return attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), **options).transpose(1, 2)


def install(monkeypatch, name, **attributes):
    """Install and return a fake module with this dotted name. Also install parent packages that are missing."""
    module = types.ModuleType(name)
    module.__path__ = []  # makes it a package, so that it may contain modules
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        parent_module = sys.modules.get(parent) or install(monkeypatch, parent)
        monkeypatch.setattr(parent_module, child, module, raising=False)
    return module


def pretend_versions(monkeypatch, **versions):
    """Pretend that distributions are installed in these versions, or are not installed if the version is None.

    An underscore in a keyword means a dash in the distribution's name. Other distributions do not change.
    """
    fake_versions = {name.replace("_", "-"): version for name, version in versions.items()}
    real_version = importlib.metadata.version

    def version(name):
        if name in fake_versions and fake_versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return fake_versions.get(name) or real_version(name)

    monkeypatch.setattr("mamf.machine.environment.version", version)
    get_package_version.cache_clear()


def fail_to_import(monkeypatch, name, error):
    """Make the import of a module raise ``error``, as the import of an installed but broken module does."""

    class Finder:
        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname == name:
                raise error

    for module_name in [module_name for module_name in sys.modules if f"{module_name}.".startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module_name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def require(condition, message, error=RuntimeError):
    """Raise ``error`` if a condition is false, as C++ libraries do for arguments that they do not support."""
    if not condition:
        raise error(message)


def require_half(*tensors, message="FlashAttention only support fp16 and bf16 data type", error=RuntimeError):
    require(all(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors), message, error)


# -- FlashAttention --------------------------------------------------------------------------------------------------


def parse_window(window_size, unlimited):
    assert all(end != -1 for end in window_size) or unlimited == -1, "write an unlimited end as None, not as -1"
    return tuple(None if end == unlimited else end for end in window_size)


def flash_attn_2(monkeypatch, recorded_calls, lacks=()):
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        require_half(q, k, v)
        require(q.dtype not in lacks, "this build has bf16 only")
        require(q.shape[-1] <= 256, "FlashAttention forward only supports head dimension at most 256")
        require(q.shape[-1] == v.shape[-1], "v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")
        recorded_calls.append({"window_size": window_size})
        return attention_bshd(q, k, v, causal=causal, window=parse_window(window_size, -1))

    pretend_versions(monkeypatch, flash_attn="2.8.3")
    module = install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func)
    # The real package contains an early copy of FlashAttention 4, but does not install the packages that it requires.
    fail_to_import(monkeypatch, "flash_attn.cute", ModuleNotFoundError("No module named 'cutlass'", name="cutlass"))
    return module


def flash_attn_3(monkeypatch, recorded_calls, name="flash_attn_interface", with_lse=False, lacks=()):
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        require_half(q, k, v, message="FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
        require(q.dtype not in lacks, "This flash attention build does not support FP16.")
        d, dv, width_message = (
            q.shape[-1],
            v.shape[-1],
            "FlashAttention forward only supports head dimension at most 256",
        )
        require(d <= 256, width_message)
        width_pairs = (
            "we only support Q/K headdim in (128, 192] and V headdim in (96, 128], or (Q/K <= 64 and V <= 512)."
        )
        is_supported_pair = (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512)
        require(d == dv or is_supported_pair, f"If V headdim is different from Q/K dim, {width_pairs}")
        recorded_calls.append({"num_splits": num_splits})
        out = attention_bshd(q, k, v, causal=causal, window=parse_window(window_size, -1))
        if out.requires_grad:
            out.register_hook(lambda gradient: require(dv <= 256, width_message))
        return (out, torch.zeros(1)) if with_lse else out

    pretend_versions(monkeypatch, flash_attn_3="3.0.0")
    return install(monkeypatch, name, flash_attn_func=flash_attn_func)


def flash_attn_4(monkeypatch, recorded_calls):
    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, return_lse=False,
    ):  # fmt: skip
        require_half(q, k, v, message="inputs must be float16 or bfloat16", error=AssertionError)
        assert not q.requires_grad or torch.cuda.get_device_capability()[0] != 8, "Unsupported compute capability"
        assert num_splits == 1, "SplitKV not supported on SM 9.0"
        dims, major = (q.shape[-1], v.shape[-1]), torch.cuda.get_device_capability()[0]
        is_wide = dims in ((192, 128), (256, 256)) if major in (10, 11) else max(dims) <= 256
        assert max(dims) <= 128 or is_wide, f"(head_dim, head_dim_v)={dims} is not supported on SM{major}0"
        recorded_calls.append({"window_size": window_size, "num_splits": num_splits})
        return attention_bshd(q, k, v, causal=causal, window=parse_window(window_size, None)), None

    # In the real package, ``flash_attn`` is a namespace package that contains only ``cute``.
    pretend_versions(monkeypatch, flash_attn_4="4.0.0b36")
    return install(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func, __version__="0.0.0")


# -- Sage and Sparge -------------------------------------------------------------------------------------------------


def sage_1(monkeypatch, recorded_calls):
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True):
        assert tensor_layout == "HND"
        assert q.shape[-1] in (64, 96, 128)
        recorded_calls.append({"k": k.clone()})
        if smooth_k:
            k -= k.mean(dim=-2, keepdim=True)
        return attention(q, k, v, is_causal)

    pretend_versions(monkeypatch, sageattention="1.0.6")
    return install(monkeypatch, "sageattention", sageattn=sageattn)


def sage_2(monkeypatch, recorded_calls, **flags):
    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
        require_half(q, k, v)
        assert tensor_layout == "HND"
        assert not kwargs
        flag = f"SM{10 * torch.cuda.get_device_capability()[0]}"
        assert flags.get(f"{flag}_ENABLED", True), f"{flag} kernel is not available."
        assert q.shape[-1] == v.shape[-1] <= 128
        recorded_calls.append({})
        return attention(q, k, v, is_causal)

    pretend_versions(monkeypatch, sageattention="2.2.0")
    return install(monkeypatch, "sageattention", sageattn=sageattn, sageattn_qk_int8_pv_fp16_triton=sageattn)


def select_key_blocks(q, k, causal, topk):
    """Return a mask of the key blocks that SpargeAttn uses for each query block.

    These are the key blocks with the highest scores. A score is computed from the means of two blocks. ``topk``: the
    share of key blocks to use.
    """

    def average_blocks(tensor, size):
        padded = torch.nn.functional.pad(tensor.float(), (0, 0, 0, -tensor.shape[2] % size))
        return padded.unflatten(2, (-1, size)).mean(3)

    scores = average_blocks(q, BLOCK_Q) @ average_blocks(k, BLOCK_K).transpose(-2, -1)
    is_below = torch.arange(scores.shape[-1]) < (torch.arange(scores.shape[-2])[:, None] + 1) * BLOCK_Q // BLOCK_K
    if causal:
        scores = scores.masked_fill(~is_below, -math.inf)
    chosen = scores.argsort(-1, descending=True)[..., : max(1, int(topk * scores.shape[-1]))]
    is_used = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return is_used & is_below if causal else is_used


def spas_sage_attn(monkeypatch, recorded_calls):
    def call(
        q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, smooth_k=True, simthreshd1=0.6,
        cdfthreshd=0.98, topk=1.0, pvthreshd=50, attention_sink=False, tensor_layout="HND",
        output_dtype=torch.float16, return_sparsity=False, masks_elements=True,
    ):  # fmt: skip
        assert tensor_layout == "HND"
        assert q.size(-2) >= 128, "seq_len should be not less than 128."
        assert q.size(-1) in (64, 128), "headdim should be in [64, 128]."
        assert smooth_k, "without smooth_k, km is not defined"
        recorded_calls.append({"return_sparsity": return_sparsity, "topk": topk})
        blocks = select_key_blocks(q, k, is_causal, topk)
        pairs = blocks.repeat_interleave(BLOCK_Q, -2).repeat_interleave(BLOCK_K, -1)
        pairs = pairs[:, :, : q.shape[2], : k.shape[2]]
        out = attention(q, k, v, is_causal and masks_elements, used_pairs=pairs)
        columns = (blocks.shape[3] + 2) // 2 if is_causal else blocks.shape[3]
        total = blocks.shape[0] * blocks.shape[1] * blocks.shape[2] * columns
        return (out, 1 - blocks.sum().item() / total) if return_sparsity else out

    masks_by_name = {
        f"spas_sage{version}_attn_meansim{topk}_cuda": version == "" for version in ("", "2") for topk in ("", "_topk")
    }  # fmt: skip
    functions = {
        name: functools.partial(call, masks_elements=masks_elements) for name, masks_elements in masks_by_name.items()
    }
    pretend_versions(monkeypatch, spas_sage_attn="0.1.0")
    return install(monkeypatch, "spas_sage_attn", **functions)


# -- xFormers, AITER and Gaudi ---------------------------------------------------------------------------------------

NO_OPERATOR = """No operator found for `memory_efficient_attention_forward` with inputs:
     query       : shape=(1, 256, 2, 64) (torch.bfloat16)
`fa2F@2.8.4` is not supported because:
    xFormers wasn't build with CUDA support
    requires device with capability > (8, 0)
`cutlassF-pt` is not supported because:
    xFormers wasn't build with CUDA support"""


class LowerTriangularMask:
    """A causal mask that is aligned to the top left."""


def xformers(monkeypatch, recorded_calls, is_built=True):
    def memory_efficient_attention(
        query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
    ):  # fmt: skip
        assert attn_bias is None or query.shape[1] == key.shape[1]
        if not is_built:
            raise NotImplementedError(NO_OPERATOR)
        recorded_calls.append({"ndim": query.ndim, "key_stride": key.stride()})
        causal = isinstance(attn_bias, LowerTriangularMask)
        if query.ndim == 4:
            return attention_bshd(query, key, value, causal=causal)
        if query.requires_grad:
            raise NotImplementedError("BMGHK is not supported in the backward pass")
        assert key.shape[3] == query.shape[3], "kv heads are not broadcast"
        return attention_bshd(*(each.flatten(2, 3) for each in (query, key, value)), causal=causal).unflatten(
            2, query.shape[2:4]
        )

    operators = {"memory_efficient_attention": memory_efficient_attention, "LowerTriangularMask": LowerTriangularMask}
    pretend_versions(monkeypatch, xformers="0.0.35")
    return install(monkeypatch, "xformers.ops", **operators)


def aiter(monkeypatch, recorded_calls, is_old=False):
    """Install a fake AITER, which was checked against ROCm/aiter e4048607 (aiter/ops/mha.py).

    Tensors are (batch, length, heads, width). A window of two numbers means the same as one of three numbers that has
    no sink. The assembly kernels run on gfx942, gfx950 and gfx1250.
    """

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1, 0), bias=None,
        alibi_slopes=None, deterministic=True, return_lse=False, return_attn_probs=False, how_v3_bf16_cvt=1,
        cu_seqlens_q=None, cu_seqlens_kv=None, sink_ptr=None, num_splits=0,
    ):  # fmt: skip
        assert len(window_size) == 2 or window_size[2] == 0, "this fake does not support a sink"
        require_half(q, k, v)
        if torch.is_grad_enabled() and q.requires_grad:
            assert return_lse
        recorded_calls.append({"deterministic": deterministic})
        out = attention_bshd(q, k, v, causal=causal, window=parse_window(window_size[:2], -1))
        # Older releases always return a tuple.
        return (out, torch.zeros(1)) if return_lse else (out,) if is_old else out

    pretend_versions(monkeypatch, amd_aiter="0.1.12")
    return install(monkeypatch, "aiter", flash_attn_func=flash_attn_func)


def fused_sdpa(monkeypatch, recorded_calls):
    class FusedSDPA:
        @staticmethod
        def apply(
            q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, softmax_mode="None",
            recompute_mode=None, /,
        ):  # fmt: skip
            recorded_calls.append({"recompute_mode": recompute_mode, "softmax_mode": softmax_mode})
            return attention(q, k, v, is_causal)

    return install(monkeypatch, "habana_frameworks.torch.hpex.kernels", FusedSDPA=FusedSDPA)


#: For each kernel: the fixture of the vendor's device, the compute capability, and the function that installs the
#: fake library.
LIBRARIES = {
    "aiter": ("rocm", (9, 4), aiter),
    "flash-attn-2": ("cuda", (8, 0), flash_attn_2),
    "flash-attn-3": ("cuda", (9, 0), flash_attn_3),
    "flash-attn-4": ("cuda", (9, 0), flash_attn_4),
    "fused-sdpa": ("hpu", None, fused_sdpa),
    "sage-1": ("cuda", (8, 6), sage_1),
    "sage-2": ("cuda", (9, 0), sage_2),
    "sparge-fp16-threshold": ("cuda", (9, 0), spas_sage_attn),
    "sparge-fp16-topk": ("cuda", (9, 0), spas_sage_attn),
    "sparge-fp8-threshold": ("cuda", (9, 0), spas_sage_attn),
    "sparge-fp8-topk": ("cuda", (9, 0), spas_sage_attn),
    "xformers": ("cuda", (9, 0), xformers),
}
