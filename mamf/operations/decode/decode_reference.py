"""The cache's tables, and the reference: plain products and a softmax in float64 over the tokens of each sequence.

A check of samples compares the output of a random sequence, a check of everything that of all sequences. The reference
runs on the device, with code that is independent of the kernels; one head of a random sequence is computed on the host
too.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mamf.errors import UsageError
from mamf.kernel import Verdict
from mamf.operations.attention.attention_reference import relative, to_float64, worst_relative_row
from mamf.operations.decode.shapes import DecodeProblem, DecodeShape, Drawn
from mamf.operations.operand_sets import one_thread

# Elements of scores that are computed at once, and the most of one head's keys that are copied to the host.
_CHUNK, _MAX_ON_HOST = 2**26, 2**22
# The largest error of a row of the output: far above rounding, far below that of a row that was not written.
_ROW_TOLERANCE = 0.25
# The largest deviation from 1 of the slope against the reference, and what is rare by chance, in standard deviations.
_SLOPE, _RARE = 1e-3, 8.0


@dataclass(frozen=True)
class Tables:
    """Where the tokens of each sequence are. Tensors are int32 on the device.

    - ``pages``: the places of the pages of each sequence, in order; empty for a contiguous cache.
    - ``lengths``: tokens of each sequence. ``last_page_lengths``: tokens in its last page.
    - ``query_starts``, ``token_starts``, ``page_starts``: the first query, the first token of a contiguous cache and
      the first entry in ``all_pages`` of each sequence, and at the end the number of all.
    - ``all_pages``: the pages of all sequences, one after the other. ``table``: a row of pages for each sequence; short
      rows end with page 0.
    """

    shape: DecodeShape
    drawn: Drawn
    pages: Sequence[Sequence[int]]
    lengths: torch.Tensor
    last_page_lengths: torch.Tensor
    query_starts: torch.Tensor
    token_starts: torch.Tensor
    page_starts: torch.Tensor
    all_pages: torch.Tensor
    table: torch.Tensor

    def slots(self, sequence: int) -> torch.Tensor:
        """The places of a sequence's tokens in the cache."""
        length = self.drawn.lengths[sequence]
        if self.shape.page_size is None:
            start = sum(self.drawn.lengths[:sequence])
            return torch.arange(start, start + length, device=self.lengths.device)
        pages = torch.tensor(self.pages[sequence], device=self.lengths.device)
        offsets = torch.arange(self.shape.page_size, device=self.lengths.device)
        return (pages[:, None] * self.shape.page_size + offsets).flatten()[:length]

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Each sequence with its rows of the queries."""
        starts = itertools.accumulate(self.drawn.queries, initial=0)
        for sequence, (start, count) in enumerate(zip(starts, self.drawn.queries, strict=False)):
            yield sequence, slice(start, start + count)


def make_tables(shape: DecodeShape, drawn: Drawn, pages: Sequence[Sequence[int]], device: torch.device) -> Tables:
    """Raises UsageError for a page outside the cache, or one that two sequences have."""
    count, everything = sum(drawn.pages), list(itertools.chain(*pages))
    for number, own in enumerate(pages):
        if outside := next((page for page in own if not 0 <= page < count), None):
            raise UsageError(f"page {outside} of sequence {number} is not in the cache, which has {count} pages")
    if pages and len(set(everything)) != count:
        raise UsageError("two sequences have the same page")
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
    """Tables with pages in random places, as after an hour of serving."""
    drawn = problem.drawn(shape)
    if shape.page_size is None:
        return make_tables(shape, drawn, (), device)
    generator = torch.Generator().manual_seed(problem.seed)
    places = iter(torch.randperm(sum(drawn.pages), generator=generator).tolist())
    return make_tables(shape, drawn, [list(itertools.islice(places, count)) for count in drawn.pages], device)


@dataclass(frozen=True)
class Operands:
    """``q``: rows, heads, width. ``k`` and ``v``: places, kv heads, width; of a latent ``v`` is a part of ``k``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(
    shape: DecodeShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: slice = slice(None)
) -> torch.Tensor:
    """The output of one sequence in float64. ``q``: rows, heads, width; ``k``, ``v``: tokens, kv heads, width.
    ``rows``: some of the queries.
    """
    count, length = q.shape[0], k.shape[0]
    wide_q, wide_k, wide_v = (to_float64(each) for each in (q[rows], k, v))
    heads = k.shape[1]
    grouped = wide_q.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # kv heads, rows x group, width
    scores = grouped @ wide_k.permute(1, 2, 0) * shape.scale
    last = torch.arange(length - count, length, device=q.device)[rows]
    masked = torch.arange(length, device=q.device) > last[:, None]
    scores.masked_fill_(masked.repeat_interleave(scores.shape[1] // len(last), 0), -math.inf)
    output = torch.softmax(scores, -1) @ wide_v.transpose(0, 1)
    found: torch.Tensor = output.unflatten(1, (len(last), -1)).permute(1, 0, 2, 3).flatten(1, 2)
    return found


class Reference:
    """Compares outputs of an operand set with what its operands give now."""

    def __init__(self, shape: DecodeShape, tables: Tables, operands: Operands) -> None:
        self._shape, self._tables, self._operands = shape, tables, operands

    def verdict(self, output: torch.Tensor, bound: float, is_whole: bool = False) -> Verdict:
        """Compare the output of a random sequence, or of all sequences. ``output``: rows, heads, width of values."""
        shape, of, sequences, parts = self._shape, self._operands, list(self._tables.rows()), []
        chosen = sequences if is_whole else [secrets.choice(sequences)]
        for sequence, rows in chosen:
            slots = self._tables.slots(sequence)
            q, k, v = of.q[rows], gather(of.k, slots), gather(of.v, slots)
            step = max(1, _CHUNK // (len(slots) * shape.heads))
            parts += [
                attend(shape, q, k, v, slice(start, start + step)) for start in range(0, rows.stop - rows.start, step)
            ]
        return compare(torch.cat([output[rows] for _, rows in chosen]), torch.cat(parts), bound)

    def verdict_on_host(self, output: torch.Tensor, bound: float) -> Verdict | None:
        """Compare one head of a random sequence with what the host computes; None if the sequence is too long."""
        shape, tables, of = self._shape, self._tables, self._operands
        sequence, rows = secrets.choice(list(tables.rows()))
        if tables.drawn.lengths[sequence] * shape.head_dim > _MAX_ON_HOST:
            return None
        kv, slots = secrets.randbelow(shape.kv_heads), tables.slots(sequence)
        heads = slice(kv * shape.group, (kv + 1) * shape.group)
        k, v = (gather(each[:, kv : kv + 1], slots).cpu() for each in (of.k, of.v))
        some = slice(max(0, rows.stop - rows.start - 4), None)
        with one_thread():
            expected = attend(shape, of.q[rows, heads].cpu(), k, v, some)
            return compare(output[rows, heads][some].cpu(), expected, bound)


def gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The tokens in these places; 8-bit floats as float32, which holds them exactly."""
    if cache.dtype.itemsize > 1:
        return cache[slots]
    return cache.view(torch.uint8)[slots].view(cache.dtype).to(torch.float32)


def compare(output: torch.Tensor, expected: torch.Tensor, bound: float) -> Verdict:
    """The relative error of an output, of its worst row, and the slope against the reference."""
    found = output.to(expected.dtype)
    size = expected.square().sum().item()
    error = relative((found - expected).square().sum().item(), size)
    row = worst_relative_row(found, expected) * bound / _ROW_TOLERANCE
    rows = expected.shape[:-1].numel()
    slope = ((found - expected) * expected).sum().item() / size if size else 0.0
    most = min(_SLOPE, bound) + _RARE * error / math.sqrt(rows)
    reason = f"it is {1 + slope:.6g} times the expected one; rounding changes it by at most {most:.1g}"
    worst = math.nan if math.isnan(error) else max(error, row if row > bound else 0.0)
    # Errors of few rows do not average out.
    averaged = worst if not worst > bound else worst / (1 + 2 / math.sqrt(rows))
    return Verdict(averaged, bound, reason=reason if error <= bound and abs(slope) > most else "")
