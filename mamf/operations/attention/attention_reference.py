"""Compute reference results for the verification of attention kernels, and make inputs with block structure.

The reference consists of matmuls and a softmax in float64 (float32 if a device has no float64), in blocks of rows. Its
code is independent of the kernels. The reference runs on the device, because one head of 16384 tokens takes 10**12
FLOP. In this file, O is the output, P the softmax, S the scores, and dX the gradient of X.

A quick check compares a sample of rows of O and dQ in the first and the last head: one random row in each group of 64.
A full check compares:

- in the first and the last head, all of O and all gradients;
- in all heads, one random row of O and of dQ in each group of 64, so that an error in a whole tile of 128 rows is
  always found;
- in all heads, the sums of dK and dV along the keys. Their expected values can be computed without a matmul;
- in one head, a few rows of O, with a reference that the host computes.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from mamf.kernel import Verdict
from mamf.measurement import LOST_NAN_KEY
from mamf.operations.attention.operation import AttentionShape
from mamf.operations.freivalds import divide_or_return_inf
from mamf.operations.operand_sets import (
    compute_max_error,
    draw_integers,
    use_float32_precision,
    use_one_torch_thread,
    verify_special_value_output,
)

# The number of query rows that the reference computes at once.
_ROWS_PER_BLOCK = 1024
# A check that samples rows compares one random row in each group of this many consecutive rows of a head.
_ROW_SAMPLING_INTERVAL = 64
# A check that samples rows of all heads processes the heads in chunks. In each chunk, the largest tensor (the scores or
# an operand) has about this many elements.
_ELEMENTS_PER_HEAD_CHUNK = 2**24
# The host compares _ROWS_COMPARED_ON_HOST rows of one head. For this, mamf copies the keys of this head to the host. If
# the keys have more than _MAX_KEY_ELEMENTS_ON_HOST elements, mamf skips the comparison.
_MAX_KEY_ELEMENTS_ON_HOST, _ROWS_COMPARED_ON_HOST = 2**22, 4


@dataclass(frozen=True)
class ReferenceDistance:
    """How far the results of one launch are from the reference.

    - ``relative_errors``: ||x - reference|| / ||reference|| for each result x (``o``, ``dq``, ``dk``, ``dv``), by its
      name.
    - ``slope_errors``: the slope of a linear fit of x to the reference, minus 1, for each result x, by its name.
    - ``worst_row_error``: the relative error of the worst row of the output.
    - ``cosine_similarity``: the cosine similarity of the output and the reference.
    - ``relative_l1_error``: ||o - reference||_1 / ||reference||_1 for the output o.
    - ``min_compared_row_count``: the number of rows that were compared, for the result with the fewest such rows.
    """

    relative_errors: dict[str, float]
    slope_errors: dict[str, float]
    worst_row_error: float
    cosine_similarity: float
    relative_l1_error: float
    min_compared_row_count: int

    @property
    def max_gradient_error(self) -> float:
        """The largest relative error of a gradient; 0 if there are no gradients."""
        return compute_max_error(error for name, error in self.relative_errors.items() if name != "o")


# If the squared norm of a gradient is below this share of its usual squared norm, its terms cancel, and the gradient
# consists mainly of rounding errors. Its error is then measured relative to the usual norm.
_MIN_SQUARED_NORM_SHARE = 1e-6


def compute_reference_distance(
    comparisons: Iterable[tuple[str, torch.Tensor, torch.Tensor]],
    squared_row_norm_by_result: Mapping[str, float] = MappingProxyType({}),
) -> ReferenceDistance:
    """Measure how far results are from the reference.

    ``comparisons``: for each compared part of a result, the name of the result (``o``, ``dq``, ``dk`` or ``dv``), the
    part, and its expected values. ``squared_row_norm_by_result``: what ``estimate_squared_row_norms`` returns.
    """
    sums_by_result: dict[str, list[float]] = {}
    worst_row_error = 0.0
    for name, result, expected in comparisons:
        result = result.to(expected.dtype)
        difference = result - expected
        squares, magnitudes = (difference.square(), expected.square()), (difference.abs(), expected.abs())
        summands = (*squares, *magnitudes, difference * expected, result.square())
        new_sums = torch.stack([summand.sum() for summand in summands]).tolist()
        old_sums = sums_by_result.get(name, [0.0] * 7)
        sums_by_result[name] = [a + b for a, b in zip(old_sums, (*new_sums, expected.shape[:-1].numel()), strict=True)]
        if name == "o":
            worst_row_error = max(worst_row_error, _compute_worst_row_error(result, expected))
    # In the code below, o, r and d are sums of squares: of the result, of the reference, and of their difference. The
    # inner product of the difference and the reference is p.
    usual = {name: sums_by_result[name][-1] * norm for name, norm in squared_row_norm_by_result.items()}
    cancelled = {name for name, norm in usual.items() if sums_by_result[name][1] < _MIN_SQUARED_NORM_SHARE * norm}
    errors = {
        name: math.sqrt(divide_or_return_inf(d, usual[name] if name in cancelled else r))
        for name, (d, r, *_) in sums_by_result.items()
    }
    slopes = {
        name: p / r if r and name not in cancelled else 0.0 for name, (_, r, _, _, p, *_) in sums_by_result.items()
    }
    _, r, l1, reference_l1, p, o, _ = sums_by_result["o"]
    cosine = (r + p) / math.sqrt(o * r) if o * r > 0 else float(o == r)
    rows = int(min(rows for *_, rows in sums_by_result.values()))
    return ReferenceDistance(errors, slopes, worst_row_error, cosine, l1 / reference_l1 if reference_l1 else l1, rows)


def estimate_squared_row_norms(shape: AttentionShape, operands: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Estimate the mean squared norm of a row of ``dq`` and of ``dk``, for operands that are random numbers. Return an
    empty dict if the operands contain no ``do``.

    The estimate shows whether the terms of a gradient cancel. For example, if every query sees a single key, P is 1,
    and dQ = dS K / sqrt(d) is 0, because dS = P * (dO V^T - rowsum(dO * O)) is 0.
    """
    if "do" not in operands:
        return {}
    mean_square = {
        name: torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).item() ** 2
        / tensor.numel()
        for name, tensor in operands.items()
    }
    keys_per_query = max(1.0, shape.unmasked_pairs_per_head / shape.seqlen_q)
    # The elements of P are about 1 / keys_per_query, so this is the sum of dS * dS over the keys of one query.
    squared_score_gradients = mean_square["do"] * mean_square["v"] * shape.head_dim_v / keys_per_query
    queries_per_key = shape.heads / shape.kv_heads * shape.seqlen_q / shape.seqlen_k
    return {
        "dq": squared_score_gradients * mean_square["k"],
        "dk": squared_score_gradients * mean_square["q"] * queries_per_key,
    }


# mamf fits a line through the origin to a result as a function of the reference. For a correct result, the slope of the
# line may differ from 1 by _MAX_SLOPE_ERROR, plus MAX_ROUNDING_DEVIATIONS times the standard deviation that rounding
# causes.
_MAX_SLOPE_ERROR, MAX_ROUNDING_DEVIATIONS = 1e-3, 8.0
# The largest allowed error of the sum of a row of P, in epsilons of the softmax's dtype. In torch's efficient attention
# on an H200, the standard deviation of this error was 7 with 60,000 keys.
_MAX_SOFTMAX_ERROR = 8 * MAX_ROUNDING_DEVIATIONS
# The largest allowed relative error of a single row of the output, for exact and for approximate kernels. Rounding
# causes far smaller errors, and a row that the kernel never wrote has a far larger error.
_EXACT_ROW_TOLERANCE, _APPROXIMATE_ROW_TOLERANCE = 0.25, 0.6


def judge_distance(
    distance: ReferenceDistance, error_bound: float, gradient_tolerance_factor: float = 1.0, is_exact: bool = True
) -> Verdict:
    """Judge whether results with this distance from the reference are right, and return the verdict.

    Check the relative errors and the error of the worst row of the output. For an exact kernel, also check the slope
    errors. They reveal that a result is scaled by a factor very close to 1, which hardly changes the relative errors.
    ``error_bound``: the largest relative error of a correct output. ``gradient_tolerance_factor``: how many times
    larger than ``error_bound`` the relative error of a gradient may be.
    """
    # A single missing row hardly changes the norm of a long output, so check the worst row against its own limit.
    row_error = (
        distance.worst_row_error / (_EXACT_ROW_TOLERANCE if is_exact else _APPROXIMATE_ROW_TOLERANCE) * error_bound
    )
    max_error = compute_max_error(
        (
            distance.relative_errors["o"],
            distance.max_gradient_error / gradient_tolerance_factor,
            row_error if row_error > error_bound else 0.0,
        )
    )
    reason = ""
    for name, slope_error in distance.slope_errors.items() if is_exact and max_error <= error_bound else ():
        deviation = distance.relative_errors[name] / math.sqrt(distance.min_compared_row_count)
        max_slope_error = min(_MAX_SLOPE_ERROR, error_bound) + MAX_ROUNDING_DEVIATIONS * deviation
        if abs(slope_error) > max_slope_error:
            reason = (
                f"the {'output' if name == 'o' else 'gradient ' + name} is {1 + slope_error:.6g} times the reference; "
                f"rounding changes this factor by at most {max_slope_error:.1g}"
            )
    # The relative error varies more if few rows are compared: with 3 tokens, gradients can have twice the relative
    # error that they have with many tokens. So allow larger errors for few rows.
    few_rows_factor = 1 if max_error <= error_bound else 1 + 2 / math.sqrt(distance.min_compared_row_count)
    return Verdict(max_error / few_rows_factor, error_bound, reason=reason)


def compare_edge_heads(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> ReferenceDistance:
    """Compute the reference for the first and the last head, and return how far the results are from it.

    ``operands``: q, k, v and, for a backward pass, do. ``results``: o and, for a backward pass, dq, dk and dv. Each
    tensor has the shape [batch, heads, sequence, head dimension].
    """
    comparisons = (
        (name, view_heads(results[name], shape, batch, kv_slice), expected)
        for batch, kv_slice in find_edge_heads(shape)
        for name, expected in compute_reference_attention(shape, operands, batch, kv_slice).items()
    )
    return compute_reference_distance(comparisons, estimate_squared_row_norms(shape, operands))


def compare_rows(
    shape: AttentionShape,
    operands: Mapping[str, torch.Tensor],
    results: Mapping[str, torch.Tensor],
    covers_all_heads: bool = True,
) -> ReferenceDistance:
    """Compute the reference for one random row in 64, and return how far ``o`` and ``dq`` are from it.

    ``covers_all_heads``: whether to compare all heads, not only the first and the last. The other parameters are those
    of ``compare_edge_heads``. For 16-bit operands, compute the reference in float32, because float64 is slow on some
    cards.
    """
    device = operands["q"].device
    group_starts = torch.arange(0, shape.seqlen_q + _ROW_SAMPLING_INTERVAL, _ROW_SAMPLING_INTERVAL, device=device)
    # Always include the last row. Under a causal mask, dQ is 0 in the first row, and the relative error of dQ is
    # undefined if dQ is 0 in all compared rows.
    rows = (group_starts + draw_integers(_ROW_SAMPLING_INTERVAL, group_starts.shape, device)).clamp_max(
        shape.seqlen_q - 1
    )
    max_width = max(shape.head_dim, shape.head_dim_v, shape.heads // shape.kv_heads * min(len(rows), _ROWS_PER_BLOCK))
    heads_per_chunk = max(1, _ELEMENTS_PER_HEAD_CHUNK // (shape.seqlen_k * max_width))
    chunks = itertools.product(range(shape.batch), range(0, shape.kv_heads, heads_per_chunk))
    heads = [(b, slice(kv, kv + heads_per_chunk)) for b, kv in chunks] if covers_all_heads else find_edge_heads(shape)
    with use_float32_precision("highest"):
        squared_row_norms = estimate_squared_row_norms(shape, operands)
        squared_row_norms.pop("dk", None)
        comparisons = (
            (name, view_heads(results[name], shape, batch, kv_slice)[:, :, rows], expected)
            for batch, kv_slice in heads
            for name, expected in compute_reference_attention(shape, operands, batch, kv_slice, rows).items()
        )
        return compute_reference_distance(comparisons, squared_row_norms)


def find_edge_heads(shape: AttentionShape) -> list[tuple[int, slice]]:
    """Return the first and the last kv head, each as the index of its sequence and the slice that selects the head."""
    return [
        (batch, slice(head, head + 1)) for batch, head in dict.fromkeys([(0, 0), (shape.batch - 1, shape.kv_heads - 1)])
    ]


def compare_rows_on_host(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> ReferenceDistance | None:
    """Compute a few rows of the output of a random kv head in float64 on the host, and compare ``o`` with these rows.

    Return None if the keys of a head are too large to copy. The parameters are those of ``compare_edge_heads``.
    """
    if shape.seqlen_k * max(shape.head_dim, shape.head_dim_v) > _MAX_KEY_ELEMENTS_ON_HOST:
        return None
    batch, head = secrets.randbelow(shape.batch), secrets.randbelow(shape.kv_heads)
    rows = torch.tensor([secrets.randbelow(shape.seqlen_q) for _ in range(_ROWS_COMPARED_ON_HOST)])
    tensors = (*operands.values(), results["o"])
    *head_operands, output = (
        view_heads(tensor, shape, batch, slice(head, head + 1))[0].cpu()[None].double() for tensor in tensors
    )
    head_shape = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    with use_one_torch_thread():
        expected = compute_reference_attention(
            head_shape, dict(zip(operands, head_operands, strict=True)), 0, slice(0, 1), rows
        )
        return compute_reference_distance([("o", output[:, :, rows], expected["o"])])


def compute_key_sum_error(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor]
) -> float:
    """Sum ``dk`` and ``dv`` along the keys. Return the largest error of a sum, divided by the norm of its terms.

    Each row of P sums to 1 and each row of dS to 0. So the sum of dV = P^T dO along the keys is the sum of dO over the
    queries that see a key, and the sum of dK = dS^T Q / sqrt(d) is 0.

    Most rounding errors average out in these sums. Subtract the largest errors that do not: those of the sums of P's
    rows (_MAX_SOFTMAX_ERROR) and, with one query, half the epsilon of dV's dtype, because all elements may be rounded
    alike. Do not check dK if each query sees at most one key on average: dK then consists mainly of rounding errors.
    """
    blind_query_count = shape.seqlen_q - shape.seqlen_k - (0 if shape.causal else shape.window or shape.seqlen_q)
    max_error = 0.0
    for batch in range(shape.batch):
        output_gradients = convert_to_reference_dtype(operands["do"][batch, :, max(0, blind_query_count) :])
        query_sums = output_gradients.sum(1).unflatten(0, (shape.kv_heads, -1)).sum(1)
        query_norms = torch.linalg.vector_norm(output_gradients.unflatten(0, (shape.kv_heads, -1)), dim=(1, 2))
        for name, expected in (("dk", 0.0), ("dv", query_sums)):
            gradients = convert_to_reference_dtype(results[name][batch])
            norms = torch.linalg.vector_norm(gradients, dim=1)
            shared_rounding = torch.finfo(results[name].dtype).eps / 2 if name == "dv" and shape.seqlen_q == 1 else 0.0
            if name == "dk" and shape.unmasked_pairs_per_head <= shape.seqlen_q:
                continue
            softmax = torch.finfo(torch.promote_types(results[name].dtype, torch.float32))
            softmax_error = _MAX_SOFTMAX_ERROR * softmax.eps * query_norms if name == "dv" else 0.0
            excess = (gradients.sum(1) - expected).abs() - shared_rounding * gradients.abs().sum(1) - softmax_error
            error = excess.clamp_min(0.0) / torch.maximum(norms, norms.mean())
            max_error = max(max_error, error.nan_to_num(nan=0.0 if not norms.any() else math.inf).max().item())
    return max_error


def _compute_worst_row_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a row. The error is infinite if a row contains NaN.

    If the expected values of a row are all 0, its relative error is undefined. Use the norm of its error instead.
    """
    difference = torch.linalg.vector_norm(result - expected, dim=-1)
    norm = torch.linalg.vector_norm(expected, dim=-1)
    return torch.where(norm > 0, difference / norm, difference).nan_to_num(nan=math.inf).max().item()


def view_heads(tensor: torch.Tensor, shape: AttentionShape, batch: int, kv_slice: slice) -> torch.Tensor:
    """Return a view of those heads of one sequence that share the kv heads in ``kv_slice``.

    ``batch``: the index of the sequence. The result has the shape [kv heads, heads per kv head, sequence, head
    dimension]. For keys and values, its second dimension is 1.
    """
    return tensor[batch].view(shape.kv_heads, -1, *tensor.shape[2:])[kv_slice]


def compute_reference_attention(
    shape: AttentionShape,
    tensors: Mapping[str, torch.Tensor],
    batch: int,
    kv_slice: slice,
    rows: torch.Tensor | None = None,
    scale: float | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the output and, if ``tensors`` contains do, the gradients of all heads that share the kv heads in
    ``kv_slice``.

    ``batch``: the index of the sequence. ``rows``: compute only these rows of the output and of dQ, and neither dK nor
    dV; None: compute everything. ``scale``: the factor by which Q K^T is multiplied; None: 1 / sqrt(d). Return the
    results by name, in the shapes that ``view_heads`` returns.

    The gradients are dV = P^T dO, dQ = dS K / sqrt(d) and dK = dS^T Q / sqrt(d). In them, dS is
    P * (dO V^T - rowsum(dO * O)). See section 2.2 of Dao, FlashAttention-2, 2023.
    """
    q, k, v, *output_gradients = (
        convert_to_reference_dtype(view_heads(tensors[name], shape, batch, kv_slice), rows is not None)
        for name in ("q", "k", "v", "do")
        if name in tensors
    )
    scale = scale or 1 / math.sqrt(shape.head_dim)
    blocks_by_result: dict[str, list[torch.Tensor]] = {"o": [], "dq": []}
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for block, masked in yield_row_blocks(shape, q.device, rows):
        scores = (q[:, :, block] @ k.mT) * scale
        probabilities = torch.softmax(scores.masked_fill_(masked, -math.inf), dim=-1).nan_to_num_(0.0)
        output = probabilities @ v
        blocks_by_result["o"].append(output)
        if output_gradients:
            gradient = output_gradients[0][:, :, block]
            score_gradients = gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)
            score_gradients *= probabilities
            blocks_by_result["dq"].append(score_gradients @ k * scale)
            if rows is None:
                dv += (probabilities.mT @ gradient).sum(1, keepdim=True)
                dk += (score_gradients.mT @ q[:, :, block]).sum(1, keepdim=True) * scale
    whole_results = {name: torch.cat(blocks, dim=2) for name, blocks in blocks_by_result.items() if blocks}
    return {**whole_results, "dk": dk, "dv": dv} if output_gradients and rows is None else whole_results


def convert_to_reference_dtype(tensor: torch.Tensor, allows_float32: bool = False) -> torch.Tensor:
    """Convert a tensor to the dtype of the reference: float64, or float32 if the device has no float64.

    ``allows_float32``: whether to convert 16-bit operands to float32 instead, because float64 is slow on some cards.
    """
    dtype = torch.float32 if allows_float32 and tensor.dtype.itemsize < 4 else torch.float64
    try:
        return tensor.detach().to(dtype)
    except TypeError:
        return tensor.detach().to(torch.float32)


def yield_row_blocks(
    shape: AttentionShape, device: torch.device, rows: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield query rows in blocks. For each block, yield the indices of its rows, and its mask [rows, keys], which is
    True for masked keys.

    ``rows``: the indices of the query rows to yield; None: all rows.
    """
    offset = shape.seqlen_k - shape.seqlen_q
    keys = torch.arange(shape.seqlen_k, device=device)
    for block in (torch.arange(shape.seqlen_q, device=device) if rows is None else rows).split(_ROWS_PER_BLOCK):
        aligned_keys = block[:, None] + offset
        masked = torch.zeros(len(block), shape.seqlen_k, dtype=torch.bool, device=device)
        if shape.causal:
            masked |= keys > aligned_keys
        if shape.window is not None:
            masked |= keys < aligned_keys - shape.window
            masked |= keys > aligned_keys + shape.window
        yield block, masked


# Parameters of inputs with block structure: the number of tokens in a block, the number of axes, and the strength of
# the pattern relative to the random values. All keys of a block point along the same axis. At a strength of 2.2, the
# keys of a block are similar enough for kernels that skip only blocks of similar keys.
_TOKENS_PER_STRUCTURE_BLOCK = 128
_STRUCTURE_AXIS_COUNT = 10
_STRUCTURE_STRENGTH = 2.2


def make_block_structured_inputs(
    q: torch.Tensor, k: torch.Tensor, sparsity: float, sequence_dim: int
) -> dict[str, torch.Tensor]:
    """Add a pattern to q and k that makes each query attend to a share of 1 - ``sparsity`` of the key blocks.

    With purely random q and k, every key affects the output a little. The pattern makes the keys of a block point along
    one of _STRUCTURE_AXIS_COUNT axes, and makes each query point along the axes of the keys to which it attends. All
    other keys get a softmax weight of almost 0. ``sequence_dim``: the index of the sequence dimension, 2 or 1. Return
    the new q and k by name.
    """
    width = q.shape[-1]
    axes = torch.eye(_STRUCTURE_AXIS_COUNT, width, device=q.device) * math.sqrt(_STRUCTURE_STRENGTH * width)
    query_axes = torch.stack(
        [axes.roll(-group, 0)[: _count_attended_axes(sparsity)].sum(0) for group in range(_STRUCTURE_AXIS_COUNT)]
    )

    def add_pattern(tensor: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        group = (
            torch.arange(tensor.shape[sequence_dim], device=tensor.device)
            // _TOKENS_PER_STRUCTURE_BLOCK
            % _STRUCTURE_AXIS_COUNT
        )
        pattern = directions[group]
        return tensor + (pattern if sequence_dim == 2 else pattern[:, None]).to(tensor.dtype)

    return {"q": add_pattern(q, query_axes), "k": add_pattern(k, axes)}


def _count_attended_axes(sparsity: float) -> int:
    """Return how many of the _STRUCTURE_AXIS_COUNT axes have key blocks to which a query attends."""
    return max(1, round((1 - sparsity) * _STRUCTURE_AXIS_COUNT))


def compute_attended_share(sparsity: float, key_count: int) -> float:
    """Return the share of key blocks to which a query attends, in inputs with block structure.

    If the number of blocks is not a multiple of the number of axes, the share differs between queries. Then return the
    largest share. ``sparsity``: the argument of ``make_block_structured_inputs``. ``key_count``: the number of keys.
    """
    blocks = -(-key_count // _TOKENS_PER_STRUCTURE_BLOCK)
    sizes = [len(range(group, blocks, _STRUCTURE_AXIS_COUNT)) for group in range(_STRUCTURE_AXIS_COUNT)]
    attended = range(_count_attended_axes(sparsity))
    return (
        max(
            sum(sizes[(group + step) % _STRUCTURE_AXIS_COUNT] for step in attended)
            for group in range(_STRUCTURE_AXIS_COUNT)
        )
        / blocks
    )


def verify_nan_and_infinity(
    shape: AttentionShape, operands: Mapping[str, torch.Tensor], launch: Callable[[], torch.Tensor]
) -> Verdict:
    """Verify a launch with an infinity in V and a NaN in Q.

    The infinity is in one column of V, in the row of a key that all queries see. So the same column of the output must
    contain only infinities and NaN. The NaN in Q should make a row of the output NaN. If elements of this row are
    finite, the verdict is still ok, and its details count these elements. All other elements of the output must equal
    those of a launch without the special values.

    The operands, and the output that ``launch`` returns, have the shape [batch, heads, sequence, head dimension]. If no
    key is certain to be visible to all queries, skip the check and return a verdict that is ok.
    """
    if shape.window is not None or (shape.causal and shape.seqlen_q > shape.seqlen_k):
        return Verdict(0.0, 0.0)
    q, v, key = operands["q"], operands["v"], 0 if shape.causal else shape.seqlen_k - 1
    expected = launch().clone()
    batch, head, row, _ = (secrets.randbelow(size) for size in q.shape)
    heads_per_kv_head, column = q.shape[1] // v.shape[1], secrets.randbelow(v.shape[-1])
    kv_head = head // heads_per_kv_head
    saved_values = [(row_view, row_view.clone()) for row_view in (q[batch, head, row], v[batch, kv_head, key])]
    try:
        q[batch, head, row, 0] = math.nan
        v[batch, kv_head, key, column] = math.inf
        output = launch()
    finally:
        for row_view, values in saved_values:
            row_view.copy_(values)
    infinite_column = (
        batch,
        slice(kv_head * heads_per_kv_head, (kv_head + 1) * heads_per_kv_head),
        slice(None),
        column,
    )
    expected[infinite_column] = torch.where(output[infinite_column].isfinite(), math.nan, output[infinite_column])
    lost_nan_count = int(output[batch, head, row].isfinite().sum().item())
    expected[batch, head, row] = output[batch, head, row]
    return verify_special_value_output(
        output, expected, "an infinity and a NaN", {LOST_NAN_KEY: lost_nan_count} if lost_nan_count else {}
    )
