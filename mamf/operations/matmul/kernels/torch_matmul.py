"""What torch's matrix products share: operands as views of the pool's buffers, and verification on the host.

The reference is computed on the CPU in float64, so a device never judges itself.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared, Verdict, aligned
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.outputs import Unchanged, poison_outputs

# Rows times columns entries of C are compared: few enough that the check hides in the rest between two bursts.
_SAMPLED_ROWS = _SAMPLED_COLUMNS = 16


class TorchMatmul(MatmulKernel):
    """A product by one torch function. Derived kernels say which dtypes they take and how they launch."""

    dtypes: ClassVar[tuple[str, ...]]
    #: The function of torch that it calls, where a release may lack it.
    function: ClassVar[str] = ""

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if self.function and not hasattr(torch, self.function):
            return Unavailable(f"this torch has no torch.{self.function}", "pip install --upgrade torch")
        return None

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

    def details(self, problem: MatmulProblem) -> Mapping[str, str]:
        """What a reader of its rows should know of how it computes."""
        return {}

    def refuses(self, error: Exception) -> bool:
        # cuBLAS and hipBLAS, of a shape or layout that no algorithm takes
        return isinstance(error, RuntimeError) and "STATUS_NOT_SUPPORTED" in str(error)

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
        products = [PreparedProduct(self, problem, shape, whole, index) for index in range(sets)]

        def poison(returned: Sequence[object]) -> None:
            for product, result in zip(products, returned, strict=True):
                poison_outputs([product.c], result)

        def rewrite_output() -> object:
            c = products[0].c
            return c.copy_(whole["c_rewrite"].view(c.shape))

        return Prepared(
            launches=[product.launch for product in products],
            verify=lambda index, result: products[index].verify(result),
            poison=poison,
            changed_operands=Unchanged({name: whole[name] for name in ("a", "b")}),
            rewrite_output=rewrite_output if rewrite else None,
        )


class PreparedProduct:
    """One operand set: its launch, and the sampled entries that its C must have, computed before the first launch."""

    def __init__(
        self,
        kernel: TorchMatmul,
        problem: MatmulProblem,
        shape: MatmulShape,
        whole: Mapping[str, torch.Tensor],
        index: int,
    ) -> None:
        flat = {name: whole[name][index * aligned(count) :][:count] for name, count in shape.elements.items()}
        a, b, self.c = lay_out(flat, shape, problem.layout)
        self.launch, scale = kernel.bind(problem, a, b, self.c)
        self._tolerance = problem.tolerance
        self._details = kernel.details(problem)
        chooser = random.Random(problem.seed)
        self._rows = sampled_indices(shape.m, _SAMPLED_ROWS, chooser).to(a.device)
        self._columns = sampled_indices(shape.n, _SAMPLED_COLUMNS, chooser).to(a.device)
        with one_thread():
            self._expected = scale * (on_host(a, 0, self._rows) @ on_host(b, 1, self._columns))

    def verify(self, result: object) -> Verdict:
        """||C - scale * A @ B|| / ||scale * A @ B|| in float64 over sampled rows and columns, the edges among them."""
        # A kernel may return its output in place of writing C.
        output = result if isinstance(result, torch.Tensor) and result.shape == self.c.shape else self.c
        found = on_host(select(output, 0, self._rows), 1, self._columns)
        with one_thread():
            difference = torch.linalg.vector_norm(found - self._expected).item()
            magnitude = torch.linalg.vector_norm(self._expected).item()
        if magnitude == 0:
            return Verdict(0.0 if difference == 0 else float("inf"), self._tolerance, self._details)
        return Verdict(float(difference / magnitude), self._tolerance, self._details)


def lay_out(
    flat: dict[str, torch.Tensor], shape: MatmulShape, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (M,K), B (K,N) and C (M,N) as views of flat buffers; a ``t`` operand lies transposed in memory."""
    m, n, k = shape.m, shape.n, shape.k
    a = flat["a"].view(k, m).t() if layout[0] == "t" else flat["a"].view(m, k)
    b = flat["b"].view(n, k).t() if layout[1] == "t" else flat["b"].view(k, n)
    return a, b, flat["c"].view(m, n)


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
