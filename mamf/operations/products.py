"""What kernels of matrix products share, of one, of a batch and of groups: operand sets that are launched and verified
on the host.

The reference is computed on the CPU in float64, so a device never judges itself.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar, Protocol

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Kernel, Prepared, Verdict, aligned
from mamf.operations.matmul.kernel import ProductProblem, ProductProblemT, ProductShape, ProductShapeT
from mamf.operations.outputs import Unchanged, poison_outputs, queued_checksum, without_torch

#: cuBLAS and hipBLAS of a shape or layout that no algorithm takes, and oneDNN of a dtype that it lacks.
_REFUSALS = ("STATUS_NOT_SUPPORTED", "itensor_view_from_dense expects")
# Rows times columns entries of C are compared: few enough that the check hides in the rest between two bursts.
_SAMPLED_ROWS = _SAMPLED_COLUMNS = 16


class OperandSet(Protocol):
    """One set of operands: its launch, the output ``c`` that it writes, and the check of either."""

    launch: Callable[[], object]
    c: torch.Tensor

    def verify(self, result: object) -> Verdict: ...


class TorchProducts(Kernel[ProductProblemT, ProductShapeT]):
    """Products by one torch function. Derived kernels say which dtypes they take and how they launch."""

    dtypes: ClassVar[tuple[str, ...]]

    def unavailable(self, backend: Backend) -> Unavailable | None:
        return without_torch(backend)

    def unsupported(self, backend: Backend, problem: ProductProblemT) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"kernel {self.name} has no dtype {problem.dtype}; it takes {', '.join(self.dtypes)}"
        return backend.unsupported_dtype(problem.dtype) or self.unsupported_problem(backend, problem)

    def unsupported_problem(self, backend: Backend, problem: ProductProblemT) -> str | None:
        """Why this combination of a dtype it has with output, layout and accumulation cannot be done, or None."""
        own = "float32" if problem.dtype == "tf32" else problem.dtype
        if problem.out_dtype != own:
            return f"kernel {self.name} writes {own} for {problem.dtype}, not {problem.out_dtype}"
        if problem.fast_accumulation:
            return f"kernel {self.name} has no fast accumulation; it is a mode of 8-bit floats"
        return None

    def settings(self, backend: Backend, problem: ProductProblemT) -> AbstractContextManager[object]:
        # Held for float32 too: a user's global "high" must not turn its ceiling into tf32's.
        return float32_precision("high" if problem.dtype == "tf32" else "highest")

    def refuses(self, error: Exception) -> bool:
        # torch raises NotImplementedError for an operation that this device lacks.
        if isinstance(error, NotImplementedError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)

    @abstractmethod
    def operand_set(
        self, problem: ProductProblemT, shape: ProductShapeT, flat: Mapping[str, torch.Tensor]
    ) -> OperandSet:
        """One set over the flat memory of its ``a``, ``b`` and ``c``."""

    def prepare(
        self,
        backend: Backend,
        problem: ProductProblemT,
        shape: ProductShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        whole = taken(pool, problem, shape, sets, rewrite)
        ready = [self.operand_set(problem, shape, slices(whole, shape.elements, index)) for index in range(sets)]
        return prepared_sets(ready, {name: whole[name] for name in ("a", "b")}, whole.get("c_rewrite"))


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def taken(
    pool: OperandPool, problem: ProductProblem, shape: ProductShape, sets: int, rewrite: bool
) -> dict[str, torch.Tensor]:
    """The buffers of all sets: operands filled, what is written as it was."""
    buffers = problem.buffers(shape, sets, rewrite)
    return {name: pool.take(name, *buffer, fill=name in ("a", "b", "c_rewrite")) for name, buffer in buffers.items()}


def slices(whole: Mapping[str, torch.Tensor], elements: Mapping[str, int], index: int) -> dict[str, torch.Tensor]:
    """The flat memory of one set."""
    return {name: whole[name][index * aligned(count) :][:count] for name, count in elements.items()}


def laid_out(flat: torch.Tensor, rows: int, columns: int, layout: str, *leading: int) -> torch.Tensor:
    """An operand of rows x columns as a view of flat memory; one of layout ``t`` lies transposed there."""
    return flat.view(*leading, columns, rows).mT if layout == "t" else flat.view(*leading, rows, columns)


def prepared_sets(
    sets: Sequence[OperandSet], operands: Mapping[str, torch.Tensor], rewrite: torch.Tensor | None = None
) -> Prepared:
    """Operand sets ready to run. ``operands``: what launches must leave as it is; ``rewrite``: what C of the first set
    is overwritten from, if that is asked for.
    """

    def poison(returned: Sequence[object]) -> None:
        for each, result in zip(sets, returned, strict=True):
            poison_outputs([each.c], result)

    def rewrite_output() -> object:
        c = sets[0].c
        return c if rewrite is None else c.copy_(rewrite.view(c.shape))

    return Prepared(
        launches=[each.launch for each in sets],
        verify=lambda index, result: sets[index].verify(result),
        poison=poison,
        changed_operands=Unchanged(operands),
        rewrite_output=None if rewrite is None else rewrite_output,
        checksum=lambda index, result: queued_checksum(output_of(result, sets[index].c)),
    )


class Sample:
    """Rows and columns of a product of ``m`` by ``n`` entries that are compared, its edges among them."""

    def __init__(self, m: int, n: int, chooser: random.Random, device: torch.device) -> None:
        self.rows = sampled_indices(m, _SAMPLED_ROWS, chooser).to(device)
        self.columns = sampled_indices(n, _SAMPLED_COLUMNS, chooser).to(device)

    def product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """What A @ B must be there."""
        return multiplied(on_host(a, 0, self.rows), on_host(b, 1, self.columns))

    def of(self, c: torch.Tensor) -> torch.Tensor:
        """What C is there."""
        return on_host(select(c, 0, self.rows), 1, self.columns)


def output_of(result: object, c: torch.Tensor) -> torch.Tensor:
    """A kernel may return its output in place of writing C."""
    return result if isinstance(result, torch.Tensor) and result.shape == c.shape else c


def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with one_thread():
        return a @ b


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, both on the host; infinite for anything but zeros where zeros are due."""
    with one_thread():
        difference = torch.linalg.vector_norm(found - expected).item()
        magnitude = torch.linalg.vector_norm(expected).item()
    if magnitude == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / magnitude)


@contextmanager
def one_thread() -> Iterator[None]:
    """For sums this small, waking torch's threads takes longer than the sums: with 64 of them 20 times as long, and 60
    times where four processes do so at once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sampled_indices(size: int, count: int, chooser: random.Random) -> torch.Tensor:
    """First, last and random others: a kernel that mishandles an edge does so there."""
    others = chooser.sample(range(size), min(count - 2, size))
    return torch.tensor(sorted({0, size - 1, *others}))


def select(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    """index_select that also takes 8-bit floats, which torch can only move as bytes."""
    if tensor.dtype.itemsize > 1 or tensor.dtype in (torch.int8, torch.uint8):
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def on_host(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    chosen = select(tensor, dim, indices).cpu()
    with one_thread():
        return chosen.to(torch.float64)
