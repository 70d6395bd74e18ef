"""Count the FLOP of an operation in a trace from the shapes of its arguments, for ``mamf profile``.

A multiply-add counts as 2 FLOP. For causal attention, only the scores that the mask does not hide are counted. The
backward pass of attention counts as 2.5 forward passes, as in mamf.operations.attention. FLOP of operations without a
formula are not counted, and reports say so. The functions in this file have no side effects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from mamf.errors import UsageError
from mamf.operations.attention.operation import BACKWARD_FLOP_FACTORS, AttentionShape
from mamf.profiling.traces import Event

_ArgumentShapes = Sequence[Sequence[int]]
#: mamf's names of dtypes, by the names that torch.profiler records in a trace.
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

#: Pattern of the names of kernels in NVIDIA's libraries that multiply float32 operands in TF32. In ``s1688gemm``, 1688
#: stands for m16n8k8, the shape of the TF32 matrix instruction.
TF32_KERNEL_PATTERN = re.compile(r"tf32|tfloat32|s1688gemm")


def count_operation_flop(event: Event) -> int | None:
    """Return the FLOP of an operation, or None if mamf has no formula for it or the trace lacks the shapes."""
    try:
        return _FLOP_FORMULA_BY_OPERATION[event.name](event.argument_shapes, event.argument_values)
    except (LookupError, ValueError, TypeError, UsageError):
        return None


def find_operand_dtype(event: Event) -> str:
    """Return the dtype of the operands that an operation multiplies, under mamf's name.

    If mamf has no name for the dtype, return torch's name. If the trace does not record the dtype, return ``unknown``.
    """
    operand_index = _FIRST_OPERAND_INDEX_BY_OPERATION.get(event.name, 0)
    torch_name = event.argument_dtypes[operand_index] if len(event.argument_dtypes) > operand_index else ""
    return DTYPE_BY_TORCH_NAME.get(torch_name, torch_name or "unknown")


def count_matmul_flop(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the FLOP of a matmul of ``a`` with shape (..., M, K) and ``b`` with shape (..., K, N).

    If only one operand has three dimensions, this is a grouped matmul: M or N of the other operand is divided among the
    groups. All groups together have the FLOP of one matmul of shape (M, K) times (K, N).
    """
    return 2 * math.prod(a if len(a) == len(b) else a[-2:]) * b[-1]


def _count_linear_flop(shapes: _ArgumentShapes, argument_values: Sequence[str]) -> int:
    """Return the FLOP of a linear layer: an input of shape (..., K) times a weight of shape (N, K) or (K)."""
    weight = shapes[1]
    return 2 * math.prod(shapes[0]) * (weight[0] if len(weight) > 1 else 1)


def _count_convolution_flop(shapes: _ArgumentShapes, argument_values: Sequence[str]) -> int:
    """Return the FLOP of the forward pass of ``aten::convolution``.

    Its arguments are input (N, C, ...), weight (O, C/groups, ...), bias, stride, padding, dilation, transposed, output
    padding and groups.
    """
    input_shape, weight = shapes[0], shapes[1]
    # In a transposed convolution, the weight has the shape (C, O/groups, ...), and each element of the input is
    # multiplied by all weights of its channel C.
    if argument_values[6] == "True":
        return 2 * math.prod(input_shape) * math.prod(weight[1:])
    strides, padding, dilation = (
        _parse_numbers_per_dimension(argument_values[number], len(weight) - 2) for number in (3, 4, 5)
    )
    output_size = [
        (length + 2 * pad - dilation_step * (kernel - 1) - 1) // stride + 1
        for length, kernel, stride, pad, dilation_step in zip(
            input_shape[2:], weight[2:], strides, padding, dilation, strict=True
        )
    ]
    return 2 * input_shape[0] * math.prod(output_size) * math.prod(weight)


def _parse_numbers_per_dimension(text: str, count: int) -> list[int]:
    numbers = [int(each) for each in re.findall(r"-?\d+", text)]
    return numbers * count if len(numbers) == 1 else numbers


def _count_convolution_backward_flop(shapes: _ArgumentShapes, argument_values: Sequence[str]) -> int:
    """Return the FLOP of ``aten::convolution_backward``. The gradient of the input takes the same FLOP as the forward
    pass, and so does the gradient of the weight.

    The first arguments are the gradient of the output (N, O, ...), the input and the weight. The last argument says
    which gradients the operation computes: of input, weight and bias. The FLOP of the bias's gradient are not counted.
    """
    gradient, input_shape, weight = shapes[:3]
    flop_per_gradient = 2 * math.prod(input_shape if argument_values[7] == "True" else gradient) * math.prod(weight[1:])
    return flop_per_gradient * argument_values[10].count("True", 0, argument_values[10].rfind(","))


def _make_attention_formula(
    causal_index: int, query_index: int = 0, forward_pass_ratio: float = 1.0
) -> Callable[[_ArgumentShapes, Sequence[str]], int]:
    """Return the FLOP formula of an attention operation. Q, K and V have the shape (batch, heads, length, dimension).

    - ``causal_index``: the index of the argument that says whether the mask is causal.
    - ``query_index``: the index of Q among the arguments. K and V follow it.
    - ``forward_pass_ratio``: FLOP of the operation divided by the FLOP of a forward pass.

    torch aligns a causal mask to the top left of the scores. If there are more keys than queries, the mask hides the
    surplus keys from every query, so the formula does not count these keys.
    """

    def count_attention_flop(shapes: _ArgumentShapes, argument_values: Sequence[str]) -> int:
        (batch, heads, query_count, head_size), (_, kv_heads, key_count, _), (*_, v_head_size) = shapes[
            query_index : query_index + 3
        ]
        is_causal = argument_values[causal_index] == "True"
        if is_causal and query_count > key_count:
            raise ValueError("mamf cannot count the FLOP of causal attention with more queries than keys")
        counted_keys = query_count if is_causal else key_count
        return int(
            forward_pass_ratio
            * AttentionShape(batch, heads, kv_heads, query_count, counted_keys, head_size, v_head_size, is_causal).flop
        )

    return count_attention_flop


_ATTENTION_BACKWARD_RATIO = BACKWARD_FLOP_FACTORS["hardware"]
_FLOP_FORMULA_BY_OPERATION: Mapping[str, Callable[[_ArgumentShapes, Sequence[str]], int]] = {
    **{
        f"aten::{name}": lambda shapes, argument_values: count_matmul_flop(shapes[0], shapes[1])
        for name in ("mm", "bmm", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
    },
    **{
        f"aten::{name}": lambda shapes, argument_values: count_matmul_flop(shapes[1], shapes[2])
        for name in ("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm")
    },
    **dict.fromkeys(("aten::linear", "aten::mkldnn_linear", "mkldnn::_linear_pointwise"), _count_linear_flop),
    "mkl::_mkl_linear": lambda shapes, argument_values: _count_linear_flop([shapes[0], shapes[2]], argument_values),
    "aten::convolution": _count_convolution_flop,
    "aten::convolution_backward": _count_convolution_backward_flop,
    "aten::scaled_dot_product_attention": _make_attention_formula(causal_index=5),
    "aten::_scaled_dot_product_flash_attention": _make_attention_formula(causal_index=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _make_attention_formula(causal_index=4),
    "aten::_scaled_dot_product_efficient_attention": _make_attention_formula(causal_index=6),
    "aten::_scaled_dot_product_cudnn_attention": _make_attention_formula(causal_index=6),
    "aten::_scaled_dot_product_flash_attention_backward": _make_attention_formula(11, 1, _ATTENTION_BACKWARD_RATIO),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _make_attention_formula(
        7, 1, _ATTENTION_BACKWARD_RATIO
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": _make_attention_formula(11, 1, _ATTENTION_BACKWARD_RATIO),
    "aten::_scaled_dot_product_cudnn_attention_backward": _make_attention_formula(14, 1, _ATTENTION_BACKWARD_RATIO),
}
#: Index of the first operand among the arguments, for operations whose first argument is not an operand.
_FIRST_OPERAND_INDEX_BY_OPERATION = {
    name: 1 for name in _FLOP_FORMULA_BY_OPERATION if "add" in name or name.endswith("attention_backward")
}
