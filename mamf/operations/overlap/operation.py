"""Products beside other work on the same device: shapes, the interface of their kernels, and the operation ``overlap``.

The other work is a collective of the ranks, a copy between memories, or a pass over arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from mamf.backend import MIB, Backend, DeviceInfo, OperandPool, Unavailable
from mamf.dtypes import DTYPES
from mamf.errors import UnsupportedError, UsageError
from mamf.kernel import DATA, AnyKernel, Buffer, Kernel, Prepared
from mamf.limits import LARGEST_SEED, require_known, whole_number
from mamf.operation import Operation
from mamf.operations.bandwidth.shapes import PATTERNS, BandwidthProblem, BandwidthShape
from mamf.operations.collective.operation import COLLECTIVES, CollectiveProblem, CollectiveShape
from mamf.operations.copies.operation import DIRECTIONS, CopyProblem, CopyShape
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.operation import Matmul
from mamf.operations.matmul.selection import kernel_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import operation
from mamf.plugins.selection import choose_kernels
from mamf.work import Work

#: What runs beside products: collectives, copies and passes over arrays.
OTHERS = (*COLLECTIVES, *DIRECTIONS, *PATTERNS)
#: What a rate counts.
TIMED = PRODUCTS, OTHER = ("products", "other")
_DTYPES_OF_COLLECTIVES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, order=True)
class OverlapShape:
    """A product, and the bytes of the other work as its own operation counts them. Written as ``MxNxK+SIZE``."""

    m: int
    n: int
    k: int
    nbytes: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "nbytes"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.product}+{BandwidthShape(self.nbytes)}"

    @property
    def product(self) -> MatmulShape:
        return MatmulShape(self.m, self.n, self.k)

    @classmethod
    def parse(cls, text: str) -> OverlapShape:
        """Read ``8192x8192x8192+1GiB``. Raises UsageError for anything else."""
        product, plus, size = text.partition("+")
        if not plus:
            raise UsageError(f"{text!r} is not a pair; write MxNxK+SIZE, for example 8192x8192x8192+1GiB")
        shape = MatmulShape.parse(product)
        return cls(shape.m, shape.n, shape.k, BandwidthShape.parse(size).nbytes)


SMALLEST = OverlapShape(1, 1, 1, 1)


class Side(NamedTuple):
    """One of the two works: its problem and its shape."""

    problem: Any
    shape: Any


@dataclass(frozen=True)
class OverlapProblem:
    """``other``: what runs beside products, one of OTHERS. ``timed``: what the rate counts, one of TIMED. ``alone``:
    whether it runs alone. ``ranks``, ``blocks``: as of a collective; always 1 and 0 for other work.
    """

    operation: ClassVar[str] = "overlap"

    other: str = "to_host"
    timed: str = PRODUCTS
    alone: bool = True
    ranks: int = 1
    blocks: int = 0
    dtype: str = "bfloat16"
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        require_known(("other work", self.other, OTHERS), ("timed", self.timed, TIMED))
        require_known(("dtype", self.dtype, DTYPES), ("data", self.data, DATA))
        if not self.is_collective:
            object.__setattr__(self, "ranks", 1)
            object.__setattr__(self, "blocks", 0)
        whole_number("seed", self.seed, 0, LARGEST_SEED)
        self.beside(SMALLEST)  # refuses ranks and blocks that are none

    @property
    def is_collective(self) -> bool:
        return self.other in COLLECTIVES

    def products(self, shape: OverlapShape) -> Side:
        out_dtype = DTYPES[self.dtype].default_output
        return Side(MatmulProblem(self.dtype, out_dtype, data=self.data, seed=self.seed), shape.product)

    def beside(self, shape: OverlapShape) -> Side:
        common = {"data": self.data, "seed": self.seed}
        if self.is_collective:
            dtype = self.dtype if self.dtype in _DTYPES_OF_COLLECTIVES else "bfloat16"
            problem = CollectiveProblem(self.other, self.ranks, dtype, blocks=self.blocks, **common)  # type: ignore[arg-type]
            return Side(problem, CollectiveShape(shape.nbytes))
        if self.other in DIRECTIONS:
            return Side(CopyProblem(self.other, **common), CopyShape(shape.nbytes))  # type: ignore[arg-type]
        return Side(BandwidthProblem(self.other, **common), BandwidthShape(shape.nbytes))  # type: ignore[arg-type]

    def counted(self, shape: OverlapShape) -> Side:
        """The work that the rate counts."""
        return self.beside(shape) if self.timed == OTHER else self.products(shape)

    def work(self, shape: OverlapShape) -> Work:
        problem, counted = self.counted(shape)
        own: Work = problem.work(counted)
        return replace(own, convention=f"{own.convention}, {'alone' if self.alone else 'while both run'}")

    def buffers(self, shape: OverlapShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Of the work that is counted."""
        problem, counted = self.counted(shape)
        return dict(problem.buffers(counted, sets, rewrite))

    def nbytes(self, shape: OverlapShape, sets: int = 1, rewrite: bool = False) -> int:
        problem, counted = self.counted(shape)
        return int(problem.nbytes(counted, sets, rewrite))


class Pair(Kernel[OverlapProblem, OverlapShape]):
    """The two works of a pair by the kernels that mamf chooses for each. A launch is of the one that is counted;
    'mamf overlap' launches both at once.
    """

    operation = "overlap"
    name = "pair"
    is_default = True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.second_queue() is not None:
            return None
        return Unavailable(f"mamf knows no second queue of backend {backend.name}", "measure each work alone")

    def of(self, backend: Backend, problem: OverlapProblem) -> AnyKernel:
        """The kernel of the work that is counted. Raises UnavailableError."""
        counted = problem.counted(SMALLEST).problem
        if problem.timed != OTHER:
            return kernel_for(backend, counted)
        available = choose_kernels(operation(counted.operation), backend)
        return next((each for _, each in available if each.is_default), available[0][1])

    def unsupported(self, backend: Backend, problem: OverlapProblem) -> str | None:
        if not problem.alone:
            return "rates while both works run are measured by 'mamf overlap'"
        return self.of(backend, problem).unsupported(backend, problem.counted(SMALLEST).problem)

    def settings(self, backend: Backend, problem: OverlapProblem) -> AbstractContextManager[object]:
        return self.of(backend, problem).settings(backend, problem.counted(SMALLEST).problem)

    def prepare(
        self,
        backend: Backend,
        problem: OverlapProblem,
        shape: OverlapShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        kernel, side = self.of(backend, problem), problem.counted(shape)
        if reason := kernel.unsupported_shape(*side):
            raise UnsupportedError(reason)
        return kernel.prepare(backend, *side, pool, sets, rewrite)


_PRODUCTS = (MatmulShape(8192, 8192, 8192), MatmulShape(16, 8192, 8192))
_SIZES = (64, 1024)


class Overlap(Operation[OverlapProblem, OverlapShape]):
    name = "overlap"
    kernel_group = "mamf.overlap_kernels"
    kernel_type = Pair
    shape_type = OverlapShape
    problem_type = OverlapProblem
    shape_example = "4096x4096x4096+64MiB"
    is_of_links = True

    def default_shapes(self, backend: Backend) -> Sequence[OverlapShape]:
        """A large product and a decode layer, each beside 64 MiB and 1 GiB; for CPUs one small pair."""
        if not backend.is_accelerator:
            return [OverlapShape(256, 256, 256, MIB)]
        return [OverlapShape(each.m, each.n, each.k, size * MIB) for each in _PRODUCTS for size in _SIZES]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> OverlapProblem:
        """As in Operation; ``ranks`` defaults to the size of this process's group."""
        return super().problem_for(backend, {"ranks": max(2, int(os.environ.get("WORLD_SIZE") or 0)), **asked})

    def fastest_possible(
        self, info: DeviceInfo, problem: OverlapProblem, shape: OverlapShape | None = None
    ) -> float | None:
        if shape is None:
            return None
        counted, size = problem.counted(shape)
        return operation(counted.operation).fastest_possible(info, counted, size)

    def peak(self, info: DeviceInfo, problem: OverlapProblem) -> float | None:
        """The datasheet's FLOP per second, where the rate counts FLOP."""
        if problem.timed == OTHER:
            return None
        return Matmul().peak(info, problem.products(SMALLEST).problem)

    def axis(self, shape: OverlapShape) -> float:
        """Bytes of the other work."""
        return float(shape.nbytes)
