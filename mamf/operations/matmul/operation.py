"""Matrix products as an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonical_name
from mamf.measurement import Measurement
from mamf.operation import FlopOperation
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem, ProductProblemT, ProductShapeT
from mamf.operations.matmul.shapes import MatmulShape


class ProductOperation(FlopOperation[ProductProblemT, ProductShapeT]):
    """What matrix products have in common: of one, of a batch and of groups."""

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> ProductProblemT:
        """With the dtype of the output that goes with the operands', where none is asked for."""
        operand = backend.resolve_dtype(canonical_name(asked.get("dtype") or backend.default_dtype))
        output = asked.get("out_dtype") or DTYPES[operand].default_output
        if output not in DTYPES:
            output = backend.resolve_dtype(canonical_name(output))
        return super().problem_for(backend, {**asked, "dtype": operand, "out_dtype": output})

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """FLOP a byte that a launch moves at least; how far a scaled format is from what it was quantized from."""
        error = row.details.get("quantization_error")
        return {"FLOP/byte": row.flop / row.work.nbytes, **({} if error is None else {"quantization error": error})}

    def words(self, problem: ProductProblemT) -> Sequence[str]:
        """What is not as it is where nothing is asked for."""
        usual = {**asdict(self.problem_type(problem.dtype)), "out_dtype": DTYPES[problem.dtype].default_output}
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != usual[name]]

    def axis(self, shape: ProductShapeT) -> float:
        return float(shape.flop)


class Matmul(ProductOperation[MatmulProblem, MatmulShape]):
    name = "matmul"
    kernel_group = "mamf.kernels"
    kernel_type = MatmulKernel
    shape_type = MatmulShape
    problem_type = MatmulProblem
    shape_example = "4096x4096x4096"

    def default_shapes(self, backend: Backend) -> Sequence[MatmulShape]:
        return (MatmulShape(4096, 4096, 4096),)


def problem_for(
    backend: Backend,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    """A product's problem with the defaults of an open backend filled in; ``fp8`` is the kind that the device has.

    ``layout``: how A and B lie in memory, ``nt`` as a linear layer has them. ``data``: normal, uniform, zeros or
    integers. Raises UnknownNameError for names that mean nothing.

    >>> mamf.problem_for(mamf.open_backend(), "bfloat16", layout="nn").out_dtype
    'bfloat16'
    """
    asked = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "data": data, "seed": seed}
    return Matmul().problem_for(backend, {**asked, "fast_accumulation": fast_accumulation})
