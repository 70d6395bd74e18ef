"""Prepare and verify decode kernels on torch tensors: make operands, tables of the cache and graphs, and check outputs.

A kernel derives from ``TorchDecodeKernel``, declares which caches it supports, and implements ``bind_operands``.
``SdpaKvcache`` in torch_kernels.py is the shortest example.

mamf compares outputs with the reference of the operation attention, one sequence at a time. It compares the whole
output before and after timing, and the output of a random sequence between timed series of launches. The reference runs
on the device and, for one kv head of a random sequence, also on the host.
"""

from __future__ import annotations

import itertools
import math
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.kernel import PreparedKernel, Verdict
from mamf.operations.attention.attention_reference import (
    compute_reference_attention,
    compute_reference_distance,
    judge_distance,
)
from mamf.operations.attention.operation import AttentionShape
from mamf.operations.attention.torch_attention import ERROR_BOUND_BY_DTYPE, KernelLibrary, describe_head_dims
from mamf.operations.decode.operation import (
    DecodeKernel,
    DecodeProblem,
    DecodeShape,
    SequenceSizes,
    draw_sequence_sizes,
)
from mamf.operations.operand_sets import (
    ChangeDetector,
    OperandSet,
    SignFlipper,
    combine_operand_sets,
    compute_max_error,
    explain_torch_unavailability,
    explain_wrong_type,
    join_rows,
    list_result_tensors,
    split_buffers_into_sets,
    take_pool_buffers,
    use_one_torch_thread,
    view_as,
)
from mamf.torch_backend import TorchBackend


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel that is compiled and planned for one shape.

    - ``attend``: launches the kernel, given q [queries, heads, head_dim], k [positions, kv_heads, head_dim] and v
      [positions, kv_heads, head_dim_v], and returns the output, or a tuple that begins with it. A position is the place
      of one token in the cache. If the cache contains latents, v is a view of the first head_dim_v elements of each k.
    - ``details``: facts that reports show, such as the microseconds that the host takes to plan.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
    details: Mapping[str, float | str] = field(default_factory=dict)


class TorchDecodeKernel(DecodeKernel):
    """A decode kernel on torch tensors. Derived classes implement ``bind_operands`` and declare what they support.

    - ``supports_contiguous_cache``, ``supports_pages``: whether the kernel supports a contiguous and a paged cache.
    - ``page_size_multiple``: the page size, in tokens, must be a multiple of this number.
    - ``supports_ragged_lengths``: whether the sequences of a batch may differ in length.
    - ``supports_ragged_queries``: whether the sequences of a batch may differ in their number of queries.
    - ``supports_latent_cache``: whether the kernel supports a cache with one latent vector per token (MLA).
    - ``max_queries``: the largest number of queries per sequence; None if there is no limit.
    - ``head_dims``: the supported head dimensions of separate keys and values; empty if only latents are supported.
    """

    supports_contiguous_cache: ClassVar[bool] = True
    supports_pages: ClassVar[bool] = True
    page_size_multiple: ClassVar[int] = 1
    supports_ragged_lengths: ClassVar[bool] = True
    supports_ragged_queries: ClassVar[bool] = True
    supports_latent_cache: ClassVar[bool] = False
    max_queries: ClassVar[int | None] = None
    head_dims: ClassVar[Sequence[int]] = range(8, 257, 8)

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        return explain_torch_unavailability(backend)

    @abstractmethod
    def bind_operands(
        self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: CacheTables
    ) -> PlannedKernel:
        """Plan and compile the kernel for one shape, and return the kernel that is ready to run.

        The kernel's output may have any shape, but its elements must be in the order of [queries, heads, head_dim_v].
        """

    def explain_unsupported_shape(self, problem: DecodeProblem, shape: DecodeShape) -> str | None:
        page, max_queries = shape.page_size, self.max_queries
        refusals = (
            (
                page is None and not self.supports_contiguous_cache,
                f"needs a paged cache: use --page-sizes {self.page_size_multiple}",
            ),
            (page is not None and not self.supports_pages, "needs a contiguous cache: use --page-sizes none"),
            (
                (page or 0) % self.page_size_multiple,
                f"does not support pages of {page} tokens: use a multiple of {self.page_size_multiple}",
            ),
            (
                shape.lengths != "equal" and not self.supports_ragged_lengths,
                "needs sequences of equal length: use --lengths equal",
            ),
            (
                not (shape.has_equal_query_counts or self.supports_ragged_queries),
                "needs the same number of new tokens in all sequences: use --lengths equal",
            ),
            (
                max_queries is not None and shape.queries > max_queries,
                f"supports at most {max_queries} new tokens per sequence: use --query-lens {max_queries}",
            ),
            (shape.is_latent and not self.supports_latent_cache, "does not support a latent cache: remove --latent"),
            (
                not shape.is_latent and not self.head_dims,
                "needs a latent cache: use --latent --kv-heads 1 --head-dims 576/512",
            ),
            (
                not shape.is_latent and (shape.head_dim not in self.head_dims or shape.head_dim_v != shape.head_dim),
                f"does not support head dimension {shape.head_dims}: use {describe_head_dims(self.head_dims)} for both "
                "keys and values",
            ),
        )
        return next((f"{self.name} {text}" for is_wrong, text in refusals if is_wrong), None)

    def prepare(
        self,
        backend: Backend,
        problem: DecodeProblem,
        shape: DecodeShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        assert isinstance(backend, TorchBackend)
        sets = 1 if problem.graph else sets  # One set is enough for a graph, because its launches use several caches.
        set_count = sets * problem.count_kernel_launches(shape)
        buffer_sets = split_buffers_into_sets(take_pool_buffers(pool, problem.list_buffers(shape, sets)), set_count)
        tables = make_cache_tables(problem, shape, backend.device)
        planned_kernel = self.bind_operands(backend, problem, shape, tables)
        operand_sets = [
            PreparedDecode(self, problem, shape, tables, buffers, planned_kernel).make_operand_set()
            for buffers in buffer_sets
        ]
        if problem.graph:
            operand_sets = [capture_graph(backend, operand_sets)]
        watched_tensors = {
            f"{name} {number}": tensor for number, buffers in enumerate(buffer_sets) for name, tensor in buffers.items()
        }
        watched_tensors |= {name: tensor for name, tensor in vars(tables).items() if isinstance(tensor, torch.Tensor)}
        return combine_operand_sets(operand_sets, ChangeDetector(watched_tensors))


def view_as_pages(shape: DecodeShape, cache: torch.Tensor) -> torch.Tensor:
    """View a cache of tokens as [pages, page_size, ...], or a contiguous cache as [batch, cache_len, ...]."""
    return cache.view(-1, shape.page_size or shape.cache_len, *cache.shape[1:])


class LibraryDecodeKernel(KernelLibrary, TorchDecodeKernel):
    """A decode kernel from a library of a vendor or a third party."""

    portable_install_command = "mamf attention --operation decode --kernel sdpa-kvcache"


class PreparedDecode:
    """A decode kernel prepared for one operand set (q, k and v). The methods launch it and verify the output."""

    def __init__(
        self,
        kernel: TorchDecodeKernel,
        problem: DecodeProblem,
        shape: DecodeShape,
        tables: CacheTables,
        buffers: Mapping[str, torch.Tensor],
        planned_kernel: PlannedKernel,
    ) -> None:
        self._shape, self._tables, self._planned_kernel = shape, tables, planned_kernel
        self._tolerance = ERROR_BOUND_BY_DTYPE[problem.dtype]
        self._details = {
            **planned_kernel.details,
            **(kernel.make_version_details() if isinstance(kernel, KernelLibrary) else {}),
        }
        sizes = draw_sequence_sizes(shape, problem.seed)
        q = view_as(buffers["q"], sum(sizes.query_counts), shape.heads, shape.head_dim)
        k = view_as(buffers["k"], sizes.cache_slot_count, shape.kv_heads, shape.head_dim)
        v = k[..., : shape.head_dim_v]
        if not shape.is_latent:
            v = view_as(buffers["v"], sizes.cache_slot_count, shape.kv_heads, shape.head_dim_v)
        self._operands = {"q": q, "k": k, "v": v}

    def make_operand_set(self) -> OperandSet:
        signs = SignFlipper(join_rows(self._operands["k" if self._shape.is_latent else "v"]))
        launch = partial(torch.no_grad()(self._planned_kernel.attend), *self._operands.values())
        return OperandSet(
            launch,
            self.verify,
            verify_whole_output=self.verify_whole_output,
            change_operands=signs.flip_random_signs,
            restore_operands=signs.restore_signs,
        )

    def verify(self, result: object) -> Verdict:
        """Verify the type of the output of a launch, and its values for a random sequence."""
        q, outputs = self._operands["q"], list_result_tensors(result)
        expected = q[..., :1].expand(*q.shape[:-1], self._shape.head_dim_v)
        output = outputs[0] if outputs else None
        if output is None or output.numel() != expected.numel():
            return Verdict(math.inf, 0.0, reason=f"the launch did not return a tensor of {expected.numel()} elements")
        if reason := explain_wrong_type(output.reshape(expected.shape), expected):
            return Verdict(math.inf, 0.0, reason=reason)
        sequence = secrets.choice(list(self._tables.yield_query_slices()))
        return replace(self._judge_sequences(output.reshape(expected.shape), [sequence]), details=self._details)

    def verify_whole_output(self, result: object) -> Verdict:
        """Verify the whole output on the device, and the output of one kv head of a random sequence on the host."""
        output = list_result_tensors(result)[0].reshape(*self._operands["q"].shape[:-1], self._shape.head_dim_v)
        on_device = self._judge_sequences(output, self._tables.yield_query_slices())
        on_host = self._judge_one_kv_head_on_host(output) or on_device
        return max(on_device, on_host, key=lambda each: (not each.ok, each.error))

    def _judge_sequences(self, output: torch.Tensor, sequences: Iterable[tuple[int, slice]]) -> Verdict:
        """Compare the output for some sequences with a reference that the device computes.

        ``output``: [queries, heads, head_dim_v]. ``sequences``: for each sequence to compare, its index in the batch,
        and the slice that selects its queries in ``output``.
        """
        shape, group, comparisons = self._shape, self._shape.heads_per_kv_head, []
        for sequence, rows in sequences:
            positions = self._tables.locate_tokens(sequence)
            q, k, v = self._operands["q"][rows], *(gather_tokens(self._operands[name], positions) for name in "kv")
            heads_per_chunk = max(1, _SCORES_PER_CHUNK // (len(positions) * len(q) * group))
            for start in range(0, shape.kv_heads, heads_per_chunk):
                expected = compute_sequence_attention(shape, q, k, v, slice(start, start + heads_per_chunk))
                comparisons.append(("o", output[rows, start * group : (start + heads_per_chunk) * group], expected))
        return judge_distance(compute_reference_distance(comparisons), self._tolerance)

    def _judge_one_kv_head_on_host(self, output: torch.Tensor) -> Verdict | None:
        """Compare the output for a random kv head of a random sequence with a reference that the host computes.

        ``output``: [queries, heads, head_dim_v]. Return None if the keys are too large to copy to the host.
        """
        shape, (sequence, rows) = self._shape, secrets.choice(list(self._tables.yield_query_slices()))
        positions, kv_head = self._tables.locate_tokens(sequence), secrets.randbelow(shape.kv_heads)
        if len(positions) * shape.head_dim > _MAX_KEY_ELEMENTS_ON_HOST:
            return None
        heads = slice(kv_head * shape.heads_per_kv_head, (kv_head + 1) * shape.heads_per_kv_head)
        q, k, v = (
            self._operands["q"][rows, heads].cpu().double(),
            *(gather_tokens(self._operands[name][:, kv_head : kv_head + 1], positions).cpu().double() for name in "kv"),
        )
        head_shape, last_rows = (
            replace(shape, heads=shape.heads_per_kv_head, kv_heads=1),
            torch.arange(len(q))[-_ROWS_ON_HOST:],
        )
        with use_one_torch_thread():
            expected = compute_sequence_attention(head_shape, q, k, v, rows=last_rows)
            distance = compute_reference_distance([("o", output[rows, heads].cpu()[last_rows], expected)])
            return judge_distance(distance, self._tolerance)


def capture_graph(backend: Backend, operand_sets: Sequence[OperandSet]) -> OperandSet:
    """Capture a launch of each operand set in one graph, and return an operand set whose launch replays the graph.

    The returned operand set verifies the outputs of all captured launches.
    """
    replay, results = backend.capture_graph([each.launch for each in operand_sets])

    def verify_all_results(checks: Sequence[Callable[[object], Verdict]]) -> Verdict:
        verdicts = [check(result) for check, result in zip(checks, results, strict=True)]
        chosen = next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])
        return replace(chosen, error=compute_max_error(verdict.error for verdict in verdicts)) if chosen.ok else chosen

    return OperandSet(
        replay,
        lambda _: verify_all_results([each.verify for each in operand_sets]),
        outputs=[tensor for result in results for tensor in list_result_tensors(result)],
        verify_whole_output=lambda _: verify_all_results(
            [each.verify_whole_output or each.verify for each in operand_sets]
        ),
        change_operands=lambda: [each.change_operands() for each in operand_sets if each.change_operands],
        restore_operands=lambda: [each.restore_operands() for each in operand_sets],
    )


# The reference computes about _SCORES_PER_CHUNK scores at once, to limit the memory that it needs. The host verifies
# _ROWS_ON_HOST rows of one head. It skips this check if the keys of the head have more than _MAX_KEY_ELEMENTS_ON_HOST
# elements, because these keys are too large to copy to the host.
_SCORES_PER_CHUNK, _MAX_KEY_ELEMENTS_ON_HOST, _ROWS_ON_HOST = 2**26, 2**22, 4


@dataclass(frozen=True)
class CacheTables:
    """Tables that locate the tokens of each sequence in the cache. All tensors are int32 and on the device.

    - ``sequence_sizes``: the sizes of the sequences.
    - ``pages_by_sequence``: the page indices of each sequence, in order; empty for a contiguous cache.
    - ``sequence_lengths``: the number of tokens of each sequence.
    - ``last_page_lengths``: the number of tokens in the last page of each sequence.
    - ``query_starts``, ``token_starts``, ``page_starts``: for each sequence, the index of its first query, of its first
      token in a contiguous cache, and of its first entry in ``concatenated_pages``. The last element is the total
      number of queries, tokens or pages.
    - ``concatenated_pages``: the page indices of all sequences, concatenated.
    - ``page_table``: one row of page indices per sequence, padded with 0.
    """

    shape: DecodeShape
    sequence_sizes: SequenceSizes
    pages_by_sequence: Sequence[Sequence[int]]
    sequence_lengths: torch.Tensor
    last_page_lengths: torch.Tensor
    query_starts: torch.Tensor
    token_starts: torch.Tensor
    page_starts: torch.Tensor
    concatenated_pages: torch.Tensor
    page_table: torch.Tensor

    def locate_tokens(self, sequence: int) -> torch.Tensor:
        """Return the positions in the cache of all tokens of a sequence. ``sequence``: its index in the batch."""
        length = self.sequence_sizes.sequence_lengths[sequence]
        if self.shape.page_size is None:
            start = sum(self.sequence_sizes.sequence_lengths[:sequence])
            return torch.arange(start, start + length, device=self.sequence_lengths.device)
        pages = torch.tensor(self.pages_by_sequence[sequence], device=self.sequence_lengths.device)
        offsets = torch.arange(self.shape.page_size, device=self.sequence_lengths.device)
        return (pages[:, None] * self.shape.page_size + offsets).flatten()[:length]

    def yield_query_slices(self) -> Iterator[tuple[int, slice]]:
        """Yield, for each sequence, its index and the slice that selects its queries among those of all sequences."""
        starts = itertools.accumulate(self.sequence_sizes.query_counts, initial=0)
        return enumerate(slice(*pair) for pair in itertools.pairwise(starts))


def make_cache_tables(problem: DecodeProblem, shape: DecodeShape, device: torch.device) -> CacheTables:
    """Make the tables of a cache whose pages are in random order, as in a server that has run for a while."""
    sizes, pages = draw_sequence_sizes(shape, problem.seed), list[list[int]]()
    if shape.page_size is not None:
        generator = torch.Generator().manual_seed(problem.seed)
        page_indices = iter(torch.randperm(sum(sizes.page_counts), generator=generator).tolist())
        pages = [list(itertools.islice(page_indices, count)) for count in sizes.page_counts]
    size, max_page_count = shape.page_size or 1, max(map(len, pages), default=0)
    make_indices = partial(torch.tensor, dtype=torch.int32, device=device)
    query_starts, token_starts, page_starts = (
        make_indices([0, *itertools.accumulate(counts)])
        for counts in (sizes.query_counts, sizes.sequence_lengths, sizes.page_counts)
    )
    last_page_lengths = make_indices([(length - 1) % size + 1 for length in sizes.sequence_lengths])
    page_table = make_indices([[*page_row, *[0] * (max_page_count - len(page_row))] for page_row in pages])
    lengths, concatenated_pages = make_indices(sizes.sequence_lengths), make_indices([*itertools.chain(*pages)])
    return CacheTables(
        shape,
        sizes,
        pages,
        lengths,
        last_page_lengths,
        query_starts,
        token_starts,
        page_starts,
        concatenated_pages,
        page_table,
    )


def compute_sequence_attention(
    shape: DecodeShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_slice: slice = slice(None),
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the reference output of one sequence, with the shape [rows, query heads of ``kv_slice``, head_dim_v].

    ``q``: [queries, heads, head_dim]; ``k``: [tokens, kv_heads, head_dim]; ``v``: [tokens, kv_heads, head_dim_v].
    ``kv_slice``, ``rows``: the kv heads and the queries for which to compute the output; by default all.
    """
    attention_shape = AttentionShape(
        1, shape.heads, shape.kv_heads, len(q), len(k), shape.head_dim, shape.head_dim_v, causal=True
    )
    tensors = {name: each.transpose(0, 1)[None] for name, each in (("q", q), ("k", k), ("v", v))}
    results = compute_reference_attention(attention_shape, tensors, 0, kv_slice, rows, shape.score_scale)
    return results["o"].flatten(0, 1).transpose(0, 1)


def gather_tokens(cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the tokens at ``positions`` of a cache. Convert 8-bit floats to float32, which does not change values."""
    if cache.dtype.itemsize > 1:
        return cache[positions]
    return cache.view(torch.uint8)[positions].view(cache.dtype).to(torch.float32)
