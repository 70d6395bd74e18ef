"""The contract of a copy kernel."""

from __future__ import annotations

from mamf.backend import Backend
from mamf.kernel import Kernel
from mamf.operations.copies.shapes import CopyProblem, CopyShape


class CopyKernel(Kernel[CopyProblem, CopyShape]):
    operation = "copies"

    def unsupported(self, backend: Backend, problem: CopyProblem) -> str | None:
        if problem.direction == "to_peer" and backend.device_count() < 2:
            return "this process sees no second device to copy to"
        return None
