"""The contract of an attention kernel: one implementation of softmax(Q K^T / sqrt(d)) V, forward and backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

from mamf.backend import Backend, OperandPool, Unavailable
from mamf.kernel import Prepared
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape


class AttentionKernel(ABC):
    """One implementation. Stateless: operands live in the pool.

    ``dtypes`` it takes, ``directions`` it has, ``product_dtypes``: what its two products are computed in where that is
    not the operands' dtype (Sage: int8 and fp8), so that a share of that dtype's ceiling can be named too.
    ``is_exact``: an approximate kernel shows how far it is off and has a tolerance of its own.
    """

    name: str
    operation: ClassVar[Literal["attention"]] = "attention"
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    directions: ClassVar[tuple[str, ...]] = ("fwd", "bwd", "fwd+bwd")
    product_dtypes: ClassVar[tuple[str, ...]] = ()
    is_exact: ClassVar[bool] = True

    @abstractmethod
    def unavailable(self, backend: Backend) -> Unavailable | None:
        """Why this kernel cannot run on this backend at all (library missing, wrong vendor or card), or None.

        Importing the library may fail in any way: an installed one that does not load is a reason, not an error.
        """

    def unsupported(self, backend: Backend, problem: AttentionProblem) -> str | None:
        """Why it cannot do this dtype or direction, or None."""
        if problem.dtype not in self.dtypes:
            return f"{self.name} has no dtype {problem.dtype}; it takes {', '.join(self.dtypes)}"
        if problem.direction not in self.directions:
            return f"{self.name} has no {problem.direction}; it has {', '.join(self.directions)}"
        return None

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        """Why it cannot do this shape, or None. Asked before anything is allocated."""
        return None

    def settings(self, backend: Backend, problem: AttentionProblem) -> AbstractContextManager[object]:
        """Library flags to hold while this kernel runs; restores them."""
        return nullcontext()

    def refuses(self, error: Exception) -> bool:
        """Whether an error of a launch says that the library has nothing for this shape, and not that it broke."""
        return False

    @abstractmethod
    def prepare(
        self,
        backend: Backend,
        problem: AttentionProblem,
        shape: AttentionShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> Prepared:
        """Operands from ``pool``, everything compiled and tuned, and for a backward pass the forward run.

        ``rewrite`` is the classic regime's and has no meaning here. Raises UnsupportedError or the device's own errors.
        """
