"""The contract of a kernel: one implementation of an operation.

``prepare`` compiles, tunes and lays out operands. The launches that it returns take no argument and allocate nothing,
so a timed launch contains only the kernel. Timed results are verified: see mamf.engine.regimes.base.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.dtypes import DTYPES


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    - ``flop``, ``nbytes``: FLOP, and bytes read plus written (each operand once), by the named ``convention``.
    - ``unit``: the unit of the rate: ``TFLOPS`` counts FLOP, ``TB/s`` counts bytes, both 1e12 per second.
    - ``has_products``: whether the FLOP are those of matmul, so that the matmul ceiling limits them. Always True if the
      rate counts FLOP.
    """

    flop: float
    nbytes: int
    convention: str
    unit: str = "TFLOPS"
    has_products: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_products", self.has_products or self.unit == "TFLOPS")

    @property
    def amount(self) -> float:
        """The FLOP or bytes that the rate counts."""
        return float(self.flop if self.unit == "TFLOPS" else self.nbytes)


#: The number of rows, and of columns, in a cell of wrong values.
CELL = 64
# Possible numbers of cells along a side of a tile, the fewest tiles that show a period, and how many tiles to name.
_TILE_SIDES_IN_CELLS, _MIN_TILES_FOR_PERIOD, _MAX_NAMED_TILES = (4, 2, 1), 3, 4


@dataclass(frozen=True)
class WrongCells:
    """The cells of an output that have a wrong value.

    - ``cells``: the number in the batch, row and column of each, from 0.
    - ``rows``, ``columns``: the size of one matrix, in values. ``values``: the number of values in the whole output.
    """

    cells: frozenset[tuple[int, int, int]]
    rows: int
    columns: int
    values: int = 0


def describe_wrong_cells(wrong: WrongCells) -> str:
    """Describe the wrong tiles in one line: their size, their place in the grid of tiles, and their period."""
    down, across = -(-wrong.rows // CELL), -(-wrong.columns // CELL)
    sides = sorted(product(_TILE_SIDES_IN_CELLS, _TILE_SIDES_IN_CELLS), key=lambda side: -side[0] * side[1])
    fitting = (side for side in sides if side == (1, 1) or (side[0] <= down and side[1] <= across))
    height, width = next(side for side in fitting if _forms_whole_tiles(wrong, *side, down, across))
    tiles = sorted({(b, row // height, column // width) for b, row, column in wrong.cells})
    down, across = -(-down // height), -(-across // width)
    numbers = {
        "rows": sorted((b * down + row) * across + column for b, row, column in tiles),
        "columns": sorted((b * across + column) * down + row for b, row, column in tiles),
    }
    period, order = max((math.gcd(*(b - a for a, b in pairwise(each))), order) for order, each in numbers.items())
    has_period = len(tiles) >= _MIN_TILES_FOR_PERIOD and period > 1
    rule = f"; every {period}th tile by {order}, from number {numbers[order][0]}" if has_period else ""
    named = ", ".join(f"row {row} column {column} of product {b}" for b, row, column in tiles[:_MAX_NAMED_TILES])
    more = ", ..." if len(tiles) > _MAX_NAMED_TILES else ""
    return f"{len(tiles)} wrong tile{'s'[: len(tiles) - 1]} of {height * CELL}x{width * CELL}: {named}{more}{rule}"


def _forms_whole_tiles(wrong: WrongCells, height: int, width: int, down: int, across: int) -> bool:
    """Return whether the wrong cells form whole tiles of ``height`` x ``width`` cells. The whole output has ``down`` x
    ``across`` cells.
    """
    tiles = {(b, row // height * height, column // width * width) for b, row, column in wrong.cells}
    return all(
        (b, row, column) in wrong.cells
        for b, top, left in tiles
        for row in range(top, min(top + height, down))
        for column in range(left, min(left + width, across))
    )


DATA = ("normal", "uniform", "zeros", "integers")
#: ``wide``: normal times powers of two from 2^-10 to 2^2, so that sums mix small and large terms.
ALL_DATA = (*DATA, "wide")
# If operands are so small that this many sets fit in the cache, reading them does not limit a launch anyway.
MAX_OPERAND_SETS = 64
ALIGNMENT = 256  # elements


class Buffer(NamedTuple):
    """A flat buffer of one dtype. ``fill``: whether to fill it with the problem's data, because launches read it."""

    elements: int
    dtype: str
    fill: bool = True

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


def aligned(elements: int) -> int:
    """Round ``elements`` up so that the next operand set is aligned for the fastest loads."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


class Problem(Protocol):
    """All parameters of an operation except its shape. Immutable."""

    #: The operation's name.
    operation: ClassVar[str]

    @property
    def dtype(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    def work(self, shape: Any) -> Work:
        """Return the FLOP and bytes of one launch."""

    def buffers(self, shape: Any, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the device buffers of the operands, by name."""

    def nbytes(self, shape: Any, sets: int = 1, rewrite: bool = False) -> int:
        """Return the bytes of the operands of a launch, which decide how many operand sets exceed the cache."""


ProblemT = TypeVar("ProblemT", bound=Problem)
ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the reference: ``error`` is ||C - reference|| / ||reference|| over the sampled entries.

    - ``reference``: the arithmetic of the reference.
    - ``reason``: why a result is wrong although its error is small, in one line.
    - ``details``: further findings by name, as numbers or text. NaN and infinities are dropped.

    Raises ValueError for details of any other type.
    """

    error: float
    tolerance: float
    details: Mapping[str, float | str] = field(default_factory=dict)
    reference: str = "float64"
    reason: str = ""

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"detail {name!r} is a {type(value).__name__}: it must be a number or text")
        finite = {name: value for name, value in self.details.items() if isinstance(value, str) or math.isfinite(value)}
        object.__setattr__(self, "details", finite)

    @property
    def ok(self) -> bool:
        return not self.reason and math.isfinite(self.error) and self.error <= self.tolerance


#: Takes a later result, queues its comparison, and returns a function that waits for the differing cells.
Compare = Callable[[object], Callable[[], WrongCells]]


@dataclass(frozen=True)
class Prepared:
    """A kernel ready to run on one shape.

    - ``launches``: one per operand set; they differ only in the memory that they use. Each returns its output, or None
      if it writes to a buffer allocated in advance.
    - ``verify``: compares the output of a set with the reference, given the set's index and the result of its last
      launch. It launches nothing.
    - ``poison``: overwrites the outputs of all sets, and memory that the allocator may reuse for returned outputs, with
      values that no launch produces. Takes the results of the last launches.
    - ``changed_operands``: returns the names of operands that launches modified, except those that the operation must
      modify.
    - ``rewrite_output``: overwrites C; only if it was requested (the classic regime calls it before each launch).
    - ``held_bytes``: device memory that a set needs in addition to its operands, such as a saved forward pass.
    - ``checksum``: queues a checksum of the output of a set, given the result of its last launch, and returns a
      function that waits for the number. Equal outputs have equal checksums. None: the kernel has no checksum.
    - ``verify_whole``: like ``verify``, for all entries of the output; called after the first launch of each set and
      after the last timed launch. None: only ``verify`` is available.
    - ``change_operands``: queues a random change of all sets' operands, after which all earlier results are wrong.
      ``verify`` expects the new results, and ``changed_operands`` undoes the change. None: operands never change.
    - ``remember``: keeps the output of a set's last launch, given the set's index and its result. Returns a function
      (``Compare``) that compares later outputs with it, bit by bit. None: not available.
    - ``repeats_bits``: whether launches on unchanged operands always give the same bits.
    - ``locate``: finds where the output of a set is wrong, given the set's index and the result. None: not available.
    - ``verify_special``: launches the first set with infinities, NaN and subnormal numbers among its operands, checks
      the output, and restores the operands. None: no expectation is defined.
    """

    launches: Sequence[Callable[[], object]]
    verify: Callable[[int, object], Verdict]
    poison: Callable[[Sequence[object]], object] = lambda returned: None
    changed_operands: Callable[[], Sequence[str]] = tuple
    rewrite_output: Callable[[], object] | None = None
    held_bytes: int = 0
    checksum: Callable[[int, object], Callable[[], int]] | None = None
    verify_whole: Callable[[int, object], Verdict] | None = None
    change_operands: Callable[[], object] | None = None
    remember: Callable[[int, object], Compare] | None = None
    repeats_bits: bool = False
    locate: Callable[[int, object], WrongCells] | None = None
    verify_special: Callable[[], Verdict] | None = None


class Kernel(ABC, Generic[ProblemT, ShapeT]):
    """One implementation of an operation. Stateless: operands are in the pool.

    ``product_dtypes``: the dtypes of its matmuls if they differ from the operands' dtype (Sage: int8 and fp8), so that
    reports can also show a share of that dtype's ceiling. ``is_exact``: False for a kernel that approximates. Reports
    then show its error, and its FLOP include work that it skips.
    """

    name: str
    operation: ClassVar[str]
    #: Whether it is chosen if no kernel is named: the function that every model calls, not a faster alternative.
    is_default: ClassVar[bool] = False
    #: Whether a search tries it by default. False for kernels that compile for minutes per shape.
    is_tried_unasked: ClassVar[bool] = True
    #: Whether its ``variants`` need no compilation, so that even quick searches try all of them.
    has_cheap_variants: ClassVar[bool] = False
    #: Whether its rows report the memory that a launch needs.
    reports_memory: ClassVar[bool] = False
    #: Whether its rows also report the memory that the process reserved. This releases cached blocks first, so that
    #: launches of microseconds would wait for new allocations.
    reports_reserved: ClassVar[bool] = False
    #: Whether burst refuses a launch that is longer than a train, instead of measuring trains of a single launch.
    must_fit_a_train: ClassVar[bool] = False
    #: The argument that its class takes in brackets after the name, such as ``an attention kernel``; empty if none.
    takes: ClassVar[str] = ""
    #: Operand dtypes that it supports; empty if ``unsupported`` does not depend on this list.
    dtypes: ClassVar[tuple[str, ...]] = ()
    product_dtypes: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        """Return why this kernel cannot run on this backend (library missing, wrong vendor or card), or None.

        If an installed library fails to import, in whatever way, return the reason instead of raising the error.
        """
        return None

    def _unsupported_dtype(self, problem: ProblemT) -> str | None:
        """Return why this kernel does not support the problem's dtype, or None."""
        if problem.dtype in self.dtypes:
            return None
        return f"kernel {self.name} does not support {problem.dtype}; it takes {', '.join(self.dtypes)}"

    @abstractmethod
    def unsupported(self, backend: Backend, problem: ProblemT) -> str | None:
        """Return why this kernel does not support this problem (dtype, layout), or None. Must not allocate."""

    def unsupported_shape(self, problem: ProblemT, shape: ShapeT) -> str | None:
        """Return why this kernel does not support this shape, or None."""
        return None

    def variants(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> Sequence[Kernel[ProblemT, ShapeT]]:
        """Return the library's algorithms for this shape, each as a kernel; only this kernel if there is no choice."""
        return (self,)

    def settings(self, backend: Backend, problem: ProblemT) -> AbstractContextManager[object]:
        """Return a context that sets library flags (such as tf32) while this kernel runs, and restores them."""
        return nullcontext()

    def refuses(self, error: Exception) -> bool:
        """Return whether an error means that the library does not support this shape; False if the launch failed."""
        return False

    @abstractmethod
    def prepare(
        self,
        backend: Backend,
        problem: ProblemT,
        shape: ShapeT,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        """Take operands from ``pool``, compile, tune and, for a backward pass, run the forward pass.

        ``sets``: the number of operand sets to rotate over. ``rewrite``: whether ``rewrite_output`` is needed. Raises
        UnsupportedError or the device's own errors.
        """


#: A kernel of any operation.
AnyKernel = Kernel[Any, Any]


def count_operand_sets(problem: Problem, shape: object, cache_bytes: int | None) -> int:
    """Return the number of operand sets that together exceed twice the cache: at least 3, at most MAX_OPERAND_SETS.

    ``cache_bytes``: the size of the last-level cache, if known.
    """
    return 3 if not cache_bytes else min(MAX_OPERAND_SETS, max(3, math.ceil(2 * cache_bytes / problem.nbytes(shape))))
