"""The operand dtypes of a matmul by name, and what follows from each. Pure: torch's own dtypes appear in kernels only.

``float32`` and ``tf32`` are two dtypes here although torch stores both as float32: the ceiling of one
is many times the ceiling of the other. ``fp8`` names the four-bit-exponent format that the device understands,
so a backend resolves it (``Backend.resolve_dtype``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.errors import UnknownNameError


@dataclass(frozen=True)
class DType:
    """One operand dtype.

    ``tolerance`` bounds ||C - reference|| / ||reference|| over the sampled entries. It is a few times the rounding of
    the output dtype plus that of the accumulation, so a single wrong entry among the 256 sampled (a relative error of
    1/16) fails wherever the output has 16 bits or more, and float32 computed as tf32 (about 3e-4) fails as float32.
    """

    name: str
    itemsize: int
    default_output: str
    peak_name: str
    tolerance: float


_ALL = (
    DType("bfloat16", 2, "bfloat16", "bf16", 1e-2),
    DType("float16", 2, "float16", "fp16", 4e-3),
    DType("float32", 4, "float32", "fp32", 2e-5),
    DType("tf32", 4, "float32", "tf32", 4e-3),
    DType("float64", 8, "float64", "fp64", 1e-12),
    DType("float8_e4m3fn", 1, "bfloat16", "fp8", 1e-2),
    DType("float8_e4m3fnuz", 1, "bfloat16", "fp8", 1e-2),
    DType("float8_e5m2", 1, "bfloat16", "fp8", 1e-2),
    DType("int8", 1, "int32", "int8", 0.0),
    # Outputs only: no kernel takes them as operands.
    DType("int32", 4, "int32", "int32", 0.0),
)
DTYPES = {dtype.name: dtype for dtype in _ALL}
OPERAND_DTYPES = tuple(name for name in DTYPES if name != "int32")

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "float8_e4m3": "fp8",
    "e4m3": "fp8",
    "float8": "fp8",
    "e4m3fn": "float8_e4m3fn",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2": "float8_e5m2",
}

# How far a result may be off when the output itself is 8 bits wide: its rounding dominates everything else.
_OUTPUT_TOLERANCE = {"float8_e4m3fn": 5e-2, "float8_e4m3fnuz": 5e-2, "float8_e5m2": 1e-1}
# Fast accumulation keeps fewer bits of the partial sums (14 on Hopper), by design.
_FAST_ACCUMULATION_TOLERANCE = 3e-2


def canonical_name(name: str) -> str:
    """The full name behind an alias; ``fp8`` stays, for a backend to resolve. Raises UnknownNameError."""
    key = name.strip().lower().removeprefix("torch.")
    key = ALIASES.get(key, key)
    if key != "fp8" and key not in OPERAND_DTYPES:
        raise UnknownNameError("dtype", name, [*OPERAND_DTYPES, "fp8"])
    return key


def tolerance(dtype: str, out_dtype: str, fast_accumulation: bool) -> float:
    """The largest relative error at which a result counts as right, given operand and output dtypes."""
    bound = max(DTYPES[dtype].tolerance, _OUTPUT_TOLERANCE.get(out_dtype, 0.0))
    return max(bound, _FAST_ACCUMULATION_TOLERANCE) if fast_accumulation else bound
