"""Grouped products: shapes, the distribution of tokens over experts, and exact FLOP and byte counts. Pure.

A mixture of experts multiplies the tokens of each expert, sorted by expert, with the weights of that expert alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from mamf.limits import Sizes, require_known
from mamf.operations.matmul.kernel import ProductProblem
from mamf.work import Work

Routing = Literal["balanced", "skewed"]
ROUTINGS: tuple[str, ...] = get_args(Routing)


@dataclass(frozen=True, order=True)
class GroupedShape(Sizes):
    """C[T,N]: the rows of A[T,K] assigned to expert e times its weights B[e,K,N]. Written ``e8t16384n14336k4096``.

    ``tokens``: rows of all experts together; a token that goes to two experts counts twice.
    """

    pattern: ClassVar[re.Pattern[str]] = re.compile(r"e(\d+)t(\d+)n(\d+)k(\d+)", re.ASCII)
    written: ClassVar[str] = "the shape of groups; write eEtTnNkK, for example e8t16384n14336k4096"

    experts: int
    tokens: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"e{self.experts}t{self.tokens}n{self.n}k{self.k}"

    @property
    def flop(self) -> int:
        """2*T*N*K for any distribution of tokens."""
        return 2 * self.tokens * self.n * self.k

    @property
    def elements(self) -> dict[str, int]:
        """Elements of ``a`` (tokens), ``b`` (weights of all experts) and ``c``."""
        return {"a": self.tokens * self.k, "b": self.experts * self.k * self.n, "c": self.tokens * self.n}

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows (of K elements) of ``a`` and ``b``."""
        return {"a": self.tokens, "b": self.experts * self.n}


@dataclass(frozen=True)
class GroupedProblem(ProductProblem):
    """All parameters of grouped products except their shape; most fields are those of all products.

    ``routing``: ``balanced`` (the same number of tokens for each expert, as nearly as possible) or ``skewed`` (Zipf's
    law: the expert of rank r gets a share proportional to 1/r; the seed decides the ranks).
    """

    operation: ClassVar[str] = "grouped"
    convention: ClassVar[str] = "2*T*N*K; tokens and weights of experts that have any read, C written, once each"

    routing: Routing = "balanced"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(("routing", self.routing, ROUTINGS))

    def tokens_of_experts(self, shape: GroupedShape) -> tuple[int, ...]:
        """The number of tokens of each expert, ``shape.tokens`` in total."""
        ranks = list(range(shape.experts))
        if self.routing == "balanced":
            return apportion(shape.tokens, [1.0] * shape.experts)
        random.Random(self.seed).shuffle(ranks)
        return apportion(shape.tokens, [1 / (1 + rank) for rank in ranks])

    def work(self, shape: GroupedShape) -> Work:  # type: ignore[override]
        """FLOP and bytes of one launch; weights of experts without tokens are not read."""
        busy = sum(tokens > 0 for tokens in self.tokens_of_experts(shape))
        idle = super().operand_bytes(shape, "b") // shape.experts * (shape.experts - busy)
        usual = super().work(shape)
        return replace(usual, nbytes=usual.nbytes - idle)


def apportion(total: int, weights: list[float]) -> tuple[int, ...]:
    """Integer parts of ``total`` proportional to ``weights``, by the largest remainder method."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(each) for each in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)
