"""The contract of a batched kernel: one implementation of C[i] = A[i] @ B[i]."""

from __future__ import annotations

from mamf.kernel import Kernel
from mamf.operations.batched.shapes import BatchedProblem, BatchedShape


class BatchedKernel(Kernel[BatchedProblem, BatchedShape]):
    """One implementation of batched products."""

    operation = "batched"
