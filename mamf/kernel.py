"""The contract of a matmul kernel: one implementation of C = A @ B.

``prepare`` compiles, tunes and lays out operands; what it returns launches with no argument and no allocation, so a
timed launch holds the kernel and nothing else. What was timed is verified: see mamf.checking.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.dtypes import DTYPES, tolerance
from mamf.errors import UnknownNameError
from mamf.operations.matmul.shapes import MatmulShape

LAYOUTS = ("nt", "nn", "tn", "tt")
DATA = ("normal", "uniform", "zeros", "integers")
# Sets beyond this bring nothing: operands this small are not what bounds a launch.
MOST_OPERAND_SETS = 64
ALIGNMENT = 256  # elements


class Buffer(NamedTuple):
    """A flat run of elements of one dtype."""

    elements: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


def aligned(elements: int) -> int:
    """``elements`` rounded up so that the next operand set starts where vendors' fastest loads may start."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class MatmulProblem:
    """Everything about a product but its shape.

    ``layout`` names how A and B lie in memory, in BLAS terms for row-major storage: ``n`` as multiplied, ``t``
    transposed.
    ``nt`` (B stored N x K) is what a linear layer does, and mamf-finder's.
    """

    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nt"
    data: str = "normal"
    seed: int = 0
    fast_accumulation: bool = False

    def __post_init__(self) -> None:
        for what, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("output dtype", self.out_dtype, DTYPES),
            ("layout", self.layout, LAYOUTS),
            ("data", self.data, DATA),
        ):
            if value not in known:
                raise UnknownNameError(what, value, known)

    @property
    def tolerance(self) -> float:
        return tolerance(self.dtype, self.out_dtype, self.fast_accumulation)

    @property
    def b_dtype(self) -> str:
        """B's dtype: A's own, but float8_e5m2 is multiplied with float8_e4m3fn, as gradients are; no vendor
        multiplies two e5m2.
        """
        return "float8_e4m3fn" if self.dtype == "float8_e5m2" else self.dtype

    def buffers(self, shape: MatmulShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The device buffers a product needs: ``sets`` each of A, B and C, and one to rewrite C from if asked."""
        elements = {name: aligned(count) * sets for name, count in shape.elements.items()}
        needed = {
            "a": Buffer(elements["a"], self.dtype),
            "b": Buffer(elements["b"], self.b_dtype),
            "c": Buffer(elements["c"], self.out_dtype),
        }
        if rewrite:
            needed["c_rewrite"] = Buffer(shape.elements["c"], self.out_dtype)
        return needed

    def flop(self, shape: MatmulShape) -> float:
        return shape.flop

    def nbytes(self, shape: MatmulShape, sets: int = 1, rewrite: bool = False) -> int:
        """Bytes of all buffers together."""
        return sum(buffer.nbytes for buffer in self.buffers(shape, sets, rewrite).values())


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the reference: ||C - reference|| / ||reference|| over the sampled entries.

    ``details``: what else a reader should know, by name; numbers or words.
    """

    error: float
    tolerance: float
    details: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.tolerance


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to run on one shape.

    ``launches``: one per operand set, all alike but for their memory; each returns its output, or None where it writes
    into memory of its own. ``verify``: how far the output of a set is from the reference, given the set and what its
    last launch returned; it launches nothing. ``poison``: overwrite the outputs of all sets, and memory that returned
    outputs may be given again, with what no launch yields; given what the last launches returned. ``changed_operands``:
    the names of operands that are not what they were when prepared (but for those that the operation changes).
    ``rewrite_output`` overwrites C, if it was asked for (the classic regime does so before each launch).
    ``held_bytes``: device memory that a set holds beside its operands, such as a saved forward pass.
    """

    launches: Sequence[Callable[[], object]]
    verify: Callable[[int, object], Verdict]
    poison: Callable[[Sequence[object]], object] = lambda returned: None
    changed_operands: Callable[[], Sequence[str]] = tuple
    rewrite_output: Callable[[], object] | None = None
    held_bytes: int = 0


class MatmulKernel(ABC):
    """One implementation of a matrix product. Stateless: operands live in the pool."""

    name: str
    operation: ClassVar[Literal["matmul"]] = "matmul"
    #: Whether it may be chosen where none is named: what every model calls, not what someone found faster.
    is_default: ClassVar[bool] = False
    #: Whether a search for a ceiling tries it unasked; what compiles for minutes a shape does not.
    is_tried_unasked: ClassVar[bool] = True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        """Why this kernel cannot run on this backend at all (library missing, wrong vendor), or None."""
        return None

    @abstractmethod
    def unsupported(self, backend: Backend, problem: MatmulProblem) -> str | None:
        """Why it cannot do this dtype, layout or output, or None. Asked before anything is allocated."""

    def unsupported_shape(self, problem: MatmulProblem, shape: MatmulShape) -> str | None:
        """Why it cannot do this shape, or None."""
        return None

    def variants(self, backend: Backend, problem: MatmulProblem, shape: MatmulShape) -> Sequence[MatmulKernel]:
        """The algorithms to choose from for this shape, each a kernel of its own, where the library lets one choose."""
        return (self,)

    def settings(self, backend: Backend, problem: MatmulProblem) -> AbstractContextManager[object]:
        """Library flags to hold while this kernel runs (tf32, say); restores them."""
        return nullcontext()

    def refuses(self, error: Exception) -> bool:
        """Whether an error of a launch says that the library has nothing for this shape, and not that it broke."""
        return False

    @abstractmethod
    def prepare(
        self,
        backend: Backend,
        problem: MatmulProblem,
        shape: MatmulShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        """Operands from ``pool``, everything compiled and tuned. Raises UnsupportedError or the device's own errors."""


class Problem(Protocol):
    """What measuring asks of a problem of either operation."""

    @property
    def dtype(self) -> str: ...
    @property
    def out_dtype(self) -> str: ...
    def flop(self, shape: Any) -> float: ...
    def nbytes(self, shape: Any, sets: int = 1, rewrite: bool = False) -> int: ...


def operand_sets(problem: Problem, shape: object, cache_bytes: int | None) -> int:
    """Sets to rotate so that together they exceed twice the last-level cache: at least 3, at most MOST_OPERAND_SETS."""
    if not cache_bytes:
        return 3
    return min(MOST_OPERAND_SETS, max(3, math.ceil(2 * cache_bytes / problem.nbytes(shape))))
