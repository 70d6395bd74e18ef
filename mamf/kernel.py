"""The contract of a kernel: one implementation of an operation.

``prepare`` compiles, tunes and lays out operands; what it returns launches with no argument and no allocation, so a
timed launch holds the kernel and nothing else. What was timed is verified: see mamf.engine.regimes.checking.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.dtypes import DTYPES
from mamf.work import Work

DATA = ("normal", "uniform", "zeros", "integers")
# Sets beyond this bring nothing: operands this small are not what bounds a launch.
MOST_OPERAND_SETS = 64
ALIGNMENT = 256  # elements


class Buffer(NamedTuple):
    """A flat run of elements of one dtype. ``fill``: with the problem's data, which launches read."""

    elements: int
    dtype: str
    fill: bool = True

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype].itemsize


def aligned(elements: int) -> int:
    """``elements`` rounded up so that the next operand set starts where vendors' fastest loads may start."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


class Problem(Protocol):
    """Everything about an operation but its shape; immutable."""

    #: The operation's name.
    operation: ClassVar[str]

    @property
    def dtype(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    def work(self, shape: Any) -> Work:
        """What one launch does."""

    def buffers(self, shape: Any, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The device buffers that operands need."""

    def nbytes(self, shape: Any, sets: int = 1, rewrite: bool = False) -> int:
        """Bytes that a launch touches: what must exceed the cache."""


ProblemT = TypeVar("ProblemT", bound=Problem)
ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the reference: ||C - reference|| / ||reference|| over the sampled entries.

    ``reference``: what that was computed in. ``reason``: why a result is wrong although its error is small, in a line.
    ``details``: what else a reader should know, by name; numbers or words. What has no number, as of an output with NaN
    in it, is left out.
    """

    error: float
    tolerance: float
    details: Mapping[str, float | str] = field(default_factory=dict)
    reference: str = "float64"
    reason: str = ""

    def __post_init__(self) -> None:
        for name, value in self.details.items():
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"detail {name!r} is a {type(value).__name__}, neither a number nor a text")
        finite = {name: value for name, value in self.details.items() if isinstance(value, str) or math.isfinite(value)}
        object.__setattr__(self, "details", finite)

    @property
    def ok(self) -> bool:
        return not self.reason and math.isfinite(self.error) and self.error <= self.tolerance


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
    ``checksum``: queue one of the output of a set, given what its last launch returned; what it returns gives the
    number, once the device has run it. Equal outputs have equal ones. None: the kernel has none.
    ``class_seconds``: launch once more under a profiler; returns the seconds in which each class of work (attention,
    say) was running, each instant in one class, idle time left out. Called after the timing, so that what the profiler
    adds is in no share. None: a launch has no parts to tell apart.
    ``verify_whole``: the same as ``verify`` of every entry of the output; asked for after the first launch of each set
    and after the last timed one. None: ``verify`` is all that there is. ``change_operands``: queue what changes the
    operands of all sets at random, so that no earlier answer is right any more, and ``verify`` expects that;
    ``changed_operands`` undoes it. None: operands stay.
    """

    launches: Sequence[Callable[[], object]]
    verify: Callable[[int, object], Verdict]
    poison: Callable[[Sequence[object]], object] = lambda returned: None
    changed_operands: Callable[[], Sequence[str]] = tuple
    rewrite_output: Callable[[], object] | None = None
    held_bytes: int = 0
    checksum: Callable[[int, object], Callable[[], int]] | None = None
    class_seconds: Callable[[], Mapping[str, float]] | None = None
    verify_whole: Callable[[int, object], Verdict] | None = None
    change_operands: Callable[[], object] | None = None


class Kernel(ABC, Generic[ProblemT, ShapeT]):
    """One implementation of an operation. Stateless: operands live in the pool.

    ``product_dtypes``: what its products are computed in where that is not the operands' dtype (Sage: int8 and fp8), so
    that a share of that dtype's ceiling can be named too. ``is_exact``: an approximate kernel shows how far it is off,
    and skips work that is counted as if it were done.
    """

    name: str
    operation: ClassVar[str]
    #: Whether it may be chosen where none is named: what every model calls, not what someone found faster.
    is_default: ClassVar[bool] = False
    #: Whether a search for a ceiling tries it unasked; what compiles for minutes a shape does not.
    is_tried_unasked: ClassVar[bool] = True
    #: Whether its rows say what memory a launch needs.
    reports_memory: ClassVar[bool] = False
    #: Whether they also say what the process reserved for it: blocks at hand are given back before, so that launches
    #: of microseconds would wait for new ones.
    reports_reserved: ClassVar[bool] = False
    #: Whether a launch that outlasts a train of bursts is unsupported there, instead of being a train of its own.
    must_fit_a_train: ClassVar[bool] = False
    #: What stands in brackets after its name, such as ``an attention kernel``; its class takes that. Empty: nothing.
    takes: ClassVar[str] = ""
    #: Of operands that it takes, where it takes not all.
    dtypes: ClassVar[tuple[str, ...]] = ()
    product_dtypes: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        """Why this kernel cannot run on this backend at all (library missing, wrong vendor or card), or None.

        Importing the library may fail in any way: an installed one that does not load is a reason, not an error.
        """
        return None

    def _unsupported_dtype(self, problem: ProblemT) -> str | None:
        """Why it cannot do the dtype of this problem, or None."""
        if problem.dtype in self.dtypes:
            return None
        return f"kernel {self.name} has no dtype {problem.dtype}; it takes {', '.join(self.dtypes)}"

    @abstractmethod
    def unsupported(self, backend: Backend, problem: ProblemT) -> str | None:
        """Why it cannot do this problem (dtype, layout, direction), or None. Asked before anything is allocated."""

    def unsupported_shape(self, problem: ProblemT, shape: ShapeT) -> str | None:
        """Why it cannot do this shape, or None."""
        return None

    def variants(self, backend: Backend, problem: ProblemT, shape: ShapeT) -> Sequence[Kernel[ProblemT, ShapeT]]:
        """The algorithms to choose from for this shape, each a kernel of its own, where the library lets one choose."""
        return (self,)

    def settings(self, backend: Backend, problem: ProblemT) -> AbstractContextManager[object]:
        """Library flags to hold while this kernel runs (tf32, say); restores them."""
        return nullcontext()

    def refuses(self, error: Exception) -> bool:
        """Whether an error of a launch says that the library has nothing for this shape, and not that it broke."""
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
        """Operands from ``pool``, everything compiled and tuned, and for a backward pass the forward run.

        ``rewrite``: the classic regime overwrites the output before each launch. Raises UnsupportedError or the
        device's own errors.
        """


#: A kernel of any operation, where which one does not matter.
AnyKernel = Kernel[Any, Any]


def operand_sets(problem: Problem, shape: object, cache_bytes: int | None) -> int:
    """Sets to rotate so that together they exceed twice the last-level cache: at least 3, at most MOST_OPERAND_SETS."""
    if not cache_bytes:
        return 3
    return min(MOST_OPERAND_SETS, max(3, math.ceil(2 * cache_bytes / problem.nbytes(shape))))
