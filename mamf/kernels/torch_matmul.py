"""What torch's matrix products share: operands as views of the pool's buffers, and verification on the host.

The reference is computed on the CPU in float64, so a device never judges itself.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from mamf.backend import Backend, OperandPool
from mamf.errors import UnsupportedError, first_line
from mamf.kernel import MatmulKernel, MatmulProblem, Prepared, Verdict, aligned
from mamf.shapes import MatmulShape

# Rows times columns entries of C are compared: few enough that the check hides in the rest between two bursts.
_SAMPLED_ROWS = _SAMPLED_COLUMNS = 16
_POISON_BYTE = 0x7F  # NaN in every float8 of torch but fnuz, where 0x80 is
_POISON_INT = -(2**31) + 1


class TorchMatmul(MatmulKernel):
    """A product by one torch function. Derived kernels say which dtypes they take and how they launch."""

    dtypes: ClassVar[tuple[str, ...]]

    def unsupported(self, backend: Backend, problem: MatmulProblem) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"kernel {self.name} has no dtype {problem.dtype}; it takes {', '.join(self.dtypes)}"
        return backend.unsupported_dtype(problem.dtype) or self.unsupported_problem(backend, problem)

    def unsupported_problem(self, backend: Backend, problem: MatmulProblem) -> str | None:
        """Why this combination of a dtype it has with output, layout and accumulation cannot be done, or None."""
        return None

    @abstractmethod
    def bind(
        self, problem: MatmulProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[Callable[[], object], float]:
        """The launch over these operands, and the factor by which C differs from A @ B."""

    def prepare(
        self,
        backend: Backend,
        problem: MatmulProblem,
        shape: MatmulShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        buffers = problem.buffers(shape, sets, rewrite)
        whole = {name: pool.take(name, *buffer, fill=name != "c") for name, buffer in buffers.items()}
        launches: list[Callable[[], object]] = []
        operands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        scale = 1.0
        for index in range(sets):
            flat = {name: whole[name][index * aligned(count) :][:count] for name, count in shape.elements.items()}
            a, b, c = lay_out(flat, shape, problem.layout)
            launch, scale = self.bind(problem, a, b, c)
            launches.append(launch)
            operands.append((a, b, c))

        def verify() -> Verdict:
            a, b, c = operands[0]
            poison(c)
            try:
                result = launches[0]()
            except RuntimeError as error:
                if "STATUS_NOT_SUPPORTED" in str(error):  # cuBLAS and hipBLAS, of a shape or layout no algorithm takes
                    raise UnsupportedError(first_line(error)) from error
                raise
            # A kernel may return its output in place of writing C.
            output = result if isinstance(result, torch.Tensor) and result.shape == c.shape else c
            return Verdict(relative_error(a, b, output, scale, problem.seed), problem.tolerance)

        def rewrite_output() -> object:
            c = operands[0][2]
            return c.copy_(whole["c_rewrite"].view(c.shape))

        return Prepared(tuple(launches), verify, rewrite_output if rewrite else None)


def lay_out(
    flat: dict[str, torch.Tensor], shape: MatmulShape, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (M,K), B (K,N) and C (M,N) as views of flat buffers; a ``t`` operand lies transposed in memory."""
    m, n, k = shape.m, shape.n, shape.k
    a = flat["a"].view(k, m).t() if layout[0] == "t" else flat["a"].view(m, k)
    b = flat["b"].view(n, k).t() if layout[1] == "t" else flat["b"].view(k, n)
    return a, b, flat["c"].view(m, n)


def poison(c: torch.Tensor) -> None:
    """Overwrite C with what no product yields, so that an entry that is not written cannot pass."""
    if c.dtype == torch.int32:
        c.fill_(_POISON_INT)
    elif c.dtype.itemsize == 1:
        c.view(torch.uint8).fill_(0x80 if "fnuz" in str(c.dtype) else _POISON_BYTE)
    else:
        c.fill_(float("nan"))


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, scale: float, seed: int) -> float:
    """||C - scale * A @ B|| / ||scale * A @ B|| in float64 over sampled rows and columns, the edges among them."""
    chooser = random.Random(seed)
    rows = sampled_indices(c.shape[0], _SAMPLED_ROWS, chooser).to(c.device)
    columns = sampled_indices(c.shape[1], _SAMPLED_COLUMNS, chooser).to(c.device)
    with one_thread():
        reference = scale * (on_host(a, 0, rows) @ on_host(b, 1, columns))
    result = on_host(select(c, 0, rows), 1, columns)
    difference = torch.linalg.vector_norm(result - reference).item()
    magnitude = torch.linalg.vector_norm(reference).item()
    if magnitude == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / magnitude)


@contextmanager
def one_thread() -> Iterator[None]:
    """For sums this small, waking torch's threads takes longer than the sums."""
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
    if tensor.dtype.itemsize > 1 or tensor.dtype == torch.int8:
        return tensor.index_select(dim, indices)
    return tensor.view(torch.uint8).index_select(dim, indices).view(tensor.dtype)


def on_host(tensor: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    return select(tensor, dim, indices).cpu().to(torch.float64)
