"""The FLOP of an operation, 2 per multiply-add, from the shapes of its arguments. Pure.

Causal attention counts only what is not masked, and its backward pass 2.5 times the forward pass, as in
mamf.operations.attention. Operations without a formula count no FLOP, and reports say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from mamf.errors import UsageError
from mamf.operations.attention.operation import BACKWARD_FLOP_FACTORS, AttentionShape
from mamf.profiling.traces import Event

_Shapes = Sequence[Sequence[int]]
#: mamf's name of a dtype, by the name that torch records.
DTYPE_BY_TORCH_NAME = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "signed char": "int8",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2": "float8_e5m2",
}

#: Kernels of NVIDIA's libraries that multiply float32 in TF32. 1688 is the shape of its instruction, m16n8k8.
TF32_KERNEL = re.compile(r"tf32|tfloat32|s1688gemm")


def count_flop(event: Event) -> int | None:
    """Return the FLOP of an operation; None if it has no formula or its shapes were not recorded."""
    formula = _FORMULAS.get(event.name)
    if formula is None:
        return None
    try:
        return formula(event.dimensions, event.values)
    except (IndexError, ValueError, TypeError, UsageError):
        return None


def find_dtype(event: Event) -> str:
    """Return mamf's name of the dtype that an operation multiplies, or torch's name if mamf has none."""
    operand = _FIRST_OPERAND.get(event.name, 0)
    recorded = event.dtypes[operand] if len(event.dtypes) > operand else ""
    return DTYPE_BY_TORCH_NAME.get(recorded, recorded or "unknown")


def count_matmul_flop(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the FLOP of (..., M, K) @ (..., K, N).

    In a grouped matmul only one operand has groups. They divide the rows, the columns or K of the other among them.
    """
    return 2 * math.prod(a if len(a) == len(b) else a[-2:]) * b[-1]


def _make_matmul_formula(first: int) -> Callable[[_Shapes, Sequence[str]], int]:
    """Return the formula of a matmul whose operands are the arguments ``first`` and ``first + 1``."""
    return lambda shapes, values: count_matmul_flop(shapes[first], shapes[first + 1])


def _count_linear(shapes: _Shapes, values: Sequence[str]) -> int:
    """Return the FLOP of an input (..., K) times a weight (N, K)."""
    weight = shapes[1]
    return 2 * math.prod(shapes[0]) * (weight[0] if len(weight) > 1 else 1)


def _count_convolution(shapes: _Shapes, values: Sequence[str]) -> int:
    """Return the FLOP of a convolution.

    Arguments: input (N, C, ...), weight (O, C/groups, ...), bias, stride, padding, dilation, transposed, output
    padding, groups.
    """
    size, weight = shapes[0], shapes[1]
    if values[6] == "True":  # transposed: each element of the input is multiplied with the whole weight of its group
        return 2 * math.prod(size) * math.prod(weight[1:])
    strides, padding, dilation = (_parse_numbers(values[number], len(weight) - 2) for number in (3, 4, 5))
    output = [
        (length + 2 * pad - spread * (kernel - 1) - 1) // stride + 1
        for length, kernel, stride, pad, spread in zip(size[2:], weight[2:], strides, padding, dilation, strict=True)
    ]
    return 2 * size[0] * math.prod(output) * math.prod(weight)


def _parse_numbers(text: str, count: int) -> list[int]:
    numbers = [int(each) for each in re.findall(r"-?\d+", text)]
    return numbers * count if len(numbers) == 1 else numbers


def _count_convolution_backward(shapes: _Shapes, values: Sequence[str]) -> int:
    """Return the FLOP of a convolution's backward pass.

    Arguments: gradient of the output (N, O, ...), input, weight, ...; the last says which gradients are computed.
    """
    gradient, size, weight = shapes[:3]
    transposed = values[7] == "True"
    one = 2 * math.prod(size if transposed else gradient) * math.prod(weight[1:])
    return one * values[10].count("True", 0, values[10].rfind(","))


def _make_attention_formula(causal: int, first: int = 0, count: float = 1.0) -> Callable[[_Shapes, Sequence[str]], int]:
    """Return the formula of attention, whose Q, K and V are (batch, heads, length, head dimension).

    ``first``: the index of Q among the arguments. ``causal``: the index of that flag. ``count``: FLOP as a multiple of
    a forward pass. torch aligns a causal mask to the top left, so keys beyond the last query are masked.
    """

    def count_flop_of_attention(shapes: _Shapes, values: Sequence[str]) -> int:
        (batch, heads, length, size), (_, kv_heads, length_k, _), (*_, size_v) = shapes[first : first + 3]
        is_causal = values[causal] == "True"
        if is_causal and length > length_k:
            raise ValueError("a causal mask needs at least as many keys as queries")
        keys = length if is_causal else length_k
        return int(count * AttentionShape(batch, heads, kv_heads, length, keys, size, size_v, is_causal).flop)

    return count_flop_of_attention


_BACKWARD_RATIO = BACKWARD_FLOP_FACTORS["hardware"]
_SCALED_AND_GROUPED_MATMULS = ("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_MATMULS_WITH_BIAS = ("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm")
_FORMULAS: Mapping[str, Callable[[_Shapes, Sequence[str]], int]] = {
    **{f"aten::{name}": _make_matmul_formula(0) for name in ("mm", "bmm", "_int_mm", *_SCALED_AND_GROUPED_MATMULS)},
    **{f"aten::{name}": _make_matmul_formula(1) for name in _MATMULS_WITH_BIAS},
    **dict.fromkeys(("aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise"), _count_linear),
    "mkl::_mkl_linear": lambda shapes, values: _count_linear([shapes[0], shapes[2]], values),
    "aten::convolution": _count_convolution,
    "aten::convolution_backward": _count_convolution_backward,
    "aten::scaled_dot_product_attention": _make_attention_formula(causal=5),
    "aten::_scaled_dot_product_flash_attention": _make_attention_formula(causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _make_attention_formula(causal=4),
    "aten::_scaled_dot_product_efficient_attention": _make_attention_formula(causal=6),
    "aten::_scaled_dot_product_cudnn_attention": _make_attention_formula(causal=6),
    "aten::_scaled_dot_product_flash_attention_backward": _make_attention_formula(11, 1, _BACKWARD_RATIO),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _make_attention_formula(7, 1, _BACKWARD_RATIO),
    "aten::_scaled_dot_product_efficient_attention_backward": _make_attention_formula(11, 1, _BACKWARD_RATIO),
    "aten::_scaled_dot_product_cudnn_attention_backward": _make_attention_formula(14, 1, _BACKWARD_RATIO),
}
#: Operations whose first operand is not the first argument.
_FIRST_OPERAND = {name: 1 for name in _FORMULAS if "add" in name or name.endswith("attention_backward")}
