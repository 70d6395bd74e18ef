"""FLOP of a step by counting what torch multiplies."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], object]) -> float:
    """FLOP of the products that ``step`` runs: forward and, where it calls ``backward``, backward too.

    torch.utils.flop_counter counts by operation, and misses what is none of torch's: custom kernels (Triton,
    flash-attn's own), flex attention, attention on a CPU by ``sdpa``, graph replays. It counts the whole square of
    causal attention, and everything that is computed anew. ``ModelFlops.beside`` explains a difference.

    >>> import torch
    >>> a = torch.ones(64, 32)
    >>> mamf.count_flops(lambda: a @ a.T)
    262144.0
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())
