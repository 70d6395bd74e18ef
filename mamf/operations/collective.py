"""Define the operation ``collective``: shapes, problems and the base kernel of collectives such as all-reduce."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.kernel import Buffer, Kernel, Work
from mamf.measurement import TERA, Measurement
from mamf.operation import CheckedProblem, describe
from mamf.operations.bandwidth.operation import BandwidthShape, ByteSizedOperation, make_byte_size_metadata

COLLECTIVE_NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, order=True)
class CollectiveShape(BandwidthShape):
    """The size of a collective. ``nbytes``: the bytes of a rank's send or receive buffer, whichever is larger."""

    nbytes: int = field(
        metadata=make_byte_size_metadata(
            "bytes of the larger of a rank's send and receive buffers, such as 128MiB",
            "1MiB to 4GiB if they fit in memory; on a CPU 1MiB 16MiB",
        )
    )


@dataclass(frozen=True)
class CollectiveProblem(CheckedProblem):
    """All parameters of a collective except its size.

    ``ranks``: the number of ranks. ``blocks``: the number of thread blocks that communicate on each rank's device (NCCL
    calls them CTAs or channels); 0 lets the library choose the number.
    """

    operation: ClassVar[str] = "collective"

    collective: str = field(default="all_reduce", metadata=describe("collective to run", choices=COLLECTIVE_NAMES))
    ranks: int = field(
        default=2,
        metadata=describe(
            "number of ranks (processes, one per device)",
            default="the number that the launcher started, or else 2",
            minimum=2,
        ),
    )
    dtype: str = "bfloat16"
    data: str = "normal"
    seed: int = 0
    blocks: int = field(
        default=0,
        # The maximum, 1024, is larger than the number of blocks that any device can run at once.
        metadata=describe(
            "number of thread blocks that communicate on each device; 0: the library chooses the number",
            minimum=0,
            maximum=1024,
        ),
    )

    def count_buffer_elements(self, shape: CollectiveShape) -> tuple[int, int]:
        """Return the number of elements in a rank's send buffer and the number in its receive buffer. Both are rounded
        down so that each rank's part has the same size.
        """
        part = shape.nbytes // DTYPES[self.dtype].itemsize // self.ranks
        total = part * self.ranks
        return {"all_gather": (part, total), "reduce_scatter": (total, part)}.get(self.collective, (total, total))

    def count_part_elements(self, shape: CollectiveShape) -> int:
        """Return the number of elements in each part of a rank's buffers.

        A buffer has one part per rank if it contains data from every rank or data for every rank. Every other buffer is
        a single part.
        """
        return min(self.count_buffer_elements(shape)) // (self.ranks if self.collective == "all_to_all" else 1)

    def compute_work(self, shape: CollectiveShape) -> Work:
        passes = 2 if self.collective == "all_reduce" else 1
        factor = "2(n-1)/n for all_reduce" if passes == 2 else "(n-1)/n for other collectives"
        convention = f"bus bandwidth as nccl-tests defines it: size / time x {factor}, n = {self.ranks}"
        size = max(self.count_buffer_elements(shape)) * DTYPES[self.dtype].itemsize
        return Work(0.0, passes * (self.ranks - 1) * size // self.ranks, convention, "TB/s")

    def list_buffers(self, shape: CollectiveShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        """Return the send and receive buffers of a rank. ``sets`` is ignored, because all launches use the same
        buffers.

        Several sets would not change the time, because the links between the devices limit it, not the memory.
        """
        sent_elements, received_elements = self.count_buffer_elements(shape)
        return {
            "sent": Buffer(sent_elements, self.dtype),
            "received": Buffer(received_elements, self.dtype, fill=False),
        }

    def count_bytes(self, shape: CollectiveShape, sets: int = 1, rewrite: bool = False) -> int:
        return sum(buffer.nbytes for buffer in self.list_buffers(shape).values())


class CollectiveKernel(Kernel[CollectiveProblem, CollectiveShape]):
    """A kernel that runs the collectives of a communication library. ``dtypes``: the dtypes that the kernel supports.

    All ranks prepare, launch and verify in the same order. If one rank has an error, all ranks report an error, so that
    they stop together.
    """

    operation = "collective"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")

    def explain_unsupported_problem(self, backend: Backend, problem: CollectiveProblem) -> str | None:
        return self._explain_unsupported_dtype(problem) or backend.explain_unsupported_dtype(problem.dtype)

    def explain_unsupported_shape(self, problem: CollectiveProblem, shape: CollectiveShape) -> str | None:
        if problem.count_part_elements(shape):
            return None
        return (
            f"{shape.nbytes} bytes cannot be split into {problem.ranks} equal parts of {problem.dtype}: "
            "use a larger --size"
        )


_DEFAULT_SHAPES = tuple(CollectiveShape(size * MIB) for size in (1, 16, 128, 1024, 4096))
# The share of the free memory that the larger buffer of a rank may take by default. The rest is for the smaller buffer
# and for the other data of the process.
_MAX_BUFFER_MEMORY_SHARE = 0.25


class CollectiveOperation(ByteSizedOperation[CollectiveProblem, CollectiveShape]):
    name = "collective"
    kernel_group = "mamf.collective_kernels"
    kernel_type = CollectiveKernel
    shape_type = CollectiveShape
    problem_type = CollectiveProblem
    shape_example = "1MiB"
    uses_shared_links = True

    def choose_default_shapes(self, backend: Backend) -> Sequence[CollectiveShape]:
        """Return sizes from 1 MiB up to 4 GiB, or less if memory is small; on a CPU, 1 and 16 MiB."""
        if not backend.is_accelerator:
            return _DEFAULT_SHAPES[:2]
        free = backend.read_free_memory_bytes()
        max_bytes = None if free is None else free * _MAX_BUFFER_MEMORY_SHARE
        return [
            size
            for size in _DEFAULT_SHAPES
            if max_bytes is None or size == _DEFAULT_SHAPES[0] or size.nbytes <= max_bytes
        ]

    def make_problem(self, backend: Backend, requested_fields: Mapping[str, Any]) -> CollectiveProblem:
        """Make a problem. ``ranks`` defaults to the number of processes that the launcher started, but at least 2."""
        ranks = requested_fields.get("ranks") or max(2, int(os.environ.get("WORLD_SIZE") or 0))
        return super().make_problem(backend, {**requested_fields, "ranks": ranks})

    def make_problem_record(self, problem: CollectiveProblem) -> dict[str, Any]:
        """Return the record of a problem for a log. Omit ``blocks`` if the library chooses the number of blocks."""
        return {name: each for name, each in super().make_problem_record(problem).items() if each or name != "blocks"}

    def make_columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return a column with the algorithm bandwidth, which is the size in bytes divided by the time, in TB/s."""
        return {"size / time": row.shape.nbytes / row.seconds / TERA if row.ok else None}
