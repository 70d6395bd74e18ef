"""Inputs with block structure, for kernels that skip blocks of keys."""

from __future__ import annotations

import math

import torch

# Structured inputs: tokens per block, the number of directions that distinguish blocks, and their strength: at 2.2, the
# keys of a block are similar enough for kernels that skip only blocks of similar keys.
_STRUCTURE_BLOCK = 128
_GROUPS = 10
_STRUCTURE = 2.2


def block_structured(q: torch.Tensor, k: torch.Tensor, sparsity: float, sequence: int) -> dict[str, torch.Tensor]:
    """q and k for which only a share of 1 - ``sparsity`` of the key blocks matters to each block of queries.

    Random data has no such structure: every key matters a little. Here each block of keys points along one of _GROUPS
    axes, in turn, and queries point along the axes that they attend to, so other scores vanish in the softmax.
    """
    width = q.shape[-1]
    attended = _attended(sparsity)
    strength = math.sqrt(_STRUCTURE * width)
    axes = torch.eye(_GROUPS, width, device=q.device) * strength
    spread = torch.stack([axes.roll(-group, 0)[:attended].sum(0) for group in range(_GROUPS)])

    def along(tensor: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        group = torch.arange(tensor.shape[sequence], device=tensor.device) // _STRUCTURE_BLOCK % _GROUPS
        pattern = directions[group]
        return tensor + (pattern if sequence == 2 else pattern[:, None]).to(tensor.dtype)

    return {"q": along(q, spread), "k": along(k, axes)}


def _attended(sparsity: float) -> int:
    """The number of groups of key blocks, out of _GROUPS, that a query attends to."""
    return max(1, round((1 - sparsity) * _GROUPS))


def relevant_share(sparsity: float, length: int) -> float:
    """The largest share of the blocks of ``length`` keys that matters to a query, for inputs with this ``sparsity``."""
    if not sparsity:
        return 1.0
    blocks = -(-length // _STRUCTURE_BLOCK)
    sizes = [len(range(group, blocks, _GROUPS)) for group in range(_GROUPS)]
    attended = range(_attended(sparsity))
    return max(sum(sizes[(group + step) % _GROUPS] for step in attended) for group in range(_GROUPS)) / blocks
