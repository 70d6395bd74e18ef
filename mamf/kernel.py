"""Define the interface between mamf and a kernel, which is one implementation of an operation such as matmul.

A kernel's method ``prepare`` compiles the kernel, tunes it and lays out its operands. The launches that ``prepare``
returns take no argument and allocate nothing, so a timed launch contains only the kernel. An operand set is one copy of
all operands. Launches rotate over several sets, so that they do not find their operands in the cache. mamf verifies the
results of timed launches (see mamf.engine.regimes.base).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from mamf.backend import Backend, OperandPool, Unavailability
from mamf.dtypes import DTYPES


@dataclass(frozen=True)
class Work:
    """The amount of work of one launch, from which mamf computes its rate.

    - ``flop``: the number of floating-point operations. ``nbytes``: the bytes read plus written, each operand once.
    - ``counting_convention``: how ``flop`` and ``nbytes`` are counted, in words.
    - ``unit``: the unit of the rate: ``TFLOPS`` counts FLOP, ``TB/s`` counts bytes, both 1e12 per second.
    - ``has_matmul_flop``: whether the FLOP are those of matmuls. If so, the highest measured matmul rate limits the
      FLOP rate of the launch. Always True if ``unit`` is TFLOPS.
    """

    flop: float
    nbytes: int
    counting_convention: str
    unit: str = "TFLOPS"
    has_matmul_flop: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "has_matmul_flop", self.has_matmul_flop or self.unit == "TFLOPS")

    @property
    def amount(self) -> float:
        """The FLOP of the launch if its rate is in TFLOPS, its bytes if the rate is in TB/s."""
        return float(self.flop if self.unit == "TFLOPS" else self.nbytes)


#: The height and the width of a cell, in values. mamf divides an output matrix into square cells to report where its
#: values are wrong.
CELL_SIZE = 64
# The sizes of tiles, in (rows, columns) of cells, that mamf tries when it groups the wrong cells of an output into
# tiles. The largest size is first.
_TILE_SIZES_IN_CELLS = ((4, 4), (4, 2), (2, 4), (4, 1), (2, 2), (1, 4), (2, 1), (1, 2), (1, 1))
# mamf reports a regular distance (period) between wrong tiles only if at least _MIN_TILES_FOR_PERIOD tiles are wrong,
# because two tiles cannot show a pattern. It lists the positions of at most _MAX_NAMED_TILES wrong tiles.
_MIN_TILES_FOR_PERIOD, _MAX_NAMED_TILES = 3, 4


@dataclass(frozen=True)
class WrongCells:
    """The cells (squares of 64 x 64 values) of an output that contain a wrong value.

    - ``cells``: the position of each such cell: the matrix in the batch, the cell row and the cell column, from 0.
    - ``row_count``, ``column_count``: the number of rows and columns of values in one matrix.
    - ``value_count``: the number of values in the whole output.
    """

    cells: frozenset[tuple[int, int, int]]
    row_count: int
    column_count: int
    value_count: int = 0


def describe_wrong_cells(wrong: WrongCells) -> str:
    """Return one line about the wrong tiles of an output: their number, their size, the positions of the first tiles,
    and the regular distance between wrong tiles, if there is one.
    """
    cell_rows, cell_columns = -(-wrong.row_count // CELL_SIZE), -(-wrong.column_count // CELL_SIZE)
    fitting_sizes = (
        size for size in _TILE_SIZES_IN_CELLS if size == (1, 1) or (size[0] <= cell_rows and size[1] <= cell_columns)
    )
    height, width = next(size for size in fitting_sizes if _do_cells_form_tiles(wrong, *size, cell_rows, cell_columns))
    tiles = sorted({(b, row // height, column // width) for b, row, column in wrong.cells})
    tile_rows, tile_columns = -(-cell_rows // height), -(-cell_columns // width)
    tile_numbers = {
        "rows": sorted((b * tile_rows + row) * tile_columns + column for b, row, column in tiles),
        "columns": sorted((b * tile_columns + column) * tile_rows + row for b, row, column in tiles),
    }
    period, order = max((math.gcd(*(b - a for a, b in pairwise(each))), order) for order, each in tile_numbers.items())
    has_period = len(tiles) >= _MIN_TILES_FOR_PERIOD and period > 1
    period_text = (
        f"; every {period}th tile is wrong, counting along {order} from tile {tile_numbers[order][0]}"
        if has_period
        else ""
    )
    positions = ", ".join(f"row {row} column {column} of matmul {b}" for b, row, column in tiles[:_MAX_NAMED_TILES])
    ellipsis = ", ..." if len(tiles) > _MAX_NAMED_TILES else ""
    return (
        f"{len(tiles)} wrong tile{'s'[: len(tiles) - 1]} of {height * CELL_SIZE}x{width * CELL_SIZE}: "
        f"{positions}{ellipsis}{period_text}"
    )


def _do_cells_form_tiles(wrong: WrongCells, height: int, width: int, cell_rows: int, cell_columns: int) -> bool:
    """Return whether the wrong cells form complete tiles of ``height`` x ``width`` cells. Each matrix of the output has
    ``cell_rows`` rows and ``cell_columns`` columns of cells.
    """
    tiles = {(b, row // height * height, column // width * width) for b, row, column in wrong.cells}
    return all(
        (b, row, column) in wrong.cells
        for b, top, left in tiles
        for row in range(top, min(top + height, cell_rows))
        for column in range(left, min(left + width, cell_columns))
    )


#: Distributions of the operands' values that a user can choose (see mamf.torch_backend.fill_with_random_values).
DATA_CHOICES = ("normal", "uniform", "zeros", "integers")
#: All distributions of the operands' values. ``wide`` multiplies normal values by random powers of two from 2^-10 to
#: 2^2, so that the sums of a matmul have small and large terms.
ALL_DATA_CHOICES = (*DATA_CHOICES, "wide")
# Use at most 64 operand sets, even if all of them fit in the cache. If 64 sets fit, each set is so small that a launch
# takes equally long whether it reads the set from the cache or from memory.
MAX_OPERAND_SETS = 64
# The start of each operand set is aligned to a multiple of this number of elements.
_SET_ALIGNMENT_ELEMENTS = 256


class Buffer(NamedTuple):
    """The size and dtype of a flat device buffer that a launch needs. ``fill``: whether to fill it with random values,
    because launches read it.
    """

    element_count: int
    dtype: str
    fill: bool = True

    @property
    def nbytes(self) -> int:
        return self.element_count * DTYPES[self.dtype].itemsize


def round_up_to_alignment(elements: int) -> int:
    """Round a number of elements up to a multiple of 256, so that the next operand set in the buffer is aligned for the
    fastest loads.
    """
    return -(-elements // _SET_ALIGNMENT_ELEMENTS) * _SET_ALIGNMENT_ELEMENTS


class Problem(Protocol):
    """All parameters of a launch except its shape, such as the dtype. Problems are immutable.

    - ``dtype``: mamf's name of the operands' dtype. ``data``: the distribution of their values. ``seed``: the seed of
      all random values.
    - Arguments of the methods: ``shape`` is the shape of the launch, ``sets`` the number of operand sets. ``rewrite``
      says whether mamf overwrites the output before each launch, which only the regime (measurement method)
      ``classic`` does.
    """

    #: Name of the operation to which the problem belongs.
    operation: ClassVar[str]

    @property
    def dtype(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    def compute_work(self, shape: Any) -> Work:
        """Return the FLOP and bytes of one launch."""

    def list_buffers(self, shape: Any, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the sizes and dtypes of the device buffers of all operand sets, by the name of the operand."""

    def count_bytes(self, shape: Any, sets: int = 1, rewrite: bool = False) -> int:
        """Return the total size of the operands in bytes, from which mamf computes how many sets exceed the cache."""


ProblemT = TypeVar("ProblemT", bound=Problem)
ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True)
class Verdict:
    """The outcome of comparing a result with a reference.

    - ``error``: ||C - reference|| / ||reference|| over the compared entries of the result C.
    - ``tolerance``: the largest error that a correct result may have.
    - ``reference_arithmetic``: the arithmetic in which the reference was computed.
    - ``reason``: why the result is wrong although its error is small, in one line; otherwise empty.
    - ``details``: further findings by name, as numbers or text. The constructor drops NaN and infinities, and raises
      ValueError for values of any other type.
    """

    error: float
    tolerance: float
    details: Mapping[str, float | str] = field(default_factory=dict)
    reference_arithmetic: str = "float64"
    reason: str = ""

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"detail {name!r} must be a number or text, not of the type {type(value).__name__}")
        finite = {name: value for name, value in self.details.items() if isinstance(value, str) or math.isfinite(value)}
        object.__setattr__(self, "details", finite)

    @property
    def ok(self) -> bool:
        return not self.reason and math.isfinite(self.error) and self.error <= self.tolerance


#: A function that compares a later result with a remembered result. It queues the comparison on the device, and returns
#: a function that waits for the comparison and returns the cells that differ.
ComparisonFunction = Callable[[object], Callable[[], WrongCells]]


@dataclass(frozen=True)
class PreparedKernel:
    """A kernel that is compiled, tuned and ready to run on one shape.

    - ``launches``: one function per operand set. These functions differ only in the memory that they use. Each returns
      its output, or None if it writes to a buffer allocated in advance.
    - ``verify``: compares the output of an operand set with the reference, given the set's index and the result of its
      last launch. It does not launch the kernel.
    - ``poison_outputs``: overwrites the outputs of all sets with values that no launch produces, given the results of
      their last launches. Also overwrites memory that the allocator may reuse for new outputs.
    - ``list_changed_operands``: returns the names of operands that launches modified, except those that the operation
      must modify.
    - ``rewrite_output``: overwrites the output; None unless ``prepare`` was called with ``rewrite``. The regime classic
      calls it before each launch.
    - ``extra_bytes_per_set``: device memory that a set needs in addition to its operands, such as a saved forward pass.
    - ``queue_checksum``: queues a checksum of the output of a set, given the result of its last launch, and returns a
      function that waits for the number. Equal outputs have equal checksums. None: the kernel has no checksum.
    - ``verify_whole_output``: like ``verify``, for all entries of the output; called after the first launch of each set
      and after the last timed launch. None: only ``verify`` is available.
    - ``change_operands``: queues a random change of all sets' operands, after which all earlier results are wrong.
      ``verify`` then expects the new results. Before ``list_changed_operands`` looks for operands that launches
      modified, it undoes all these changes. None: the operands never change.
    - ``remember_output``: keeps the output of a set's last launch, given the set's index and its result. Returns a
      function (``ComparisonFunction``) that compares later outputs with it, bit by bit. None: the kernel cannot keep
      outputs.
    - ``is_deterministic``: whether launches on unchanged operands always give the same bits.
    - ``locate_wrong_cells``: finds where the output of a set is wrong, given the set's index and the result. None: not
      available.
    - ``verify_special_values``: launches the first set with infinities, NaN and subnormal numbers among its operands,
      checks the output, and restores the operands. None: the correct output for such operands is not defined.
    """

    launches: Sequence[Callable[[], object]]
    verify: Callable[[int, object], Verdict]
    poison_outputs: Callable[[Sequence[object]], object] = lambda returned: None
    list_changed_operands: Callable[[], Sequence[str]] = tuple
    rewrite_output: Callable[[], object] | None = None
    extra_bytes_per_set: int = 0
    queue_checksum: Callable[[int, object], Callable[[], int]] | None = None
    verify_whole_output: Callable[[int, object], Verdict] | None = None
    change_operands: Callable[[], object] | None = None
    remember_output: Callable[[int, object], ComparisonFunction] | None = None
    is_deterministic: bool = False
    locate_wrong_cells: Callable[[int, object], WrongCells] | None = None
    verify_special_values: Callable[[], Verdict] | None = None


class Kernel(ABC, Generic[ProblemT, ShapeT]):
    """One implementation of an operation, such as a library's matmul. A kernel has no state: ``prepare`` takes the
    operands from a pool of device memory that mamf reuses for all kernels.

    - ``matmul_dtypes``: the dtypes of its matmuls if they differ from the dtype of the operands (SageAttention: int8
      and fp8), so that reports can also compare its rate with the highest measured rate of these dtypes.
    - ``is_exact``: False for a kernel that approximates. Reports then show its error. Its FLOP are those of the exact
      result, even if it skips some of the work.
    """

    name: str
    operation: ClassVar[str]
    #: Whether mamf measures this kernel if the user names no kernel. True for the function that models usually call,
    #: False for faster alternatives.
    is_default: ClassVar[bool] = False
    #: Whether a search for the fastest kernel tries this kernel if the user names no kernel. False for kernels that
    #: need minutes to compile for each shape.
    is_tried_by_default: ClassVar[bool] = True
    #: Whether the kernels that ``list_variants`` returns need no compilation. Even quick searches try such kernels.
    has_cheap_variants: ClassVar[bool] = False
    #: Whether mamf also measures how much device memory a launch of this kernel needs.
    reports_memory: ClassVar[bool] = False
    #: Whether mamf also measures how much device memory the process reserves for a launch. To measure it, mamf releases
    #: cached blocks first. This slows down launches of a few microseconds, which must then allocate memory.
    reports_reserved_memory: ClassVar[bool] = False
    #: Whether the regime ``burst``, which times short trains (series of launches), refuses this kernel if one launch
    #: takes longer than a train should take. If False, burst measures trains of one launch.
    must_fit_in_burst: ClassVar[bool] = False
    #: Description of the argument that the user writes in brackets after the kernel's name, such as ``an attention
    #: kernel``; empty if the kernel takes none.
    argument_description: ClassVar[str] = ""
    #: Operand dtypes that the kernel supports. It may be empty if ``explain_unsupported_problem`` does not read it.
    dtypes: ClassVar[tuple[str, ...]] = ()
    matmul_dtypes: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = True

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        """Return why this kernel cannot run on this backend (library missing, wrong vendor or card); None if it can.

        If the import of an installed library raises any error, this method must return the error as the reason, not
        raise it.
        """
        return None

    def _explain_unsupported_dtype(self, problem: ProblemT) -> str | None:
        """Return why this kernel does not support the problem's dtype; None if it does."""
        if problem.dtype in self.dtypes:
            return None
        supported = f"it takes {', '.join(self.dtypes)}" if self.dtypes else "list its dtypes in the attribute dtypes"
        return f"kernel {self.name} does not support {problem.dtype}; {supported}"

    @abstractmethod
    def explain_unsupported_problem(self, backend: Backend, problem: ProblemT) -> str | None:
        """Return why this kernel does not support this problem (dtype, layout); None if it does. Must not allocate
        device memory.
        """

    def explain_unsupported_shape(self, problem: ProblemT, shape: ShapeT) -> str | None:
        """Return why this kernel does not support this shape; None if it does."""
        return None

    def list_variants(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> Sequence[Kernel[ProblemT, ShapeT]]:
        """Return one kernel for each algorithm that the library offers for this shape. If the library offers no choice,
        return only this kernel.
        """
        return (self,)

    def apply_settings(self, backend: Backend, problem: ProblemT) -> AbstractContextManager[object]:
        """Return a context manager that sets the library flags that this kernel needs (such as tf32), and restores them
        on exit.
        """
        return nullcontext()

    def is_refusal(self, error: Exception) -> bool:
        """Return whether an error of a launch means that the library does not support the shape; False if it means that
        the launch failed.
        """
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
    ) -> PreparedKernel:
        """Get operands from ``pool``, compile and tune this kernel, run the forward pass if the kernel is a backward
        pass, and return the launches.

        ``sets``: the number of operand sets over which launches rotate. ``rewrite``: whether mamf will call
        ``rewrite_output``. Raises UnsupportedError or the device's own errors.
        """


#: The type of a kernel of any operation.
AnyKernel = Kernel[Any, Any]


def explain_unsupported_launch(kernel: AnyKernel, backend: Backend, problem: Any, shape: Any) -> str | None:
    """Return why a kernel does not support a problem or a shape of this problem; None if it supports both."""
    return kernel.explain_unsupported_problem(backend, problem) or kernel.explain_unsupported_shape(problem, shape)


def choose_operand_set_count(problem: Problem, shape: object, cache_bytes: int | None) -> int:
    """Return how many operand sets are together twice as large as the cache, but at least 3 and at most 64.

    ``cache_bytes``: the size of the last-level cache in bytes. If this size is None (unknown), return 3.
    """
    return (
        3 if not cache_bytes else min(MAX_OPERAND_SETS, max(3, math.ceil(2 * cache_bytes / problem.count_bytes(shape))))
    )
