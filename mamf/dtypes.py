"""The operand dtypes of a matmul: names, sizes, tolerances and aliases. Pure: only kernels use torch's dtypes.

``float32`` and ``tf32`` are two dtypes here although torch stores both as float32, because their ceilings differ by a
large factor. ``fp8`` means the format with four exponent bits that the device supports; the backend resolves it
(``Backend.resolve_dtype``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.errors import UnknownNameError


@dataclass(frozen=True)
class Scaling:
    """How an operand is scaled: one scale per block of ``rows`` by ``columns`` values, columns along K (None: all of
    K). ``dtype``: the dtype of the scales.
    """

    rows: int
    columns: int | None
    dtype: str = "float32"

    def count_scales(self, rows: int, k: int) -> int:
        """Return the number of scales of an operand with this many rows of K values."""
        return -(-rows // self.rows) * (1 if self.columns is None else -(-k // self.columns))


@dataclass(frozen=True)
class Format:
    """A scaled format: how A and B are scaled, and how many values a byte has."""

    a: Scaling
    b: Scaling
    values_per_byte: int = 1

    def get_scaling(self, operand: str) -> Scaling:
        """Return the scaling of operand ``a`` or ``b``."""
        return self.a if operand == "a" else self.b

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers that N and K must be multiples of: the size of a block, and the 16 values of one load."""
        blocks = [scaling.columns or 1 for scaling in (self.a, self.b)]
        return max(16, self.b.rows), max(16, *blocks)


def _make_symmetric_format(scaling: Scaling, values_per_byte: int = 1) -> Format:
    return Format(scaling, scaling, values_per_byte)


@dataclass(frozen=True)
class DType:
    """One operand dtype.

    ``format``: set for a scaled format, whose 8-bit or 4-bit values have meaning only together with their scales. Two
    formats with the same values have different ceilings, so each format is a dtype.

    ``tolerance`` bounds ||C - reference|| / ||reference|| with the default output. The table below derives it from
    rounding; "largest seen" is the largest error in results/. u is the unit roundoff, half the distance from 1 to the
    next number.

    | operands | what rounds | derivation | bound | largest seen |
    |---|---|---|---|---|
    | bfloat16 | C, to 8 bits | u = 3.9e-3, twice, for partial sums that may be kept in bfloat16 | 8e-3 | 2.1e-3 |
    | float16 | C, to 11 bits | u = 4.9e-4, the same | 1e-3 | 2.5e-4 |
    | tf32 | A and B, to 11 bits | truncated, a loss of up to 2^-10 each, 6.3e-4 on average | 1.5e-3 | 8.3e-4 |
    | float32 | sums, u = 6e-8 | one after another: u sqrt(K / 6) = 6e-6 at K = 65536 | 1e-5 | 2.2e-6 |
    | float64 | sums, u = 1.1e-16 | the same: 1.2e-14 at K = 65536 | 1e-13 | 4.2e-15 |
    | 8 and 4 bits | C, as bfloat16; products are exact | the output's bound, or 1e-3 for the sums | 4e-3 | 1.9e-3 |
    | int8 | nothing | sums fit into int32 | 0 | 0 |

    303x9048x11083 in bfloat16 is off by 3.5e-3 on an H200 with partial sums of bfloat16, torch's default, by 1.7e-3
    without. Operands rounded to bfloat16 are off by 2.1e-3 to 2.6e-3 and fail as float16 and tf32; tf32 (3e-4) fails as
    float32, and float32 (1e-7) as float64.
    """

    name: str
    itemsize: int
    default_output_dtype: str
    peak_name: str
    tolerance: float
    format: Format | None = None


_DTYPE_TABLE = (
    DType("bfloat16", 2, "bfloat16", "bf16", 8e-3),
    DType("float16", 2, "float16", "fp16", 1e-3),
    DType("float32", 4, "float32", "fp32", 1e-5),
    DType("tf32", 4, "float32", "tf32", 1.5e-3),
    DType("float64", 8, "float64", "fp64", 1e-13),
    DType("float8_e4m3fn", 1, "bfloat16", "fp8", 4e-3),
    DType("float8_e4m3fnuz", 1, "bfloat16", "fp8", 4e-3),
    DType("float8_e5m2", 1, "bfloat16", "fp8", 4e-3),
    DType("int8", 1, "int32", "int8", 0.0),
    # The device's 8-bit floats with one scale per row, or per block as in DeepSeek-V3's training (arXiv 2412.19437).
    DType("fp8_rowwise", 1, "bfloat16", "fp8", 4e-3, _make_symmetric_format(Scaling(1, None))),
    DType("fp8_1x128_128x128", 1, "bfloat16", "fp8", 4e-3, Format(Scaling(1, 128), Scaling(128, 128))),
    DType("fp8_1x128_1x128", 1, "bfloat16", "fp8", 4e-3, _make_symmetric_format(Scaling(1, 128))),
    # OCP Microscaling Formats (MX) 1.0: blocks of 32, scales are powers of two. Values are e4m3 and e2m1.
    DType("mxfp8", 1, "bfloat16", "mxfp8", 4e-3, _make_symmetric_format(Scaling(1, 32, "float8_e8m0fnu"))),
    DType("mxfp4", 1, "bfloat16", "mxfp4", 4e-3, _make_symmetric_format(Scaling(1, 32, "float8_e8m0fnu"), 2)),
    # NVIDIA's format: blocks of 16, scales are e4m3. Its additional per-tensor scale stays 1, the libraries' default.
    DType("nvfp4", 1, "bfloat16", "nvfp4", 4e-3, _make_symmetric_format(Scaling(1, 16, "float8_e4m3fn"), 2)),
    # Only for outputs and packed formats: no kernel takes them as operands.
    DType("int32", 4, "int32", "int32", 0.0),
    DType("uint8", 1, "uint8", "uint8", 0.0),
)
DTYPES = {dtype.name: dtype for dtype in _DTYPE_TABLE}
OPERAND_DTYPES = tuple(name for name in DTYPES if name not in ("int32", "uint8"))
#: Dtypes with quantized operands and scales.
SCALED_FORMATS = tuple(name for name, dtype in DTYPES.items() if dtype.format)

DTYPE_ALIASES = {
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

# Bounds for rounding the output when operands have at most 8 bits: u for outputs of 16 bits and more (twice u for
# float16, as above), and 1.4 times u / sqrt(3), the largest root mean square of rounding, for 8-bit outputs.
_OUTPUT_ROUNDING_BOUNDS = {"bfloat16": 4e-3, "float8_e4m3fn": 5e-2, "float8_e4m3fnuz": 5e-2, "float8_e5m2": 1e-1}
# Sums of 8-bit products are kept in float32, or on Hopper in 14 bits that are periodically added to float32.
_PARTIAL_SUM_ERROR_BOUND = 1e-3
# Fast accumulation keeps all partial sums in 14 bits on Hopper: an error of 4.7e-3 at K = 20480 that grows with K.
_FAST_ACCUMULATION_ERROR_BOUND = 1e-2
# A result that is 1.002 times the reference is wrong. The bound is half of that deviation, and more than the effect of
# truncated tf32 (6.3e-4).
_SLOPE_ERROR_BOUND = 1e-3


def canonicalize_dtype_name(name: str) -> str:
    """Return the full name of a dtype, given any alias. ``fp8`` stays, because the backend resolves it. Raises
    UnknownNameError.
    """
    key = name.strip().lower().removeprefix("torch.")
    key = DTYPE_ALIASES.get(key, key)
    if key != "fp8" and key not in OPERAND_DTYPES:
        raise UnknownNameError("dtype", name, [*OPERAND_DTYPES, "fp8"])
    return key


def compute_error_tolerance(dtype: str, out_dtype: str, fast_accumulation: bool) -> float:
    """Return the largest relative error of a correct result, given the operand and output dtypes."""
    operand = DTYPES[dtype]
    is_narrow = operand.default_output_dtype == "bfloat16" and operand.itemsize == 1
    bound = (
        max(_OUTPUT_ROUNDING_BOUNDS.get(out_dtype, 0.0), _PARTIAL_SUM_ERROR_BOUND) if is_narrow else operand.tolerance
    )
    return max(bound, _FAST_ACCUMULATION_ERROR_BOUND) if fast_accumulation else bound


def compute_slope_tolerance(dtype: str, fast_accumulation: bool) -> float:
    """Return how far <C, reference> / <reference, reference> may be from 1. Rounding to nearest does not change this
    ratio; truncation does (tf32 operands, fast partial sums).
    """
    return _FAST_ACCUMULATION_ERROR_BOUND if fast_accumulation else min(_SLOPE_ERROR_BOUND, DTYPES[dtype].tolerance)
