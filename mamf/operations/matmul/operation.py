"""Matrix products as an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES
from mamf.machine.peaks import fastest_possible_flops, find_peak
from mamf.operation import Operation
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.operations.matmul.shapes import MatmulShape


class Matmul(Operation[MatmulProblem, MatmulShape]):
    name = "matmul"
    kernel_group = "mamf.kernels"
    kernel_type = MatmulKernel
    shape_type = MatmulShape
    problem_type = MatmulProblem
    shape_example = "4096x4096x4096"

    def default_shapes(self, backend: Backend) -> Sequence[MatmulShape]:
        return (MatmulShape(4096, 4096, 4096),)

    def fastest_possible(
        self, info: DeviceInfo, problem: MatmulProblem, shape: MatmulShape | None = None
    ) -> float | None:
        return fastest_possible_flops(info, problem.dtype)

    def peak(self, info: DeviceInfo, problem: MatmulProblem) -> float | None:
        found = find_peak(info.name, problem.dtype, info.compute_units)
        return None if found is None else found.flops

    def words(self, problem: MatmulProblem) -> Sequence[str]:
        """What is not the default of its dtype."""
        usual = MatmulProblem(problem.dtype, DTYPES[problem.dtype].default_output)
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != getattr(usual, name)]

    def axis(self, shape: MatmulShape) -> float:
        return float(shape.flop)
