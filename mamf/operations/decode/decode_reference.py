"""The tables of a cache, and the reference that kernels are verified against: float64 matmuls and a softmax.

Before timing and at the end the whole output is compared; between trains of a burst, the output of a random sequence.
The reference runs on the device in code that is independent of the kernels. One head of a random sequence is computed
on the host as well.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from mamf.errors import UsageError
from mamf.kernel import Verdict
from mamf.operations.attention.attention_reference import relative_error, to_float64, worst_relative_row
from mamf.operations.decode.operation import DecodeProblem, DecodeShape, DrawnSequences
from mamf.operations.operand_sets import one_thread

# Score elements that are computed at once, and the most key elements of one head that are copied to the host.
_CHUNK, _MAX_ON_HOST, _ROWS_ON_HOST = 2**26, 2**22, 4
# Relative error allowed in a single row of the output: far above rounding, far below that of a row never written.
_ROW_TOLERANCE = 0.25
# How far the slope of the output against the reference may be from 1, plus how many standard deviations of rounding.
_MAX_SLOPE, _RARE = 1e-3, 8.0


@dataclass(frozen=True)
class Tables:
    """Where the tokens of each sequence are in the cache. Tensors are int32, on the device.

    - ``pages``: for each sequence its page numbers in order; empty for a contiguous cache.
    - ``lengths``: tokens per sequence. ``last_page_lengths``: tokens in the last page of each sequence.
    - ``query_starts``, ``token_starts``, ``page_starts``: cumulative counts with ``batch`` + 1 entries: where the
      queries, the tokens (contiguous cache) and the entries in ``all_pages`` of each sequence begin; last, the total.
    - ``all_pages``: the pages of all sequences, concatenated. ``table``: one row of pages per sequence, padded with
      page 0.
    """

    shape: DecodeShape
    drawn: DrawnSequences
    pages: Sequence[Sequence[int]]
    lengths: torch.Tensor
    last_page_lengths: torch.Tensor
    query_starts: torch.Tensor
    token_starts: torch.Tensor
    page_starts: torch.Tensor
    all_pages: torch.Tensor
    table: torch.Tensor

    def slots(self, sequence: int) -> torch.Tensor:
        """Return the positions of a sequence's tokens in the cache."""
        length = self.drawn.lengths[sequence]
        if self.shape.page_size is None:
            start = sum(self.drawn.lengths[:sequence])
            return torch.arange(start, start + length, device=self.lengths.device)
        pages = torch.tensor(self.pages[sequence], device=self.lengths.device)
        offsets = torch.arange(self.shape.page_size, device=self.lengths.device)
        return (pages[:, None] * self.shape.page_size + offsets).flatten()[:length]

    def query_rows(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each sequence and the slice of its queries."""
        starts = itertools.accumulate(self.drawn.queries, initial=0)
        for sequence, (start, count) in enumerate(zip(starts, self.drawn.queries, strict=False)):
            yield sequence, slice(start, start + count)


def make_tables(
    shape: DecodeShape, drawn: DrawnSequences, pages: Sequence[Sequence[int]], device: torch.device
) -> Tables:
    """Make the tables of a shape on a device. ``pages``: see ``Tables``.

    Raises UsageError for a page outside the cache, or one that two sequences use.
    """
    count, everything = sum(drawn.pages), list(itertools.chain(*pages))
    for number, own in enumerate(pages):
        if outside := next((page for page in own if not 0 <= page < count), None):
            raise UsageError(f"sequence {number} uses page {outside}, but the cache has pages 0 to {count - 1} only")
    if pages and len(set(everything)) != count:
        raise UsageError("two sequences use the same page: give each page to one sequence")
    size, widest = shape.page_size or 1, max(map(len, pages), default=0)
    indices = partial(torch.tensor, dtype=torch.int32, device=device)
    queries, tokens, in_pages = (
        indices([0, *itertools.accumulate(each)]) for each in (drawn.queries, drawn.lengths, drawn.pages)
    )
    last = indices([(length - 1) % size + 1 for length in drawn.lengths])
    table = indices([[*own, *[0] * (widest - len(own))] for own in pages])
    lengths, all_pages = indices(drawn.lengths), indices(everything)
    return Tables(shape, drawn, pages, lengths, last, queries, tokens, in_pages, all_pages, table)


def shuffle_pages(problem: DecodeProblem, shape: DecodeShape, device: torch.device) -> Tables:
    """Make tables whose pages are in random order, as in a server that has run for a while."""
    drawn = problem.draw_sequences(shape)
    if shape.page_size is None:
        return make_tables(shape, drawn, (), device)
    generator = torch.Generator().manual_seed(problem.seed)
    places = iter(torch.randperm(sum(drawn.pages), generator=generator).tolist())
    return make_tables(shape, drawn, [list(itertools.islice(places, count)) for count in drawn.pages], device)


class Operands(NamedTuple):
    """The tensors of one operand set.

    ``q``: [queries, heads, head_dim]. ``k``: [positions, kv_heads, head_dim]. ``v``: [positions, kv_heads, head_dim_v];
    a view into ``k`` for a latent.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(
    shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice = slice(None)
) -> torch.Tensor:
    """Compute the attention of one sequence in float64; return [rows, heads, head_dim_v].

    ``q``: [queries, heads, head_dim]; ``k``: [tokens, kv_heads, head_dim]; ``v``: [tokens, kv_heads, head_dim_v].
    ``rows``: the queries to compute.
    """
    count, length = q.shape[0], k.shape[0]
    wide_q, wide_k, wide_v = (to_float64(each) for each in (q[rows], k, v))
    heads = k.shape[1]
    grouped = wide_q.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # [kv_heads, rows * group, head_dim]
    scores = grouped @ wide_k.permute(1, 2, 0) * shape.scale
    last = torch.arange(length - count, length, device=q.device)[rows]
    masked = torch.arange(length, device=q.device) > last[:, None]
    scores.masked_fill_(masked.repeat_interleave(scores.shape[1] // len(last), 0), -math.inf)
    output = torch.softmax(scores, -1) @ wide_v.transpose(0, 1)
    found: torch.Tensor = output.unflatten(1, (len(last), -1)).permute(1, 0, 2, 3).flatten(1, 2)
    return found


def compare_sequences(
    shape: DecodeShape, tables: Tables, operands: Operands, output: torch.Tensor, bound: float, is_whole: bool = False
) -> Verdict:
    """Compare the output of a random sequence, or of all. ``output``: [queries, heads, head_dim_v]."""
    sequences, parts = list(tables.query_rows()), []
    chosen = sequences if is_whole else [secrets.choice(sequences)]
    for sequence, rows in chosen:
        slots = tables.slots(sequence)
        q, k, v = operands.q[rows], gather(operands.k, slots), gather(operands.v, slots)
        step = max(1, _CHUNK // (len(slots) * shape.heads))
        parts += [attend(shape, q, k, v, slice(start, start + step)) for start in range(0, len(q), step)]
    return compare(torch.cat([output[rows] for _, rows in chosen]), torch.cat(parts), bound)


def compare_on_host(
    shape: DecodeShape, tables: Tables, operands: Operands, output: torch.Tensor, bound: float
) -> Verdict | None:
    """Compare a random kv head of a random sequence with the host's result; None if it is too large to copy."""
    sequence, rows = secrets.choice(list(tables.query_rows()))
    if tables.drawn.lengths[sequence] * shape.head_dim > _MAX_ON_HOST:
        return None
    kv, slots = secrets.randbelow(shape.kv_heads), tables.slots(sequence)
    heads, some = slice(kv * shape.group, (kv + 1) * shape.group), slice(-_ROWS_ON_HOST, None)
    q, k, v = operands.q[rows, heads].cpu(), *(gather(each[:, kv : kv + 1], slots).cpu() for each in operands[1:])
    with one_thread():
        return compare(output[rows, heads][some].cpu(), attend(shape, q, k, v, some), bound)


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the tokens at these positions of the cache. 8-bit floats become float32, which represents them exactly."""
    if cache.dtype.itemsize > 1:
        return cache[slots]
    return cache.view(torch.uint8)[slots].view(cache.dtype).to(torch.float32)


def compare(output: torch.Tensor, expected: torch.Tensor, bound: float) -> Verdict:
    """Compare an output with the expected one: relative error of all, error of the worst row, and slope.

    ``bound``: the relative error allowed. The slope is that of a fit of the output to the expected one; it detects a
    wrong scale that is smaller than rounding.
    """
    found = output.to(expected.dtype)
    size = expected.square().sum().item()
    error = relative_error((found - expected).square().sum().item(), size)
    row = worst_relative_row(found, expected) * bound / _ROW_TOLERANCE
    rows = expected.shape[:-1].numel()
    slope = ((found - expected) * expected).sum().item() / size if size else 0.0
    most = min(_MAX_SLOPE, bound) + _RARE * error / math.sqrt(rows)
    reason = f"the output is {1 + slope:.6g} times the expected one; rounding explains at most {most:.1g}"
    worst = math.nan if math.isnan(error) else max(error, row if row > bound else 0.0)
    # With few rows errors do not average out, so allow more.
    averaged = worst if not worst > bound else worst / (1 + 2 / math.sqrt(rows))
    return Verdict(averaged, bound, reason=reason if error <= bound and abs(slope) > most else "")
