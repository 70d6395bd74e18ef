"""Matrix products as an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonical_name
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

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> MatmulProblem:
        """With the dtype of the output that goes with the operands', where none is asked for."""
        operand = backend.resolve_dtype(canonical_name(asked.get("dtype") or backend.default_dtype))
        output = asked.get("out_dtype") or DTYPES[operand].default_output
        if output not in DTYPES:
            output = backend.resolve_dtype(canonical_name(output))
        return MatmulProblem(**{**asked, "dtype": operand, "out_dtype": output})

    def words(self, problem: MatmulProblem) -> Sequence[str]:
        """What is not as it is where nothing is asked for."""
        usual = asdict(MatmulProblem(problem.dtype, DTYPES[problem.dtype].default_output))
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != usual[name]]

    def fastest_possible(
        self, info: DeviceInfo, problem: MatmulProblem, shape: MatmulShape | None = None
    ) -> float | None:
        return fastest_possible_flops(info, problem.dtype)

    def peak(self, info: DeviceInfo, problem: MatmulProblem) -> float | None:
        found = find_peak(info.name, problem.dtype, info.compute_units)
        return None if found is None else found.flops

    def axis(self, shape: MatmulShape) -> float:
        return float(shape.flop)
