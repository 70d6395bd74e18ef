"""The operation ``matmul``, and the base class of operations that consist of matmuls."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from mamf.backend import Backend, DeviceInfo
from mamf.dtypes import DTYPES, canonical_name
from mamf.errors import UnknownNameError
from mamf.measurement import Measurement
from mamf.operation import FlopOperation, Parameter, Preset, random_sizes
from mamf.operations.matmul.shapes import (
    LAYOUT_OF,
    LAYOUTS,
    PADDINGS,
    PRESETS,
    MatmulKernel,
    MatmulProblem,
    MatmulShape,
    ProductProblemT,
    ProductShapeT,
)
from mamf.plans import BURST, CLASSIC, SUSTAINED

# A share of random products is deep: few outputs and a long K, which libraries divide among compute units. Two of three
# have a K of which cuBLAS 13.1.0 leaves out the last 8 terms on an H100 or H200. Other versions do so at other lengths:
# https://github.com/facebookexperimental/triton/pull/2767
_DEEP_SHARE, _KNOWN_DEPTHS, _DEPTHS = 0.25, (12680, 16648, 20488, 24584), range(8192, 65536 + 1, 8)
_DEEP_SIZES = (16, 32, 64, 128, 512)


class ProductOperation(FlopOperation[ProductProblemT, ProductShapeT]):
    """Base class of single, batched and grouped matmul."""

    gives_tensors = True
    reference = (
        "A (B x) for random x without a library of products, int8 in int32, float32 and float64 in float64, all others "
        "in float32; 256 entries by the host in float64"
    )

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> ProductProblemT:
        """Return the problem, as in Operation. The output dtype defaults to that of the operand dtype."""
        operand = backend.resolve_dtype(canonical_name(asked.get("dtype") or backend.default_dtype))
        output = asked.get("out_dtype") or DTYPES[operand].default_output
        if output not in DTYPES:
            output = backend.resolve_dtype(canonical_name(output))
        return super().problem_for(backend, {**asked, "dtype": operand, "out_dtype": output})

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return FLOP per byte, with the minimum bytes of a launch, and the quantization error of a scaled format."""
        error = row.details.get("quantization_error")
        return {"FLOP/byte": row.flop / row.work.nbytes, **({} if error is None else {"quantization error": error})}

    def words(self, problem: ProductProblemT) -> Sequence[str]:
        """Return the fields that differ from the defaults."""
        usual = {**asdict(self.problem_type(problem.dtype)), "out_dtype": DTYPES[problem.dtype].default_output}
        return [f"{name} {value}" for name, value in asdict(problem).items() if value != usual[name]]

    #: How many matmuls random problems may have, for shapes that begin with that number.
    random_counts: ClassVar[tuple[int, ...]] = ()

    def random_case(self, chooser: random.Random, terms: range) -> dict[str, Any]:
        layout, data = (
            chooser.choice(LAYOUTS) + chooser.choice(PADDINGS),
            chooser.choice(("normal", "uniform", "integers", "wide")),
        )
        counts = [chooser.choice(self.random_counts)] if self.random_counts else []
        sizes = [
            *chooser.choices(_DEEP_SIZES, k=2),
            chooser.choice(chooser.choice((_KNOWN_DEPTHS, _KNOWN_DEPTHS, _DEPTHS))),
        ]
        if chooser.random() > _DEEP_SHARE or math.prod(counts + sizes) not in terms:
            sizes = random_sizes(chooser, 3, terms, *counts)
        return {"layout": layout, "data": data, "shape": self.shape_type(*counts, *sizes)}

    def axis(self, shape: ProductShapeT) -> float:
        return float(shape.flop)


class Matmul(ProductOperation[MatmulProblem, MatmulShape]):
    name = "matmul"
    kernel_group = "mamf.kernels"
    kernel_type = MatmulKernel
    shape_type = MatmulShape
    problem_type = MatmulProblem
    shape_example = "4096x4096x4096"
    own_command = "sweep"
    chart = "shapes"
    compares_kernels = False
    is_compute_roof = True
    regimes = (BURST, SUSTAINED, CLASSIC)
    preset_parameter = Parameter("preset", str, "linear layers of known models; --m is the number of tokens")
    preset_parameters = (
        Parameter(
            "product",
            str,
            "pass through the preset's layers, which also sets the layout",
            "forward",
            tuple(LAYOUT_OF),
            is_rare=True,
        ),
    )

    def default_shapes(self, backend: Backend) -> Sequence[MatmulShape]:
        return (MatmulShape(4096, 4096, 4096),)

    def presets(self) -> Mapping[str, Preset[MatmulShape]]:
        """Linear layers of known models."""
        return {name: self.preset(name, {}) for name in PRESETS}

    def preset(self, name: str, values: Mapping[str, Sequence[Any]]) -> Preset[MatmulShape]:
        """Return the matmuls of the preset's layers. Values of ``m`` are token counts. Raises UnknownNameError."""
        if name not in PRESETS:
            raise UnknownNameError("preset of matmul (moe is one of --operation grouped)", name, PRESETS)
        (product,) = values.get("product", ("forward",))
        shapes = PRESETS[name].shapes(product, values.get("m"))
        return Preset(shapes, fields={"layout": (LAYOUT_OF[product],)}, taken=("m",))


def problem_for(
    backend: Backend,
    dtype: str | None = None,
    out_dtype: str | None = None,
    layout: str = "nt",
    data: str = "normal",
    seed: int = 0,
    fast_accumulation: bool = False,
) -> MatmulProblem:
    """Make a matmul problem with the defaults of an open backend. ``fp8`` is the 8-bit float that the device supports.

    ``layout``: how A and B are stored; ``nt`` is that of a linear layer. ``data``: normal, uniform, zeros or integers.
    Raises UnknownNameError for unknown names.

    >>> mamf.problem_for(mamf.open_backend(), "bfloat16", layout="nn").out_dtype
    'bfloat16'
    """
    asked = {"dtype": dtype, "out_dtype": out_dtype, "layout": layout, "data": data, "seed": seed}
    return Matmul().problem_for(backend, {**asked, "fast_accumulation": fast_accumulation})
