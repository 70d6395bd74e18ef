"""FLOP of a step by counting what torch multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mamf.profiling.flops import product_flop

#: With the argument that their operands begin with.
_PRODUCTS = {"_int_mm": 0, "_grouped_mm": 0, "_scaled_grouped_mm": 0, "_addmm_activation": 1}
_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def count_flops(step: Callable[[], object]) -> float:
    """FLOP of the products that ``step`` runs: forward and, where it calls ``backward``, backward too.

    torch.utils.flop_counter counts by operation, and misses operations that are not torch's: custom kernels (Triton,
    flash-attn's own), flex attention, graph replays; and recurrent layers and matrix-vector products. It counts the
    whole square of causal attention, and all recomputation. ``ModelFlops.beside`` explains a difference.

    >>> import torch
    >>> a = torch.ones(64, 32)
    >>> mamf.count_flops(lambda: a @ a.T)
    262144.0
    """
    with _whole_layers_apart(), FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        step()
    return float(counter.get_total_flops())


@contextmanager
def _whole_layers_apart() -> Iterator[None]:
    """Without gradients torch runs attention and encoder layers as one operation each, unknown to the counter."""
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


def _formulas() -> dict[Any, Callable[..., int]]:
    """torch's own formulas miss some products, attention on CPUs, and before 2.13 attention with fewer key heads than
    query heads.
    """
    formulas: dict[str, Callable[..., int]] = {name: _product(first) for name, first in _PRODUCTS.items()}
    for name in _FUSED:
        formulas |= {name: _forward, f"{name}_backward": _backward}
    return {getattr(torch.ops.aten, name): each for name, each in formulas.items() if hasattr(torch.ops.aten, name)}


def _product(first: int) -> Callable[..., int]:
    """Of operands from the argument ``first`` on."""
    return lambda *shapes, **_: product_flop(shapes[first], shapes[first + 1])


def _forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Of shapes (batch, heads, tokens, head dimension): scores and their product with the values."""
    return 2 * _pairs(query, key) * (query[-1] + value[-1])


def _backward(
    _: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: object, **___: object
) -> int:
    """Scores anew, and the gradients of scores, values, queries and keys."""
    return 2 * _pairs(query, key) * (3 * query[-1] + 2 * value[-1])


def _pairs(query: Sequence[int], key: Sequence[int]) -> int:
    """Of queries and keys, in all batches and heads of the queries."""
    batch, heads, queries, _ = query
    return batch * heads * queries * key[-2]
