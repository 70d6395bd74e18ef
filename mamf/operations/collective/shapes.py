"""Collectives: sizes and exact byte counts. Pure.

The conventions are those of nccl-tests (its doc/PERFORMANCE.md): the size S is that of a rank's larger buffer (send or
receive); algorithm bandwidth is S / time; bus bandwidth is that times a factor, so it is comparable with the speed of
the links for any number of ranks n:

- ``all_reduce``: each rank sends and receives S; the factor is 2(n-1)/n.
- ``all_gather``: receives S, sends S/n; ``reduce_scatter``: sends S, receives S/n; ``all_to_all``: sends and receives
  S. The factor of all three is (n-1)/n.

The rate is the bus bandwidth. Sizes are written in powers of two (MiB), rates are in powers of ten (TB/s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from mamf.dtypes import DTYPES
from mamf.kernel import DATA, Buffer
from mamf.limits import LARGEST_SEED, require_known, whole_number
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.work import Work

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)


class CollectiveShape(BandwidthShape):
    """``nbytes``: the size of a rank's larger buffer (send or receive)."""


@dataclass(frozen=True)
class CollectiveProblem:
    """All parameters of a collective except its size; ``ranks``: the number of ranks."""

    operation: ClassVar[str] = "collective"

    collective: str = "all_reduce"
    ranks: int = 2
    dtype: str = "bfloat16"
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        require_known(
            ("collective", self.collective, COLLECTIVES),
            ("dtype", self.dtype, DTYPES),
            ("data", self.data, DATA),
        )
        whole_number("ranks", self.ranks, 2)
        whole_number("seed", self.seed, 0, LARGEST_SEED)

    @property
    def out_dtype(self) -> str:
        return self.dtype

    def elements(self, shape: CollectiveShape) -> tuple[int, int]:
        """The elements that a rank sends and receives, rounded to equal parts for all ranks."""
        part = shape.nbytes // DTYPES[self.dtype].itemsize // self.ranks
        most = part * self.ranks
        return {"all_gather": (part, most), "reduce_scatter": (most, part)}.get(self.collective, (most, most))

    def part(self, shape: CollectiveShape) -> int:
        """Elements per part: a buffer has a single part, or one part per rank."""
        return min(self.elements(shape)) // (self.ranks if self.collective == "all_to_all" else 1)

    def unsupported_shape(self, shape: CollectiveShape) -> str | None:
        """Why this size is invalid, or None."""
        has_parts = self.part(shape) > 0
        return None if has_parts else f"{shape.nbytes} bytes do not make {self.ranks} equal parts of {self.dtype}"

    def work(self, shape: CollectiveShape) -> Work:
        passes = 2 if self.collective == "all_reduce" else 1
        factor = f"{2 if passes == 2 else ''}(n-1)/n"
        convention = f"bus bandwidth as nccl-tests has it: size / time x {factor}, n = {self.ranks}"
        size = max(self.elements(shape)) * DTYPES[self.dtype].itemsize
        return Work(0.0, passes * (self.ranks - 1) * size // self.ranks, convention, "TB/s")

    def buffers(self, shape: CollectiveShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The send and receive buffers of a rank. One set is enough, because sent data is read from memory anyway."""
        sent, received = self.elements(shape)
        return {"sent": Buffer(sent, self.dtype), "received": Buffer(received, self.dtype, fill=False)}

    def nbytes(self, shape: CollectiveShape, sets: int = 1, rewrite: bool = False) -> int:
        return sum(buffer.nbytes for buffer in self.buffers(shape).values())
