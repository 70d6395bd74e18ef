"""The reference for attention, and inputs with block structure for kernels that skip blocks of keys.

The reference is plain products and exponentials in float64 (float32 if a device has no float64), in blocks of rows.

A check of samples compares one random row of every 64 of the output and of dQ in two heads, the first and the last. A
check of everything compares all of these two heads; such rows in all heads, so a zeroed tile of 128 rows cannot escape;
and in all heads the sums of dK and dV along the keys, which are known without any product. The reference runs on the
device (a head of 16384 tokens takes 10**12 FLOP), with code that is independent of the kernels, and for a few rows also
on the host.
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
from mamf.operations.attention.shapes import AttentionShape
from mamf.operations.operand_sets import float32_precision, fresh_integers, one_thread, verify_beside_special

_ROWS = 1024
#: One row of this many is compared in each head.
_EVERY = 64
# Elements of scores, or of an operand, that are computed at once for the rows of all heads.
_CHUNK = 2**24
# The most elements of a head's keys that are copied to the host, and the number of rows compared there.
_MAX_ON_HOST, _ROWS_ON_HOST = 2**22, 4


@dataclass(frozen=True)
class Distance:
    """The distance of results from the reference: ||x - reference|| / ||reference|| for ``o``, ``dq``, ``dk``, ``dv``,
    and the deviation of the slope of x against the reference from 1. For the output also the error of the worst row,
    the cosine similarity and the L1 distance relative to its L1 norm. ``rows``: the fewest rows compared for a result.
    """

    errors: dict[str, float]
    slopes: dict[str, float]
    worst_row: float
    cosine: float
    relative_l1: float
    rows: int


class _Tally:
    """Sums over pairs of a result and its expected value."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._worst_row = 0.0

    def add(self, name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        result = result.to(expected.dtype)
        difference = result - expected
        squares, lengths = (difference.square(), expected.square()), (difference.abs(), expected.abs())
        of_both = (difference * expected, result.square())
        sums = torch.stack([each.sum() for each in (*squares, *lengths, *of_both)]).tolist()
        before = self._sums.setdefault(name, [0.0] * 7)
        self._sums[name] = [a + b for a, b in zip(before, (*sums, expected.shape[:-1].numel()), strict=True)]
        if name == "o":
            self._worst_row = max(self._worst_row, worst_relative_row(result, expected))

    def distance(self) -> Distance:
        errors = {name: relative(of[0], of[1]) for name, of in self._sums.items()}
        slopes = {name: of[4] / of[1] if of[1] else 0.0 for name, of in self._sums.items()}
        _, size, l1, reference_l1, along, norm, _ = self._sums["o"]
        cosine = (size + along) / math.sqrt(norm * size) if norm * size > 0 else float(norm == size)
        rows = int(min(of[6] for of in self._sums.values()))
        return Distance(errors, slopes, self._worst_row, cosine, l1 / reference_l1 if reference_l1 else l1, rows)


def distance_of_heads(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> Distance:
    """The distance of all of the first and the last head. Operands (q, k, v and, with a backward pass, do) and results
    (o, and dq, dk, dv) are batch, heads, sequence, width.
    """
    tally = _Tally()
    for batch, kv in _edge_heads(shape):
        for name, expected in reference_of(shape, operands, batch, kv).items():
            tally.add(name, pick(results[name], shape, batch, kv), expected)
    return tally.distance()


def distance_of_rows(
    shape: AttentionShape,
    operands: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
    is_whole: bool = True,
) -> Distance:
    """The distance of random rows of ``o`` and ``dq``, one of every _EVERY; of all heads if ``is_whole``, else of the
    first and the last. In float32 for operands of 16 bits, because float64 is slow on some cards.
    """
    tally, device = _Tally(), operands["q"].device
    starts = torch.arange(0, shape.seqlen_q + _EVERY, _EVERY, device=device)
    offsets = fresh_integers(_EVERY, starts.shape, device)
    # The last row too: under a causal mask the first row has a dQ of 0, which alone allows no relative error.
    rows = (starts + offsets).clamp_max(shape.seqlen_q - 1)
    widest = max(shape.head_dim, shape.head_dim_v, shape.heads // shape.kv_heads * min(len(rows), _ROWS))
    step = max(1, _CHUNK // (shape.seqlen_k * widest))
    parts = itertools.product(range(shape.batch), range(0, shape.kv_heads, step))
    with float32_precision("highest"):
        for batch, kv in [(b, slice(at, at + step)) for b, at in parts] if is_whole else _edge_heads(shape):
            for name, expected in reference_of(shape, operands, batch, kv, rows).items():
                tally.add(name, pick(results[name], shape, batch, kv)[:, :, rows], expected)
    return tally.distance()


def _edge_heads(shape: AttentionShape) -> list[tuple[int, slice]]:
    """The first and the last kv head, each with its place in the batch."""
    edges = dict.fromkeys([(0, 0), (shape.batch - 1, shape.kv_heads - 1)])
    return [(batch, slice(head, head + 1)) for batch, head in edges]


def distance_on_host(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> Distance | None:
    """The same for a few rows of a random head's output, on the host in float64; None if heads are too long."""
    if shape.seqlen_k * max(shape.head_dim, shape.head_dim_v) > _MAX_ON_HOST:
        return None
    tally, batch, head = _Tally(), secrets.randbelow(shape.batch), secrets.randbelow(shape.kv_heads)
    rows = torch.tensor([secrets.randbelow(shape.seqlen_q) for _ in range(_ROWS_ON_HOST)])
    own = [pick(each, shape, batch, slice(head, head + 1)) for each in (*operands.values(), results["o"])]
    *heads, found = (each[0].cpu()[None].double() for each in own)
    one = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    with one_thread():
        expected = reference_of(one, dict(zip(operands, heads, strict=True)), 0, slice(0, 1), rows)
        tally.add("o", found[:, :, rows], expected["o"])
    return tally.distance()


def error_of_key_sums(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> float:
    """The largest error of the sums of ``dk`` and ``dv`` along the keys, in units of the norm of the summed elements.

    Rows of P sum to 1 and rows of dS to 0, so dV = P^T dO sums to the sum of dO over the queries that see a key, and
    dK = dS^T Q / sqrt(d) sums to 0. A single query leaves dV as products of two short numbers, whose
    rounding errors may agree for all keys: half an eps of each element is taken off.
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


def worst_relative_row(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row; infinite if a row contains NaN."""
    difference = torch.linalg.vector_norm(result - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    return torch.where(size > 0, difference / size, difference).nan_to_num(nan=math.inf).max().item()


def relative(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.nan
    return math.sqrt(difference / size) if size else (0.0 if difference == 0 else math.inf)


def pick(tensor: torch.Tensor, shape: AttentionShape, batch: int, kv: slice) -> torch.Tensor:
    """Some kv heads, and the heads that share each, as kv heads, heads (1 for keys and values), length, width."""
    found: torch.Tensor = tensor[batch].unflatten(0, (shape.kv_heads, -1))[kv]
    return found


def reference_of(
    shape: AttentionShape,
    tensors: Mapping[str, torch.Tensor],
    batch: int,
    kv: slice,
    rows: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Output and, given do, gradients of some kv heads and the heads that share them; with ``rows``, only their output
    and dQ.

    dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d) (Dao, FlashAttention-2,
    2023, section 2.2).
    """
    names = [name for name in ("q", "k", "v", "do") if name in tensors]
    q, k, v, *rest = (to_float64(pick(tensors[name], shape, batch, kv), rows is not None) for name in names)
    scale = 1 / math.sqrt(shape.head_dim)
    results: dict[str, list[torch.Tensor]] = {"o": [], "dq": []}
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for block, masked in row_blocks(shape, q.device, rows):
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
    """A tensor in float64, or in float32 if the device has no float64 or if float32 is enough for 16-bit operands."""
    wide = torch.float32 if may_be_float32 and tensor.dtype.itemsize < 4 else torch.float64
    try:
        return tensor.detach().to(wide)
    except TypeError:
        return tensor.detach().to(torch.float32)


def row_blocks(
    shape: AttentionShape, device: torch.device, rows: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of query rows (all, or these), each with its mask of keys."""
    offset = shape.seqlen_k - shape.seqlen_q
    keys = torch.arange(shape.seqlen_k, device=device)
    for block in (torch.arange(shape.seqlen_q, device=device) if rows is None else rows).split(_ROWS):
        aligned = block[:, None] + offset
        masked = torch.zeros(len(block), shape.seqlen_k, dtype=torch.bool, device=device)
        if shape.causal:
            masked |= keys > aligned
        if shape.window is not None:
            masked |= keys < aligned - shape.window
            masked |= keys > aligned + shape.window
        yield block, masked


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
    axes = torch.eye(_GROUPS, width, device=q.device) * math.sqrt(_STRUCTURE * width)
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


def verify_special_attention(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], launch: Callable[[], torch.Tensor]
) -> Verdict:
    """Verify a launch with an infinity and a NaN among the operands. They and what ``launch`` returns are batch, heads,
    sequence, width. Needs a key that all queries see.

    An infinity in V leaves no value of its column finite. A NaN in a query makes its row of O NaN; some kernels lose
    it, which is no error but a detail. All other values must have the bits that they had.
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
    return verify_beside_special(found, expected, "an infinity and a NaN", {LOST_NAN: lost} if lost else {})
