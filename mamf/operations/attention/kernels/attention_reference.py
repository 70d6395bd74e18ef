"""Attention by other means: plain products and exponentials in float64 (float32 where a device has none), in blocks of
rows.

For sampled heads the whole output and the whole gradients are computed, so no row or tile of them goes unseen. It runs
on the device (a head of 16384 tokens is 10**12 FLOP), by none of the code that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mamf.operations.attention.shapes import AttentionShape

_ROWS = 1024


@dataclass(frozen=True)
class Distance:
    """How far results are from the reference over the sampled heads: ||x - reference|| / ||reference|| of ``o``,
    ``dq``, ``dk``, ``dv``; of the output also the same for its worst row, the cosine similarity and the L1 distance
    relative to its L1 norm.
    """

    errors: dict[str, float]
    worst_row: float
    cosine: float
    relative_l1: float


class Reference:
    """Output and gradients of the sampled heads, given q, k, v (and do) as batch, heads, sequence, width."""

    def __init__(self, shape: AttentionShape, operands: Mapping[str, torch.Tensor], has_backward: bool) -> None:
        self._shape = shape
        self._heads = {head: reference_of(shape, operands, *head, has_backward) for head in sampled_heads(shape)}

    def distance(self, results: Mapping[str, torch.Tensor]) -> Distance:
        """How far ``o`` (and ``dq``, ``dk``, ``dv``), all batch, heads, sequence, width, are from it."""
        squares: dict[str, list[float]] = {}
        dot = norm = reference_norm = l1 = reference_l1 = worst_row = 0.0
        for (batch, kv_head), reference in self._heads.items():
            for name, expected in reference.items():
                result = pick(results[name], self._shape, batch, kv_head, name).to(expected.dtype)
                seen = squares.setdefault(name, [0.0, 0.0])
                seen[0] += (result - expected).square().sum().item()
                seen[1] += expected.square().sum().item()
                if name == "o":
                    worst_row = max(worst_row, worst_relative_row(result, expected))
                    dot += (result * expected).sum().item()
                    norm += result.square().sum().item()
                    reference_norm += expected.square().sum().item()
                    l1 += (result - expected).abs().sum().item()
                    reference_l1 += expected.abs().sum().item()
        errors = {name: relative(difference, size) for name, (difference, size) in squares.items()}
        cosine = dot / math.sqrt(norm * reference_norm) if norm * reference_norm > 0 else float(norm == reference_norm)
        return Distance(errors, worst_row, cosine, l1 / reference_l1 if reference_l1 else l1)


def worst_relative_row(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row; infinite where one holds NaN."""
    difference = torch.linalg.vector_norm(result - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    ratio = torch.where(size > 0, difference / size, difference)
    return ratio.nan_to_num(nan=math.inf).max().item()


def relative(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.nan
    return math.sqrt(difference / size) if size else (0.0 if difference == 0 else math.inf)


def sampled_heads(shape: AttentionShape) -> list[tuple[int, int]]:
    """Batch and kv head: the first of all and the last of all."""
    return list(dict.fromkeys([(0, 0), (shape.batch - 1, shape.kv_heads - 1)]))


def pick(tensor: torch.Tensor, shape: AttentionShape, batch: int, kv_head: int, name: str) -> torch.Tensor:
    """The heads of one kv head: (group, length, width) of what queries have, (length, width) of what keys have."""
    if name in ("k", "v", "dk", "dv"):
        return tensor[batch, kv_head]
    group = shape.heads // shape.kv_heads
    return tensor[batch, kv_head * group : (kv_head + 1) * group]


def reference_of(
    shape: AttentionShape, tensors: Mapping[str, torch.Tensor], batch: int, kv_head: int, has_backward: bool
) -> dict[str, torch.Tensor]:
    """Output and gradients of one kv head and the heads that share it.

    dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d) (Dao, FlashAttention-2,
    2023, section 2.2).
    """
    names = ("q", "k", "v", "do") if has_backward else ("q", "k", "v")
    q, k, v, *rest = (precise(pick(tensors[name], shape, batch, kv_head, name)) for name in names)
    scale = 1 / math.sqrt(shape.head_dim)
    results: dict[str, list[torch.Tensor]] = {"o": [], "dq": []}
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, masked in row_blocks(shape, q.device):
        scores = (q[:, rows] @ k.t()) * scale
        probabilities = torch.softmax(scores.masked_fill_(masked, -math.inf), dim=-1).nan_to_num_(0.0)
        output = probabilities @ v
        results["o"].append(output)
        if rest:
            gradient = rest[0][:, rows]
            dv += (probabilities.transpose(1, 2) @ gradient).sum(0)
            through = gradient @ v.t() - (gradient * output).sum(-1, keepdim=True)
            through *= probabilities
            results["dq"].append(through @ k * scale)
            dk += (through.transpose(1, 2) @ q[:, rows]).sum(0) * scale
    found = {name: torch.cat(blocks, dim=1) for name, blocks in results.items() if blocks}
    return {**found, "dk": dk, "dv": dv} if rest else found


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, or float32 where torch has none for the device."""
    try:
        return tensor.detach().to(torch.float64)
    except TypeError:
        return tensor.detach().to(torch.float32)


def row_blocks(shape: AttentionShape, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
    """Blocks of query rows, and which keys are masked for them."""
    offset = shape.seqlen_k - shape.seqlen_q
    keys = torch.arange(shape.seqlen_k, device=device)
    for start in range(0, shape.seqlen_q, _ROWS):
        stop = min(start + _ROWS, shape.seqlen_q)
        aligned = torch.arange(start, stop, device=device)[:, None] + offset
        masked = torch.zeros(stop - start, shape.seqlen_k, dtype=torch.bool, device=device)
        if shape.causal:
            masked |= keys > aligned
        if shape.window is not None:
            masked |= keys < aligned - shape.window
            masked |= keys > aligned + shape.window
        yield slice(start, stop), masked
