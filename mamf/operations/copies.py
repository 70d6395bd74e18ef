"""Define the operation ``copies``: its shapes, its problems and the base class of its kernels.

The operation copies data between host memory and a device, or from one device to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from mamf.backend import MIB, Backend
from mamf.kernel import Buffer, Kernel, Work
from mamf.operation import CheckedProblem, describe
from mamf.operations.bandwidth.operation import BandwidthShape, ByteSizedOperation, make_byte_size_metadata

_DESCRIPTION_BY_DIRECTION = {
    "to_device": "pinned host to device",
    "to_host": "device to pinned host",
    "to_peer": "device to next device",
}
COPY_DIRECTIONS = tuple(_DESCRIPTION_BY_DIRECTION)


@dataclass(frozen=True, order=True)
class CopyShape(BandwidthShape):
    """The size of a copy between memories. ``nbytes``: the number of bytes to copy."""

    nbytes: int = field(
        metadata=make_byte_size_metadata("number of bytes to copy, such as 256MiB", "1MiB 16MiB 256MiB")
    )


@dataclass(frozen=True)
class CopyProblem(CheckedProblem):
    """All parameters of a copy except its size.

    ``direction``: ``to_device`` (from pinned host memory to the device), ``to_host`` (from the device to pinned host
    memory) or ``to_peer`` (from the device to the next device of this machine).
    """

    operation: ClassVar[str] = "copies"

    direction: str = field(
        default="to_device",
        metadata=describe(
            "direction of the copy: from host to device, from device to host, or to the next device (to_peer)",
            choices=COPY_DIRECTIONS,
        ),
    )
    dtype: str = field(
        default="int8",
        metadata=describe("dtype of the copied values: always int8, because copies count bytes", choices=("int8",)),
    )
    data: str = "normal"
    seed: int = 0

    def compute_work(self, shape: CopyShape) -> Work:
        return Work(0.0, shape.nbytes, f"{_DESCRIPTION_BY_DIRECTION[self.direction]}, bytes counted once", "TB/s")

    def list_buffers(self, shape: CopyShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return only the buffer on the device. The kernel itself allocates the buffer at the other end of the copy."""
        return {"own": Buffer(shape.nbytes, self.dtype)}

    def count_bytes(self, shape: CopyShape, sets: int = 1, rewrite: bool = False) -> int:
        return 2 * shape.nbytes


class CopyKernel(Kernel[CopyProblem, CopyShape]):
    operation = "copies"

    def explain_unsupported_problem(self, backend: Backend, problem: CopyProblem) -> str | None:
        is_possible = problem.direction != "to_peer" or backend.count_devices() > 1
        return None if is_possible else "direction to_peer needs a second device, and this process sees only one"


class CopyOperation(ByteSizedOperation[CopyProblem, CopyShape]):
    name = "copies"
    kernel_group = "mamf.copy_kernels"
    kernel_type = CopyKernel
    shape_type = CopyShape
    problem_type = CopyProblem
    shape_example = "256MiB"
    default_dtype = CopyProblem.dtype
    uses_shared_links = True

    def choose_default_shapes(self, backend: Backend) -> Sequence[CopyShape]:
        return [CopyShape(size * MIB) for size in (1, 16, 256)]
