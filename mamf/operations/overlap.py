"""Define the operation ``overlap``: a matmul and other work at the same time on one device.

The other work is a collective of the ranks, a copy between memories, or a pass over arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mamf.backend import MIB, Backend, DeviceInfo, OperandPool, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import BaseShape, UnsupportedError, UsageError
from mamf.kernel import AnyKernel, Buffer, Kernel, PreparedKernel, Work
from mamf.operation import CheckedProblem, describe
from mamf.operations.bandwidth.operation import ACCESS_PATTERNS, BandwidthProblem, BandwidthShape, ByteSizedOperation
from mamf.operations.collective import COLLECTIVE_NAMES, CollectiveKernel, CollectiveProblem, CollectiveShape
from mamf.operations.copies import COPY_DIRECTIONS, CopyProblem, CopyShape
from mamf.operations.matmul.operation import choose_matmul_kernel
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.plugins.discovery import choose_kernels, make_operation

#: Names of the work that can run at the same time as matmul: collectives, copies, and passes over arrays.
OTHER_WORK_NAMES = (*COLLECTIVE_NAMES, *COPY_DIRECTIONS, *ACCESS_PATTERNS)
#: The two values of ``OverlapProblem.timed``. With the first value, a measurement reports the rate of the matmul. With
#: the second value, it reports the rate of the other work.
COUNTED_WORK_NAMES = MATMUL_WORK, OTHER_WORK = ("products", "other")


@dataclass(frozen=True, order=True)
class OverlapShape(BaseShape):
    """The sizes of a matmul and of the work that runs at the same time. A shape is written ``MxNxK+SIZE``."""

    m: int = field(metadata=describe("rows of A and C"))
    n: int = field(metadata=describe("columns of B and C"))
    k: int = field(metadata=describe("size of the reduction: columns of A and rows of B"))
    nbytes: int = field(
        metadata=describe("bytes of the other work: of the larger buffer of a collective, of a copy, or of each array")
    )

    def __str__(self) -> str:
        return f"{self.matmul_text}+{BandwidthShape(self.nbytes)}"

    @property
    def matmul_text(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str) -> OverlapShape:
        """Return the shape that a text such as ``8192x8192x8192+1GiB`` describes. Raises UsageError for other texts."""
        matmul_text, plus, size = text.partition("+")
        if not plus:
            raise UsageError(
                f"{text!r} is not a matmul shape plus a buffer size: write MxNxK+SIZE, for example 8192x8192x8192+1GiB"
            )
        shape = MatmulShape.parse(matmul_text)
        return cls(shape.m, shape.n, shape.k, BandwidthShape.parse(size).nbytes)


#: The smallest shape, for checks whose result does not depend on the shape.
MIN_OVERLAP_SHAPE = OverlapShape(1, 1, 1, 1)


@dataclass(frozen=True)
class OverlapProblem(CheckedProblem):
    """All parameters of a matmul and the other work, except their shape.

    - ``other``: the work that runs at the same time as matmul, one of OTHER_WORK_NAMES.
    - ``timed``: the work whose rate a measurement reports, one of COUNTED_WORK_NAMES.
    - ``alone``: whether the timed work runs without the other work, for comparison.
    - ``ranks``: the number of ranks of a collective; 1 for other work. ``blocks``: the number of thread blocks that
      communicate in a collective; 0 for other work.
    """

    operation: ClassVar[str] = "overlap"

    other: str = field(
        default="to_host", metadata=describe("work that runs at the same time as matmul", choices=OTHER_WORK_NAMES)
    )
    timed: str = field(
        default=MATMUL_WORK,
        metadata=describe(
            "work whose rate is reported: the matmul (products) or the other work (other)", choices=COUNTED_WORK_NAMES
        ),
    )
    alone: bool = field(default=True, metadata=describe("measure the timed work while the other work does not run"))
    ranks: int = field(
        default=1,
        metadata=describe("number of ranks of a collective", default="the number that the launcher started, or else 2"),
    )
    blocks: int = field(
        default=0,
        metadata=describe(
            "number of thread blocks that communicate on each device in a collective; 0: the library chooses the "
            "number",
            minimum=0,
        ),
    )
    dtype: str = "bfloat16"
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_collective:
            CollectiveProblem(self.other, self.ranks, blocks=self.blocks)  # Raise UsageError for wrong values.
        else:
            self.__dict__.update(ranks=1, blocks=0)

    @property
    def is_collective(self) -> bool:
        return self.other in COLLECTIVE_NAMES

    def get_timed_problem_and_shape(self, shape: OverlapShape) -> tuple[Any, Any]:
        """Return the problem and the shape of the work whose rate a measurement reports.

        Their types depend on the work. For a matmul, they are MatmulProblem and MatmulShape.
        """
        shared_fields: dict[str, Any] = {"data": self.data, "seed": self.seed}
        if self.timed == MATMUL_WORK:
            shared_fields |= {"dtype": self.dtype, "out_dtype": DTYPES[self.dtype].default_output_dtype}
            return MatmulProblem(**shared_fields), MatmulShape(shape.m, shape.n, shape.k)
        if self.is_collective:
            shared_fields["dtype"] = self.dtype if self.dtype in CollectiveKernel.dtypes else "bfloat16"
            return CollectiveProblem(self.other, self.ranks, blocks=self.blocks, **shared_fields), CollectiveShape(
                shape.nbytes
            )
        if self.other in COPY_DIRECTIONS:
            return CopyProblem(self.other, **shared_fields), CopyShape(shape.nbytes)
        return BandwidthProblem(self.other, **shared_fields), BandwidthShape(shape.nbytes)

    def compute_work(self, shape: OverlapShape) -> Work:
        problem, timed_shape = self.get_timed_problem_and_shape(shape)
        timed_work: Work = problem.compute_work(timed_shape)
        return replace(timed_work, counting_convention=f"{self.work_names[0]}: {timed_work.counting_convention}")

    @property
    def work_names(self) -> tuple[str, str]:
        """The names of the timed work and of the work that runs at the same time, in this order."""
        return (self.other, "matmul") if self.timed == OTHER_WORK else ("matmul", self.other)

    def list_buffers(self, shape: OverlapShape, sets: int = 1, rewrite: bool = False) -> dict[str, Buffer]:
        problem, timed_shape = self.get_timed_problem_and_shape(shape)
        return dict(problem.list_buffers(timed_shape, sets, rewrite))

    def count_bytes(self, shape: OverlapShape, sets: int = 1, rewrite: bool = False) -> int:
        problem, timed_shape = self.get_timed_problem_and_shape(shape)
        return int(problem.count_bytes(timed_shape, sets, rewrite))


class WorkPairKernel(Kernel[OverlapProblem, OverlapShape]):
    """A kernel that represents a matmul and other work. mamf chooses a kernel for each of the two.

    A launch runs only the work whose rate a measurement reports. 'mamf overlap' runs the other work at the same time.
    """

    operation = "overlap"
    name = "pair"

    def explain_unavailability(self, backend: Backend) -> Unavailability | None:
        if backend.get_second_queue() is not None:
            return None
        return Unavailability(
            f"mamf cannot use a second queue on backend {backend.name}",
            "measure the matmul and the other work separately",
        )

    def get_timed_kernel(self, backend: Backend, problem: OverlapProblem) -> AnyKernel:
        """Return the kernel of the work that the measurement times: the matmul or the other work.

        Raises UnavailableError if no kernel can run on this backend.
        """
        timed_problem, _ = problem.get_timed_problem_and_shape(MIN_OVERLAP_SHAPE)
        if problem.timed != OTHER_WORK:
            return choose_matmul_kernel(backend, timed_problem)
        available = choose_kernels(make_operation(timed_problem.operation), backend)
        return next((each for _, each in available if each.is_default), available[0][1])

    def explain_unsupported_problem(self, backend: Backend, problem: OverlapProblem) -> str | None:
        if not problem.alone:
            return (
                "only 'mamf overlap' can run the matmul and the other work at the same time: use 'mamf overlap', or "
                "add --alone yes"
            )
        return self.get_timed_kernel(backend, problem).explain_unsupported_problem(
            backend, problem.get_timed_problem_and_shape(MIN_OVERLAP_SHAPE)[0]
        )

    def apply_settings(self, backend: Backend, problem: OverlapProblem) -> AbstractContextManager[object]:
        return self.get_timed_kernel(backend, problem).apply_settings(
            backend, problem.get_timed_problem_and_shape(MIN_OVERLAP_SHAPE)[0]
        )

    def prepare(
        self,
        backend: Backend,
        problem: OverlapProblem,
        shape: OverlapShape,
        pool: OperandPool,
        sets: int = 1,
        rewrite: bool = False,
    ) -> PreparedKernel:
        kernel, counted_problem_and_shape = (
            self.get_timed_kernel(backend, problem),
            problem.get_timed_problem_and_shape(shape),
        )
        if reason := kernel.explain_unsupported_shape(*counted_problem_and_shape):
            raise UnsupportedError(reason)
        return kernel.prepare(backend, *counted_problem_and_shape, pool, sets, rewrite)


class OverlapOperation(ByteSizedOperation[OverlapProblem, OverlapShape]):
    name = "overlap"
    kernel_group = "mamf.overlap_kernels"
    kernel_type = WorkPairKernel
    shape_type = OverlapShape
    problem_type = OverlapProblem
    shape_example = "4096x4096x4096+64MiB"
    uses_shared_links = True

    def choose_default_shapes(self, backend: Backend) -> Sequence[OverlapShape]:
        if not backend.is_accelerator:
            # Shorter launches are slow if they run alone on a CPU, because its threads sleep between them.
            return (OverlapShape(512, 512, 512, 16 * MIB),)
        # Matmuls as in training (8192 rows) and in decoding (16 rows), each with 64 MiB and with 1 GiB of other work.
        return [OverlapShape(m, 8192, 8192, size * MIB) for m in (8192, 16) for size in (64, 1024)]

    def make_problem(self, backend: Backend, requested_fields: Mapping[str, Any]) -> OverlapProblem:
        return super().make_problem(
            backend, {"ranks": max(2, int(os.environ.get("WORLD_SIZE") or 0)), **requested_fields}
        )

    def find_max_possible_rate(
        self, info: DeviceInfo, problem: OverlapProblem, shape: OverlapShape | None = None
    ) -> float | None:
        timed_problem, timed_shape = problem.get_timed_problem_and_shape(shape or MIN_OVERLAP_SHAPE)
        return make_operation(timed_problem.operation).find_max_possible_rate(
            info, timed_problem, timed_shape if shape else None
        )

    def describe_problem(self, problem: OverlapProblem) -> Sequence[str]:
        timed_work, other_work = problem.work_names
        condition = (
            f"while {other_work} runs"
            if not problem.alone
            else f"alone (baseline for overlap with {other_work})"
            if problem.timed == MATMUL_WORK
            else "alone"
        )
        ranks = [f"{problem.ranks} ranks"] if problem.is_collective else []
        return [f"{timed_work} {condition}", *ranks, *([f"{problem.blocks} blocks"] if problem.blocks else [])]
