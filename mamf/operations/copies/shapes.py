"""Copies between memories: sizes, directions and byte counts. Pure.

Bytes are counted once, like in nvbandwidth and in the specifications of links, and not as reads plus writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from mamf.kernel import DATA, Buffer
from mamf.limits import LARGEST_SEED, require_known, whole_number
from mamf.operations.bandwidth.shapes import BandwidthShape
from mamf.work import Work

Direction = Literal["to_device", "to_host", "to_peer"]
DIRECTIONS: tuple[str, ...] = get_args(Direction)
_PATHS = {"to_device": "pinned host to device", "to_host": "device to pinned host", "to_peer": "device to next device"}


class CopyShape(BandwidthShape):
    """``nbytes``: the bytes to copy."""


@dataclass(frozen=True)
class CopyProblem:
    """``direction``: from the host's pinned memory, to it, or to the memory of the next device of this machine."""

    operation: ClassVar[str] = "copies"

    direction: str = "to_device"
    dtype: str = "int8"
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        require_known(
            ("direction", self.direction, DIRECTIONS),
            ("data", self.data, DATA),
            ("dtype of copies", self.dtype, ("int8",)),
        )
        whole_number("seed", self.seed, 0, LARGEST_SEED)

    def work(self, shape: CopyShape) -> Work:
        return Work(0.0, shape.nbytes, f"{_PATHS[self.direction]}, bytes counted once", "TB/s")

    def buffers(self, shape: CopyShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """The buffer on the device."""
        return {"own": Buffer(shape.nbytes, self.dtype)}

    def nbytes(self, shape: CopyShape, sets: int = 1, rewrite: bool = False) -> int:
        return 2 * shape.nbytes
