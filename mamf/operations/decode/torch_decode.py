"""The base class of decode kernels on torch tensors: operands, tables, graphs, verification.

A kernel declares which caches it supports and implements ``bind``. ``SdpaKvcache`` in torch_kernels.py is the shortest
example.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared, Verdict
from mamf.operations.attention.torch_attention import Library, get_tolerance
from mamf.operations.decode.decode_reference import Operands, Tables, compare_on_host, compare_sequences, shuffle_pages
from mamf.operations.decode.operation import DecodeKernel, DecodeProblem, DecodeShape
from mamf.operations.operand_sets import (
    OperandSet,
    Signs,
    Unchanged,
    check_torch,
    explain_wrong_type,
    prepare_sets,
    split_sets,
    take_buffers,
    tensors_of,
    view_as,
    with_long_rows,
    worst_of,
)
from mamf.torch_backend import TorchBackend


@dataclass(frozen=True)
class BoundKernel:
    """A kernel that is ready to run a shape with its tables.

    ``attend``: computes the output of one operand set. ``details``: what the row should record of the preparation, such
    as the microseconds that the host takes to plan.
    """

    attend: Callable[[Operands], torch.Tensor]
    details: Mapping[str, float | str] = field(default_factory=dict)


class TorchDecode(DecodeKernel):
    """A decode kernel on torch tensors. Derived classes implement ``bind`` and declare what they support.

    - ``has_contiguous``, ``has_pages``: the kinds of cache. ``page_multiple``: page sizes must be a multiple of it.
    - ``has_ragged``: sequences of different lengths. ``has_ragged_queries``: different numbers of queries.
    - ``has_latent``: a latent. ``has_heads``: separate keys and values.
    - ``max_queries``: the largest number of queries per sequence; None if there is no limit.
    - ``head_dims``: the head dimensions without a latent.
    """

    has_contiguous: ClassVar[bool] = True
    has_pages: ClassVar[bool] = True
    page_multiple: ClassVar[int] = 1
    has_ragged: ClassVar[bool] = True
    has_ragged_queries: ClassVar[bool] = True
    has_latent: ClassVar[bool] = False
    has_heads: ClassVar[bool] = True
    max_queries: ClassVar[int | None] = None
    head_dims: ClassVar[Sequence[int]] = range(8, 257, 8)

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return check_torch(backend)

    @abstractmethod
    def bind(self, backend: TorchBackend, problem: DecodeProblem, shape: DecodeShape, tables: Tables) -> BoundKernel:
        """Plan and compile for one shape. The output has the elements of [queries, heads, head_dim_v], in any shape."""

    def unsupported_shape(self, problem: DecodeProblem, shape: DecodeShape) -> str | None:
        page, most = shape.page_size, self.max_queries
        lacks_width = shape.head_dim not in self.head_dims or shape.head_dim_v != shape.head_dim
        refusals = (
            (page is None and not self.has_contiguous, f"needs a paged cache: --page-sizes {self.page_multiple}"),
            (page is not None and not self.has_pages, "needs a contiguous cache: --page-sizes none"),
            (
                (page or 0) % self.page_multiple,
                f"does not support pages of {page} tokens: use a multiple of {self.page_multiple}",
            ),
            (shape.lengths != "equal" and not self.has_ragged, "needs sequences of equal length: --lengths equal"),
            (not (shape.has_equal_queries or self.has_ragged_queries), "needs the same number of queries per sequence"),
            (most is not None and shape.queries > most, f"supports at most {most} queries per sequence"),
            (shape.is_latent and not self.has_latent, "does not support a latent: remove --latent"),
            (not shape.is_latent and not self.has_heads, "needs a latent: --latent --kv-heads 1 --head-dims 576/512"),
            (not shape.is_latent and lacks_width, f"does not support head dimension {shape.head_dims}"),
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
    ) -> Prepared:
        assert isinstance(backend, TorchBackend)
        sets = 1 if problem.graph else sets  # a graph already rotates over caches
        count = sets * problem.count_launches(shape)
        memory = split_sets(take_buffers(pool, problem.buffers(shape, sets)), count)
        tables = shuffle_pages(problem, shape, backend.device)
        bound = self.bind(backend, problem, shape, tables)
        prepared = [PreparedDecode(self, problem, shape, tables, flat, bound) for flat in memory]
        ready = [each.operand_set() for each in prepared]
        if problem.graph:
            ready = [capture(backend, ready)]
        watched = {f"{name} {number}": each for number, flat in enumerate(memory) for name, each in flat.items()}
        watched |= {name: each for name, each in vars(tables).items() if isinstance(each, torch.Tensor)}
        return prepare_sets(ready, Unchanged(watched))


def view_as_pages(shape: DecodeShape, cache: torch.Tensor) -> torch.Tensor:
    """View a cache as pages: [pages, page_size, ...]. A contiguous cache becomes [batch, cache_len, ...]."""
    pages: torch.Tensor = cache.unflatten(0, (-1, shape.page_size or shape.cache_len))
    return pages


class LibraryDecode(Library, TorchDecode):
    """A kernel of a vendor's or a third party's library."""

    portable_command = "mamf attention --operation decode --kernel sdpa-kvcache"


class PreparedDecode:
    """One operand set with its launch and its reference."""

    def __init__(
        self,
        kernel: TorchDecode,
        problem: DecodeProblem,
        shape: DecodeShape,
        tables: Tables,
        flat: Mapping[str, torch.Tensor],
        bound: BoundKernel,
    ) -> None:
        self._shape, self._bound, self._tolerance = shape, bound, get_tolerance(problem.dtype)
        version = kernel.version() if isinstance(kernel, Library) else None
        self._details = {**bound.details, **({"library": version} if version else {})}
        self._operands = view_operands(problem, shape, flat)
        self._compared = shape, tables, self._operands

    def operand_set(self) -> OperandSet:
        signs = Signs(with_long_rows(self._operands.k if self._shape.is_latent else self._operands.v))
        return OperandSet(
            self.launch, self.verify, verify_whole=self.verify_whole, change=signs.change, restore=signs.restore
        )

    def launch(self) -> torch.Tensor:
        with torch.no_grad():
            return self._bound.attend(self._operands)

    def verify(self, result: object) -> Verdict:
        """Verify the output of a random sequence."""
        q, v = self._operands.q, self._operands.v
        outputs = tensors_of(result)
        expected = q[..., :1].expand(*q.shape[:-1], v.shape[-1])
        output = outputs[0] if outputs else None
        if output is None or output.numel() != expected.numel():
            return Verdict(math.inf, 0.0, reason="the launch returned no tensor of the output's size")
        if reason := explain_wrong_type(output.reshape(expected.shape), expected):
            return Verdict(math.inf, 0.0, reason=reason)
        return replace(compare_sequences(*self._compared, self._output(result), self._tolerance), details=self._details)

    def verify_whole(self, result: object) -> Verdict:
        """Verify the whole output, and one head of a random sequence on the host."""
        output = self._output(result)
        found = compare_sequences(*self._compared, output, self._tolerance, is_whole=True)
        on_host = compare_on_host(*self._compared, output, self._tolerance) or found
        return max(found, on_host, key=lambda each: (not each.ok, each.error))

    def _output(self, result: object) -> torch.Tensor:
        """Return the output of a launch as [queries, heads, head_dim_v]."""
        return tensors_of(result)[0].reshape(*self._operands.q.shape[:-1], self._shape.head_dim_v)


def view_operands(problem: DecodeProblem, shape: DecodeShape, flat: Mapping[str, torch.Tensor]) -> Operands:
    """View the flat buffers of one operand set as queries, keys and values."""
    slots, rows = problem.count_slots(shape), sum(problem.draw_sequences(shape).queries)
    q = view_as(flat["q"], rows, shape.heads, shape.head_dim)
    k = view_as(flat["k"], slots, shape.kv_heads, shape.head_dim)
    v = k[..., : shape.head_dim_v] if shape.is_latent else view_as(flat["v"], slots, shape.kv_heads, shape.head_dim_v)
    return Operands(q, k, v)


def capture(backend: Backend, sets: Sequence[OperandSet]) -> OperandSet:
    """Capture a launch of each set in one graph. Return an operand set that replays it and verifies all its outputs."""
    replay, results = backend.capture([each.launch for each in sets])

    def verify_with(checks: Sequence[Callable[[object], Verdict]]) -> Verdict:
        found = [check(result) for check, result in zip(checks, results, strict=True)]
        wrong = next((each for each in found if not each.ok), found[0])
        return wrong if not wrong.ok else replace(wrong, error=worst_of(each.error for each in found))

    return OperandSet(
        replay,
        lambda _: verify_with([each.verify for each in sets]),
        outputs=[tensor for result in results for tensor in tensors_of(result)],
        verify_whole=lambda _: verify_with([each.verify_whole or each.verify for each in sets]),
        change=lambda: [each.change() for each in sets if each.change],
        restore=lambda: [each.restore() for each in sets],
    )
