"""The reference that attention kernels are verified against, and inputs for kernels that skip blocks of keys.

The reference consists of matmuls and a softmax in float64 (float32 if a device has no float64), in blocks of rows. Its
code is independent of the kernels. It runs on the device, because one head of 16384 tokens takes 10**12 FLOP.

A quick check compares one random row in 64 of the output and of dQ, in the first and the last head. A full check
compares more:

- the first and the last head: the whole output and all gradients;
- all heads: one random row in 64 of the output and of dQ, so a tile of 128 zero rows is always found, and the sums of
  dK and dV along the keys, which follow from the operands without a matmul;
- a few rows of one head: with the host's result.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from mamf.kernel import Verdict
from mamf.measurement import LOST_NAN
from mamf.operations.attention.operation import AttentionShape
from mamf.operations.operand_sets import (
    draw_integers,
    use_float32_precision,
    use_one_torch_thread,
    verify_special_values,
)

_ROWS_PER_BLOCK = 1024
#: One random row in this many is compared in each head.
_ROW_INTERVAL = 64
# Elements of the scores or of an operand that are computed at once when rows of all heads are compared.
_CHUNK_ELEMENTS = 2**24
# The most key elements of one head that are copied to the host, and the number of rows compared there.
_MAX_ON_HOST, _ROWS_ON_HOST = 2**22, 4


@dataclass(frozen=True)
class ReferenceDistance:
    """How far results are from the reference.

    - ``errors``: ||x - reference|| / ||reference|| of ``o``, ``dq``, ``dk`` and ``dv``, where compared.
    - ``slopes``: the slope of a fit of x to the reference, minus 1.
    - ``worst_row_error``, ``cosine``, ``relative_l1``: of the output: the error of the worst row, the cosine
      similarity, and
      ||x - reference||_1 / ||reference||_1.
    - ``rows``: the number of rows compared; the minimum over all results.
    """

    errors: dict[str, float]
    slopes: dict[str, float]
    worst_row_error: float
    cosine: float
    relative_l1: float
    rows: int


class _DistanceTally:
    """Sums for a ``ReferenceDistance``, over pairs of a result and its expected value."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._worst_row_error = 0.0

    def add(self, name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        result = result.to(expected.dtype)
        difference = result - expected
        squares, lengths = (difference.square(), expected.square()), (difference.abs(), expected.abs())
        of_both = (difference * expected, result.square())
        sums = torch.stack([each.sum() for each in (*squares, *lengths, *of_both)]).tolist()
        before = self._sums.setdefault(name, [0.0] * 7)
        self._sums[name] = [a + b for a, b in zip(before, (*sums, expected.shape[:-1].numel()), strict=True)]
        if name == "o":
            self._worst_row_error = max(self._worst_row_error, compute_worst_row_error(result, expected))

    def distance(self) -> ReferenceDistance:
        errors = {name: compute_norm_ratio(of[0], of[1]) for name, of in self._sums.items()}
        slopes = {name: of[4] / of[1] if of[1] else 0.0 for name, of in self._sums.items()}
        _, size, l1, reference_l1, along, norm, _ = self._sums["o"]
        cosine = (size + along) / math.sqrt(norm * size) if norm * size > 0 else float(norm == size)
        rows = int(min(of[6] for of in self._sums.values()))
        return ReferenceDistance(
            errors, slopes, self._worst_row_error, cosine, l1 / reference_l1 if reference_l1 else l1, rows
        )


def compare_edge_heads(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> ReferenceDistance:
    """Return the distance of all results in the first and the last head.

    ``operands``: q, k, v and, for a backward pass, do. ``results``: o and, for a backward pass, dq, dk and dv. Each is
    [batch, heads, sequence, head dimension].
    """
    tally = _DistanceTally()
    for batch, kv in find_edge_heads(shape):
        for name, expected in compute_reference_attention(shape, operands, batch, kv).items():
            tally.add(name, view_heads(results[name], shape, batch, kv), expected)
    return tally.distance()


def compare_rows(
    shape: AttentionShape,
    operands: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
    is_whole: bool = True,
) -> ReferenceDistance:
    """Return the distance of random rows of ``o`` and ``dq``: one of each _ROW_INTERVAL rows.

    ``is_whole``: compare all heads, not only the first and the last. Computed in float32 for 16-bit operands, because
    float64 is slow on some cards.
    """
    tally, device = _DistanceTally(), operands["q"].device
    starts = torch.arange(0, shape.seqlen_q + _ROW_INTERVAL, _ROW_INTERVAL, device=device)
    offsets = draw_integers(_ROW_INTERVAL, starts.shape, device)
    # Include the last row: under a causal mask dQ of the first row is 0, and a relative error needs a nonzero row.
    rows = (starts + offsets).clamp_max(shape.seqlen_q - 1)
    widest = max(shape.head_dim, shape.head_dim_v, shape.heads // shape.kv_heads * min(len(rows), _ROWS_PER_BLOCK))
    step = max(1, _CHUNK_ELEMENTS // (shape.seqlen_k * widest))
    parts = itertools.product(range(shape.batch), range(0, shape.kv_heads, step))
    with use_float32_precision("highest"):
        for batch, kv in [(b, slice(at, at + step)) for b, at in parts] if is_whole else find_edge_heads(shape):
            for name, expected in compute_reference_attention(shape, operands, batch, kv, rows).items():
                tally.add(name, view_heads(results[name], shape, batch, kv)[:, :, rows], expected)
    return tally.distance()


def find_edge_heads(shape: AttentionShape) -> list[tuple[int, slice]]:
    """Return the first and the last kv head, each as its index in the batch and a slice of kv heads."""
    edges = dict.fromkeys([(0, 0), (shape.batch - 1, shape.kv_heads - 1)])
    return [(batch, slice(head, head + 1)) for batch, head in edges]


def compare_on_host(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> ReferenceDistance | None:
    """Return the distance of a few rows of a random head's output from the host's result in float64.

    None if the keys of a head are too large to copy.
    """
    if shape.seqlen_k * max(shape.head_dim, shape.head_dim_v) > _MAX_ON_HOST:
        return None
    tally, batch, head = _DistanceTally(), secrets.randbelow(shape.batch), secrets.randbelow(shape.kv_heads)
    rows = torch.tensor([secrets.randbelow(shape.seqlen_q) for _ in range(_ROWS_ON_HOST)])
    own = [view_heads(each, shape, batch, slice(head, head + 1)) for each in (*operands.values(), results["o"])]
    *heads, found = (each[0].cpu()[None].double() for each in own)
    one = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    with use_one_torch_thread():
        expected = compute_reference_attention(one, dict(zip(operands, heads, strict=True)), 0, slice(0, 1), rows)
        tally.add("o", found[:, :, rows], expected["o"])
    return tally.distance()


def compute_key_sum_error(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest error of the sums of ``dk`` and ``dv`` along the keys, relative to the norm of the summands.

    Each row of P sums to 1 and each row of dS to 0. So along the keys, dV = P^T dO sums to the sum of dO over the
    queries that see a key, and dK = dS^T Q / sqrt(d) sums to 0. With a single query each element of dV is a product of
    two 16-bit numbers, and all keys may round in the same direction, so the limit adds half an eps per element.
    """
    unseen = shape.seqlen_q - shape.seqlen_k - (0 if shape.causal else shape.window or shape.seqlen_q)
    worst = 0.0
    for batch in range(shape.batch):
        seen = to_float64(operands["do"][batch, :, max(0, unseen) :])
        of_queries = seen.sum(1).unflatten(0, (shape.kv_heads, -1)).sum(1)
        for name, expected in (("dk", 0.0), ("dv", of_queries)):
            summed = to_float64(results[name][batch])
            norms = torch.linalg.vector_norm(summed, dim=1)
            alike = torch.finfo(results[name].dtype).eps / 2 if name == "dv" and shape.seqlen_q == 1 else 0.0
            beyond = (summed.sum(1) - expected).abs() - alike * summed.abs().sum(1)
            error = beyond.clamp_min(0.0) / torch.maximum(norms, norms.mean())
            worst = max(worst, error.nan_to_num(nan=0.0 if not norms.any() else math.inf).max().item())
    return worst


def compute_worst_row_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a row; infinite if a row contains NaN."""
    difference = torch.linalg.vector_norm(result - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    return torch.where(size > 0, difference / size, difference).nan_to_num(nan=math.inf).max().item()


def compute_norm_ratio(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.nan
    return math.sqrt(difference / size) if size else (0.0 if difference == 0 else math.inf)


def view_heads(tensor: torch.Tensor, shape: AttentionShape, batch: int, kv: slice) -> torch.Tensor:
    """View the heads of one batch entry by kv head: [kv heads in ``kv``, heads per kv head, sequence, head dimension].

    For keys and values the second dimension is 1.
    """
    found: torch.Tensor = tensor[batch].unflatten(0, (shape.kv_heads, -1))[kv]
    return found


def compute_reference_attention(
    shape: AttentionShape,
    tensors: Mapping[str, torch.Tensor],
    batch: int,
    kv: slice,
    rows: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the output and, if do is given, the gradients of the kv heads in ``kv`` and all heads that share them.

    With ``rows``, compute only these rows of the output and of dQ. Shapes are those of ``view_heads``.

    dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d) (Dao, FlashAttention-2,
    2023, section 2.2).
    """
    names = [name for name in ("q", "k", "v", "do") if name in tensors]
    q, k, v, *rest = (to_float64(view_heads(tensors[name], shape, batch, kv), rows is not None) for name in names)
    scale = 1 / math.sqrt(shape.head_dim)
    results: dict[str, list[torch.Tensor]] = {"o": [], "dq": []}
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for block, masked in yield_row_blocks(shape, q.device, rows):
        scores = (q[:, :, block] @ k.mT) * scale
        probabilities = torch.softmax(scores.masked_fill_(masked, -math.inf), dim=-1).nan_to_num_(0.0)
        output = probabilities @ v
        results["o"].append(output)
        if rest:
            gradient = rest[0][:, :, block]
            through = gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)
            through *= probabilities
            results["dq"].append(through @ k * scale)
            if rows is None:
                dv += (probabilities.mT @ gradient).sum(1, keepdim=True)
                dk += (through.mT @ q[:, :, block]).sum(1, keepdim=True) * scale
    found = {name: torch.cat(blocks, dim=2) for name, blocks in results.items() if blocks}
    return {**found, "dk": dk, "dv": dv} if rest and rows is None else found


def to_float64(tensor: torch.Tensor, may_be_float32: bool = False) -> torch.Tensor:
    """Convert to float64; to float32 if the device has no float64, or for 16-bit operands if ``may_be_float32``."""
    wide = torch.float32 if may_be_float32 and tensor.dtype.itemsize < 4 else torch.float64
    try:
        return tensor.detach().to(wide)
    except TypeError:
        return tensor.detach().to(torch.float32)


def yield_row_blocks(
    shape: AttentionShape, device: torch.device, rows: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield blocks of query row numbers, each with its mask: [rows, keys], True where a key is masked.

    ``rows``: the query rows to go through; None: all.
    """
    offset = shape.seqlen_k - shape.seqlen_q
    keys = torch.arange(shape.seqlen_k, device=device)
    for block in (torch.arange(shape.seqlen_q, device=device) if rows is None else rows).split(_ROWS_PER_BLOCK):
        aligned = block[:, None] + offset
        masked = torch.zeros(len(block), shape.seqlen_k, dtype=torch.bool, device=device)
        if shape.causal:
            masked |= keys > aligned
        if shape.window is not None:
            masked |= keys < aligned - shape.window
            masked |= keys > aligned + shape.window
        yield block, masked


# Inputs with block structure: tokens per block, the number of axes that blocks point along, and how strongly. At 2.2
# the keys of a block are similar enough for kernels that skip only blocks of similar keys.
_TOKENS_PER_STRUCTURE_BLOCK = 128
_STRUCTURE_AXES = 10
_STRUCTURE_STRENGTH = 2.2


def make_block_structured_inputs(
    q: torch.Tensor, k: torch.Tensor, sparsity: float, sequence: int
) -> dict[str, torch.Tensor]:
    """Return q and k in which each block of queries attends to only 1 - ``sparsity`` of the key blocks.

    In random data every key matters a little. Here the blocks of keys point along _AXES axes in turn, and queries
    point along the axes that they attend to, so that all other scores vanish in the softmax. ``sequence``: the sequence
    dimension, 2 or 1.
    """
    width = q.shape[-1]
    attended = _count_attended_axes(sparsity)
    axes = torch.eye(_STRUCTURE_AXES, width, device=q.device) * math.sqrt(_STRUCTURE_STRENGTH * width)
    spread = torch.stack([axes.roll(-group, 0)[:attended].sum(0) for group in range(_STRUCTURE_AXES)])

    def add_pattern(tensor: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        group = (
            torch.arange(tensor.shape[sequence], device=tensor.device) // _TOKENS_PER_STRUCTURE_BLOCK % _STRUCTURE_AXES
        )
        pattern = directions[group]
        return tensor + (pattern if sequence == 2 else pattern[:, None]).to(tensor.dtype)

    return {"q": add_pattern(q, spread), "k": add_pattern(k, axes)}


def _count_attended_axes(sparsity: float) -> int:
    """Return how many of the _AXES axes a query attends to."""
    return max(1, round((1 - sparsity) * _STRUCTURE_AXES))


def compute_relevant_share(sparsity: float, length: int) -> float:
    """Return the share of key blocks that a query attends to, for inputs with this ``sparsity`` and ``length`` keys.

    It differs between queries if the blocks do not divide evenly among the axes; this is the largest.
    """
    if not sparsity:
        return 1.0
    blocks = -(-length // _TOKENS_PER_STRUCTURE_BLOCK)
    sizes = [len(range(group, blocks, _STRUCTURE_AXES)) for group in range(_STRUCTURE_AXES)]
    attended = range(_count_attended_axes(sparsity))
    return (
        max(sum(sizes[(group + step) % _STRUCTURE_AXES] for step in attended) for group in range(_STRUCTURE_AXES))
        / blocks
    )


def verify_special_attention(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], launch: Callable[[], torch.Tensor]
) -> Verdict:
    """Verify a launch with an infinity in V and a NaN in Q.

    The infinity is in a key that all queries see, so its whole output column must become non-finite. The NaN must make
    its output row NaN; some kernels lose it, which is recorded in the details and is not an error. All other output
    must keep its bits. The operands and the output that ``launch`` returns are [batch, heads, sequence, head
    dimension]. If no key is seen by all queries, nothing is checked and the verdict is ok.
    """
    if shape.window is not None or (shape.causal and shape.seqlen_q > shape.seqlen_k):
        return Verdict(0.0, 0.0)
    q, v, key = operands["q"], operands["v"], 0 if shape.causal else shape.seqlen_k - 1
    expected = launch().clone()
    batch, head, row, _ = (secrets.randbelow(size) for size in q.shape)
    group, column = q.shape[1] // v.shape[1], secrets.randbelow(v.shape[-1])
    shared = head // group
    saved = [(each, each.clone()) for each in (q[batch, head, row], v[batch, shared, key])]
    try:
        q[batch, head, row, 0] = math.nan
        v[batch, shared, key, column] = math.inf
        found = launch()
    finally:
        for memory, values in saved:
            memory.copy_(values)
    own = (batch, slice(shared * group, (shared + 1) * group), slice(None), column)
    expected[own] = torch.where(found[own].isfinite(), math.nan, found[own])
    lost = int(found[batch, head, row].isfinite().sum().item())
    expected[batch, head, row] = found[batch, head, row]
    return verify_special_values(found, expected, "an infinity and a NaN", {LOST_NAN: lost} if lost else {})
