"""FLOP of a step by counting what torch multiplies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def count_flops(step: Callable[[], object]) -> float:
    """FLOP of the products that ``step`` runs: forward and, where it calls ``backward``, backward too.

    torch.utils.flop_counter counts by operation, and misses what is none of torch's: custom kernels (Triton,
    flash-attn's own), flex attention, graph replays. It counts the whole square of causal attention, and everything
    that is computed anew. ``ModelFlops.beside`` explains a difference.

    >>> import torch
    >>> a = torch.ones(64, 32)
    >>> mamf.count_flops(lambda: a @ a.T)
    262144.0
    """
    with FlopCounterMode(display=False, custom_mapping=_attention_formulas()) as counter:
        step()
    return float(counter.get_total_flops())


def _attention_formulas() -> dict[Any, Callable[..., int]]:
    """torch's own know no attention of a CPU, and before 2.13 none whose keys have fewer heads than its queries."""
    found: dict[Any, Callable[..., int]] = {}
    for name in _FUSED:
        for operation, formula in ((name, _forward), (f"{name}_backward", _backward)):
            if hasattr(torch.ops.aten, operation):
                found[getattr(torch.ops.aten, operation)] = formula
    return found


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
