"""Define the dtypes of matmul operands: names, sizes, aliases, scaled formats, and error tolerances.

This module does not import torch. ``float32`` and ``tf32`` are two dtypes here although torch stores both as float32,
because the hardware multiplies tf32 several times as fast. ``fp8`` means the 8-bit float with four exponent bits that
the device supports. ``Backend.resolve_dtype`` replaces ``fp8`` by float8_e4m3fn or float8_e4m3fnuz.
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.errors import UnknownNameError


@dataclass(frozen=True)
class Scaling:
    """The way in which a quantized operand is scaled. The operand is divided into blocks, and each block has one scale.

    - ``block_rows``: the number of rows of a block.
    - ``block_columns``: the number of values in a block along K; None if a block spans all of K.
    - ``scale_dtype``: the dtype of the scales.
    """

    block_rows: int
    block_columns: int | None
    scale_dtype: str = "float32"

    def count_scales(self, rows: int, k: int) -> int:
        """Return the number of scales of an operand that has ``rows`` rows of ``k`` values each."""
        return -(-rows // self.block_rows) * (1 if self.block_columns is None else -(-k // self.block_columns))


@dataclass(frozen=True)
class ScaledFormat:
    """A format of quantized matmul operands: the scaling of A, the scaling of B, and the number of values in a byte."""

    a_scaling: Scaling
    b_scaling: Scaling
    values_per_byte: int = 1

    def get_scaling(self, operand: str) -> Scaling:
        """Return the scaling of the operand with this name, ``a`` or ``b``."""
        return self.a_scaling if operand == "a" else self.b_scaling

    @property
    def required_multiples_of_n_and_k(self) -> tuple[int, int]:
        """Two numbers: N must be a multiple of the first, and K of the second. Each number is the size of a block, but
        at least 16, because kernels load 16 values at once.
        """
        return (
            max(16, self.b_scaling.block_rows),
            max(16, self.a_scaling.block_columns or 1, self.b_scaling.block_columns or 1),
        )


def _make_equally_scaled_format(scaling: Scaling, values_per_byte: int = 1) -> ScaledFormat:
    return ScaledFormat(scaling, scaling, values_per_byte)


@dataclass(frozen=True)
class DType:
    """One dtype of matmul operands.

    - ``itemsize``: the bytes of a value (1 for formats that store two values in a byte).
    - ``default_output_dtype``: the dtype of C if the user does not choose one.
    - ``datasheet_dtype``: the name of this dtype in mamf's table of datasheet peaks.
    - ``tolerance``: the largest ||C - reference|| / ||reference|| of a correct C in the default output dtype.
    - ``scaled_format``: the layout of the scales; None if the values have no scales. Each scaled format is a separate
      dtype, because the layout of the scales changes the speed of a matmul.

    The table below derives each tolerance from rounding. u is the unit roundoff, half the distance from 1 to the next
    number. "Largest seen" is the largest error of any log in mamf's folder results/.

    | operands | what is rounded | derivation | bound | largest seen |
    |---|---|---|---|---|
    | bfloat16 | C, to 8 bits | 2 u, u = 3.9e-3: partial sums may be rounded to bfloat16 too | 8e-3 | 2.1e-3 |
    | float16 | C, to 11 bits | 2 u, u = 4.9e-4, as for bfloat16 | 1e-3 | 2.5e-4 |
    | tf32 | A and B, to 11 bits | truncated, a loss of up to 2^-10 each, 6.3e-4 on average | 1.5e-3 | 8.3e-4 |
    | float32 | sums, u = 6e-8 | if added one by one, the error is u sqrt(K / 6) = 6e-6 at K = 65536 | 1e-5 | 2.2e-6 |
    | float64 | sums, u = 1.1e-16 | u sqrt(K / 6), as for float32: 1.2e-14 at K = 65536 | 1e-13 | 4.2e-15 |
    | 8 and 4 bits | C, to bfloat16; products are exact | u = 4e-3; the sums have an error of 1e-3 | 4e-3 | 1.9e-3 |
    | int8 | nothing | sums fit into int32 | 0 | 0 |

    On an H200, the bfloat16 matmul 303x9048x11083 has an error of 3.5e-3 if partial sums are kept in bfloat16, which
    is torch's default, and of 1.7e-3 if they are kept in float32.

    The tolerances also detect arithmetic that is less precise than the dtype. Operands rounded to bfloat16 cause errors
    of 2.1e-3 to 2.6e-3, more than the tolerances of float16 and tf32. Arithmetic in tf32 causes an error of 3e-4 if the
    operands are rounded, and a larger one if they are truncated. Both exceed the tolerance of float32. Arithmetic in
    float32 causes an error of 1e-7, more than the tolerance of float64.
    """

    name: str
    itemsize: int
    default_output_dtype: str
    datasheet_dtype: str
    tolerance: float
    scaled_format: ScaledFormat | None = None


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
    # The values of these formats are the device's 8-bit floats. They have one scale per row, or per block as in
    # DeepSeek-V3's training (arXiv 2412.19437).
    DType("fp8_rowwise", 1, "bfloat16", "fp8", 4e-3, _make_equally_scaled_format(Scaling(1, None))),
    DType("fp8_1x128_128x128", 1, "bfloat16", "fp8", 4e-3, ScaledFormat(Scaling(1, 128), Scaling(128, 128))),
    DType("fp8_1x128_1x128", 1, "bfloat16", "fp8", 4e-3, _make_equally_scaled_format(Scaling(1, 128))),
    # In OCP Microscaling Formats (MX) 1.0, 32 values share one scale, which is a power of two. The values are e4m3
    # (mxfp8) or e2m1 (mxfp4).
    DType("mxfp8", 1, "bfloat16", "mxfp8", 4e-3, _make_equally_scaled_format(Scaling(1, 32, "float8_e8m0fnu"))),
    DType("mxfp4", 1, "bfloat16", "mxfp4", 4e-3, _make_equally_scaled_format(Scaling(1, 32, "float8_e8m0fnu"), 2)),
    # In NVIDIA's NVFP4, 16 values share one scale, which is an e4m3 number. The format also has one scale for the whole
    # tensor. mamf leaves that scale at 1, the default of the libraries.
    DType("nvfp4", 1, "bfloat16", "nvfp4", 4e-3, _make_equally_scaled_format(Scaling(1, 16, "float8_e4m3fn"), 2)),
    # int32 is only a dtype of outputs, and uint8 only of packed memory: no kernel takes them as operands.
    DType("int32", 4, "int32", "int32", 0.0),
    DType("uint8", 1, "uint8", "uint8", 0.0),
)
#: All dtypes, by name.
DTYPES = {dtype.name: dtype for dtype in _DTYPE_TABLE}
#: The names of all dtypes that operands can have.
OPERAND_DTYPES = tuple(name for name in DTYPES if name not in ("int32", "uint8"))
#: The names of the dtypes whose operands are quantized and have scales.
SCALED_DTYPES = tuple(name for name, dtype in DTYPES.items() if dtype.scaled_format)

#: Aliases that users may write for dtypes. Each maps to the full name of a dtype, or to ``fp8``, which the backend
#: resolves.
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

# By output dtype: the largest relative error that rounding the output may cause, if the operands have at most 8 bits. u
# is the unit roundoff of the output dtype. For bfloat16, the bound is u. For 8-bit floats, the bound is 1.4 u /
# sqrt(3), because the root mean square of the rounding errors is at most u / sqrt(3).
_OUTPUT_ROUNDING_BOUNDS = {"bfloat16": 4e-3, "float8_e4m3fn": 5e-2, "float8_e4m3fnuz": 5e-2, "float8_e5m2": 1e-1}
# The largest error that sums of 8-bit products may have. Most devices keep these sums in float32. Hopper keeps them in
# 14 bits, and periodically adds them to a float32.
_PARTIAL_SUM_ERROR_BOUND = 1e-3
# The largest error that sums may have with fast accumulation, in which Hopper keeps all partial sums in 14 bits. The
# measured error is 4.7e-3 at K = 20480, and grows with K.
_FAST_ACCUMULATION_ERROR_BOUND = 1e-2
# How far the slope (see ``compute_slope_tolerance``) may deviate from 1. Truncated tf32 operands must pass (deviation
# 6.3e-4), and a result that is 1.002 times the reference must fail (deviation 2e-3).
_SLOPE_ERROR_BOUND = 1e-3


def canonicalize_dtype_name(name: object) -> str:
    """Return the full name of a dtype, given a torch.dtype, or a full name or an alias in any case, with or without
    ``torch.``.

    ``fp8`` stays ``fp8``, because only the backend can resolve it. Raises UnknownNameError for an unknown name.
    """
    key = str(name).strip().lower().removeprefix("torch.")
    key = DTYPE_ALIASES.get(key, key)
    if key != "fp8" and key not in OPERAND_DTYPES:
        raise UnknownNameError("dtype", str(name), [*OPERAND_DTYPES, "fp8"])
    return key


def compute_error_tolerance(dtype: str, out_dtype: str, fast_accumulation: bool) -> float:
    """Return the largest ||C - reference|| / ||reference|| that a correct C = A @ B may have.

    ``dtype``: the dtype of A and B. ``out_dtype``: that of C. ``fast_accumulation``: whether partial sums of 8-bit
    floats have fewer bits.
    """
    operand = DTYPES[dtype]
    is_narrow = operand.default_output_dtype == "bfloat16" and operand.itemsize == 1
    bound = (
        max(_OUTPUT_ROUNDING_BOUNDS.get(out_dtype, 0.0), _PARTIAL_SUM_ERROR_BOUND) if is_narrow else operand.tolerance
    )
    return max(bound, _FAST_ACCUMULATION_ERROR_BOUND) if fast_accumulation else bound


def compute_slope_tolerance(dtype: str, fast_accumulation: bool) -> float:
    """Return how far <C, reference> / <reference, reference> may be from 1 for a correct C.

    Rounding to nearest does not change this ratio. Truncating tf32 operands changes it, and so does truncating partial
    sums with fast accumulation.
    """
    return _FAST_ACCUMULATION_ERROR_BOUND if fast_accumulation else min(_SLOPE_ERROR_BOUND, DTYPES[dtype].tolerance)
