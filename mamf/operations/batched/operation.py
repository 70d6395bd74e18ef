"""The operation ``batched``: batches of products."""

from __future__ import annotations

from collections.abc import Sequence

from mamf.backend import Backend
from mamf.operations.batched.kernel import BatchedKernel
from mamf.operations.batched.shapes import BatchedProblem, BatchedShape
from mamf.operations.matmul.operation import ProductOperation


class Batched(ProductOperation[BatchedProblem, BatchedShape]):
    name = "batched"
    kernel_group = "mamf.batched_kernels"
    kernel_type = BatchedKernel
    shape_type = BatchedShape
    problem_type = BatchedProblem
    shape_example = "64x1024x1024x128"
    axis_label = "FLOP"

    def default_shapes(self, backend: Backend) -> Sequence[BatchedShape]:
        """The scores of attention heads, short and long, and square products."""
        return [
            BatchedShape(64, 1024, 1024, 128),
            BatchedShape(16, 4096, 4096, 128),
            BatchedShape(32, 2048, 2048, 2048),
        ]
