"""The class of an event: by the operation that launched it first, by its kernel's name second. The tables are data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mamf.operations.tracing.events import ON_DEVICE, Event

UNCLASSIFIED = "unclassified"
COMMUNICATION = "communication"
COPIES = "memory copies"
#: Classes in report order, which is also the priority of classes that are at work at the same time: communication last.
CLASSES = (
    "attention",
    "matmul",
    "convolution",
    "normalization",
    "elementwise",
    "reduction and softmax",
    "embedding",
    "optimizer",
    COPIES,
    "other",
    UNCLASSIFIED,
    COMMUNICATION,
)


class _Rule(NamedTuple):
    name: str
    pattern: str


#: Operations whose class applies to all operations that they call: the products of an attention are attention.
ENCLOSING = (
    _Rule(COMMUNICATION, r"nccl:|gloo:|ucc:|mpi:|c10d::|_c10d_functional::|record_param_comms"),
    _Rule(
        "attention",
        r"aten::_?scaled_dot_product_|aten::_(flash|efficient|cudnn|fused_sdp)\w*attention|aten::_fused_sdp_choice"
        r"|ScaledDotProduct\w*Attention|\w*flex_attention|flash_attn\w*::|\w*FlashAttn\w*|xformers\w*::|_fMHA\b"
        r"|aiter::\w*(mha|fmha|attn|attention)|sageattention\w*::|vllm::\w*attention",
    ),
    _Rule("optimizer", r"Optimizer\.(step|zero_grad)#"),
)
#: Other operations; the innermost operation with a rule decides.
OPERATIONS = (
    _Rule("attention", r"\w*::\w*(attention|attn)\w*"),
    _Rule(
        "matmul",
        r"aten::(_?scaled_(grouped_)?mm|addmm|addmm_|_addmm_activation|mm|bmm|baddbmm_?|addbmm_?|matmul|linear|addmv_?"
        r"|mv|dot|vdot|ger|addr_?|outer|einsum|bilinear|_trilinear|_int_mm|_grouped_mm|_weight_int\w*pack_mm\w*"
        r"|tensordot|kron|linear_backward|matmul_backward|_thnn_fused_lstm_cell|mkl\w*linear\w*|_sparse\w*mm\w*)\b"
        r"|(mkl|mkldnn|onednn|quantized|fbgemm|torchao|deep_gemm|bitsandbytes)::\w*(linear|mm|gemm)\w*",
    ),
    _Rule("convolution", r"aten::\w*conv(olution)?(_?[123]d|_transpose\w*|_tbc)?\w*|mkldnn::\w*convolution\w*"),
    _Rule(
        "normalization",
        r"aten::(native_|cudnn_|miopen_|_native_|_fused_|fused_)*(layer|batch|group|instance|rms)_?norm\w*"
        r"|aten::_batch_norm\w*|aten::_weight_norm\w*|\w+::\w*(rms_?norm|layer_?norm)\w*",
    ),
    _Rule(
        "reduction and softmax",
        r"aten::(_?log_softmax|_?softmax|_safe_softmax|_softmax_backward_data|_log_softmax_backward_data|logsumexp|sum"
        r"|mean|var|std|var_mean|std_mean|prod|amax|amin|aminmax|max|min|argmax|argmin|any|all|norm|linalg_vector_norm"
        r"|_foreach_norm|cumsum\w*|cumprod\w*|nll_loss\w*|cross_entropy\w*|count_nonzero|topk|sort|argsort|median"
        r"|adaptive_avg_pool\w*|\w*(avg|max)_pool\w*|mse_loss\w*|l1_loss|smooth_l1_loss\w*|kl_div|histc|bincount"
        r"|multinomial|unique\w*|_unique2|searchsorted|equal|is_nonzero|binary_cross_entropy\w*)\b",
    ),
    _Rule(
        "embedding",
        r"aten::(embedding\w*|_embedding\w*|index_select|index_add_?|gather\w*|scatter\w*|_index_put_impl_|index_put_?"
        r"|index|take|put_?|index_copy_?|index_fill_?|one_hot|masked_select|nonzero|masked_scatter\w*)\b"
        r"|fbgemm::\w*embedding\w*",
    ),
    _Rule("optimizer", r"aten::(_fused_(adamw?|sgd|adagrad)_?|_foreach_addcdiv_?|_foreach_lerp_?)"),
    _Rule(
        COPIES,
        r"aten::(copy_|_to_copy|to|contiguous|clone|cat|stack|_foreach_copy_?|_copy_from\w*|index_\w*copy|repeat\w*"
        r"|pin_memory|_pin_memory|roll|flip|constant_pad_nd|pad|narrow_copy|item|_local_scalar_dense|slice_backward"
        r"|select_backward|slice_scatter|select_scatter|tril|triu|tril_|triu_|_cat|split_with_sizes_copy)\b"
        r"|fsdp::\w*copy\w*",
    ),
    _Rule(
        "elementwise",
        r"aten::(_foreach_\w+|add|sub|rsub|mul|div|true_divide|floor_divide|remainder|fmod|neg|abs|sign|sgn|exp2?|expm1"
        r"|log|log2|log10|log1p|sqrt|rsqrt|square|pow|reciprocal|sin|cos|tan|asin|acos|atan2?|sinh|cosh|tanh|erf|erfc"
        r"|erfinv|sigmoid|log_sigmoid\w*|logit|relu6?|gelu|silu|mish|elu|selu|celu|glu|leaky_relu|prelu|_prelu_kernel"
        r"|hardtanh|hardswish|hardsigmoid|softplus|threshold|clamp|clamp_min|clamp_max|clip|where|masked_fill|maximum"
        r"|minimum|fmax|fmin|lerp|addcmul|addcdiv|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|__\w+__|isnan|isinf"
        r"|isfinite|diff|round|floor|ceil|trunc|frac|nan_to_num|fill|zero|zeros|zeros_like|ones|ones_like|full|full_like"
        r"|new_zeros|new_ones|new_full|arange|linspace|eye|scalar_tensor|native_dropout|dropout|_fused_dropout"
        r"|bernoulli|normal|uniform|random|rand|randn|randint|rand_like|randn_like|randperm|exponential|complex|polar"
        r"|real|imag|conj|angle|view_as_complex|hypot|heaviside|nextafter|sinc|copysign|softshrink|hardshrink|xlogy"
        r"|silu_mul|_amp_\w+|rotary\w*|special_\w+|randint_like|logaddexp2?|bucketize)(_backward|_jvp)?_?(_backward)?",
    ),
)
#: Kernels by name, if no operation is known: in the replay of a graph, and in traces of other profilers.
KERNELS = (
    _Rule(COMMUNICATION, r"nccl|rccl|\bncclDevKernel|all_?reduce|all_?gather|reduce_?scatter|nvshmem|symm_mem|deep_ep"),
    _Rule(
        "attention",
        r"flash_(fwd|bwd)|flash_attn|flashattn|fmha|sdpa|flex_attention|attention|attn_(fwd|bwd)|_attn_|\bmha_"
        r"|splitkv|FlashAttn|paged_?attn|qk_int8_sv",
    ),
    _Rule(
        "optimizer", r"multi_tensor_apply.*(adam|sgd|lamb|lion|adagrad|FusedOptimizer)|fused_?adamw?|FusedAdam|adamw"
    ),
    _Rule("convolution", r"fprop|dgrad|wgrad|conv\w*[23]d|implicit_convolve|convolve|winograd|\bim2col|MIOpenConv"),
    _Rule("normalization", r"(layer|batch|group|rms|instance)_?norm|LayerNorm|RMSNorm|bn_(fw|bw)|GammaBeta|Welford"),
    _Rule("embedding", r"embedding|index_?select|indexing_backward|gather|scatter|index_(put|elementwise|copy)"),
    _Rule(
        "matmul",
        r"nvjet|gemm|gemv|cutlass|\bCijk_|xmma|s\d{4,5}(bf16)?gemm|splitKreduce|splitk|cublas|hgemm|triton_tem_fused\w*mm"
        r"|matmul|_scaled_mm|dot_kernel|\bmm_|wgmma",
    ),
    _Rule(
        "reduction and softmax",
        r"softmax|reduce_kernel|\breduce|triton_(per|red)_|cub::|nll_loss|cross_entropy|argmax|topk|radix|sort|scan|pool",
    ),
    _Rule(COPIES, r"memcpy|memset|copyBuffer|fillBuffer|CatArray|direct_copy|copy_kernel|copy_device|transpose_kernel"),
    _Rule(
        "elementwise",
        r"elementwise|triton_poi_|multi_tensor_apply|dropout|distribution|gelu|silu|rotary|rope|pointwise|fill",
    ),
    _Rule("reduction and softmax", r"reduc|norm"),
)
#: Kernels and operations of the class elementwise that only add.
ADDITIONS = r"CUDAFunctor_add\b|CUDAFunctorOnSelf_add\b|aten::_?(foreach_)?add_?$"
#: torch's own work around operations: the class of events if none of their callers has a class.
FRAMEWORK = (
    _Rule(
        "other",
        r"autograd::|torch::autograd::|\w+Backward\w*$|aten::(empty\w*|new_empty\w*|view\w*|_?unsafe_view|_reshape\w*"
        r"|reshape\w*|t|transpose_?|permute|expand\w*|as_strided\w*|slice|select|narrow|unsqueeze_?|squeeze_?|detach_?"
        r"|alias|split\w*|chunk|unbind|flatten|unflatten|numpy_T|movedim|swapaxes|diagonal|unfold|lift_fresh|resize_?"
        r"|resize_as_?|set_|result_type|is_\w+|_has_\w+|requires_grad_?|data|size|stride|_nested\w*|resolve_\w+|broadcast\w*"
        r"|_\w*sample\w*|meshgrid|_assert\w*|ones_like|record_stream|can_cast|_version|retain_grad|output_nr|_is_\w+)\b"
        r"|detach_?$|## Call CompiledFxGraph|Torch-Compiled Region|TorchDynamo|CompiledFunction|CUDAGraph|inductor",
    ),
)


def class_of(event: Event) -> str:
    """One of CLASSES."""
    callers = [each for each in event.lineage() if each.kind in ("operation", "annotation")]
    operations = [each.name for each in callers]
    # The operations of an attention run outside of it in the backward pass.
    forward = [each.name for caller in callers if caller.forward for each in caller.forward.lineage()]
    enclosing = min(filter(None, map(_enclosing, [*operations, *forward])), key=_ENCLOSING_ORDER.index, default=None)
    return (
        enclosing
        or next(filter(None, map(_operation, operations)), None)
        or _kernel(event.name, event.kind)
        or _framework(event.name)
        or UNCLASSIFIED
    )


_ENCLOSING_ORDER = [rule.name for rule in ENCLOSING]


def _first(rules: Iterable[_Rule], name: str, match: Callable[[str, str], object]) -> str | None:
    return next((rule.name for rule in rules if match(rule.pattern, name)), None)


@functools.cache
def _enclosing(name: str) -> str | None:
    return _first(ENCLOSING, name, re.match)


@functools.cache
def _operation(name: str) -> str | None:
    return _first(OPERATIONS, name, re.fullmatch)


@functools.cache
def _kernel(name: str, kind: str) -> str | None:
    if kind not in ON_DEVICE:
        return None
    return _first(KERNELS, name, lambda pattern, text: re.search(pattern, text, re.IGNORECASE))


@functools.cache
def _framework(name: str) -> str | None:
    return _first(FRAMEWORK, name, re.match)
