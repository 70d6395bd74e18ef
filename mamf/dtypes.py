"""The operand dtypes of a matmul by name, and what follows from each. Pure: torch's own dtypes appear in kernels only.

``float32`` and ``tf32`` are two dtypes here although torch stores both as float32: the ceiling of one
is many times the ceiling of the other. ``fp8`` names the four-bit-exponent format that the device understands,
so a backend resolves it (``Backend.resolve_dtype``).
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.errors import UnknownNameError


@dataclass(frozen=True)
class Scaling:
    """How an operand is scaled: one scale for each block of ``rows`` by ``columns`` values, columns along K (None: all
    of K). ``dtype``: of the scales.
    """

    rows: int
    columns: int | None
    dtype: str = "float32"

    def count(self, rows: int, k: int) -> int:
        """Scales of an operand of so many rows of K values."""
        return -(-rows // self.rows) * (1 if self.columns is None else -(-k // self.columns))


@dataclass(frozen=True)
class Format:
    """A scaled format: how A and B are scaled, and how many values lie in a byte."""

    a: Scaling
    b: Scaling
    values_per_byte: int = 1

    def scaling(self, operand: str) -> Scaling:
        """Of ``a`` or ``b``."""
        return self.a if operand == "a" else self.b

    @property
    def multiples(self) -> tuple[int, int]:
        """What N and K must be multiples of: of whole blocks, and of the 16 values that libraries load at once."""
        blocks = [scaling.columns or 1 for scaling in (self.a, self.b)]
        return max(16, self.b.rows), max(16, *blocks)


def _scaled_alike(scaling: Scaling, values_per_byte: int = 1) -> Format:
    return Format(scaling, scaling, values_per_byte)


@dataclass(frozen=True)
class DType:
    """One operand dtype.

    ``format``: of a scaled format, whose values are 8 or 4 bits wide and mean something by their scales alone. The
    ceiling of one is not that of another with the same values, so each is a dtype.

    ``tolerance`` bounds ||C - reference|| / ||reference|| over the sampled entries. It is a few times the rounding of
    the output dtype plus that of the accumulation, so a single wrong entry among the 256 sampled (a relative error of
    1/16) fails wherever the output has 16 bits or more, and float32 computed as tf32 (about 3e-4) fails as float32.
    """

    name: str
    itemsize: int
    default_output: str
    peak_name: str
    tolerance: float
    format: Format | None = None


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
    # 8-bit floats, as the device has them, with a scale a row, or a block as DeepSeek-V3 trains (arXiv 2412.19437).
    DType("fp8_rowwise", 1, "bfloat16", "fp8", 1e-2, _scaled_alike(Scaling(1, None))),
    DType("fp8_1x128_128x128", 1, "bfloat16", "fp8", 1e-2, Format(Scaling(1, 128), Scaling(128, 128))),
    DType("fp8_1x128_1x128", 1, "bfloat16", "fp8", 1e-2, _scaled_alike(Scaling(1, 128))),
    # OCP Microscaling Formats (MX) 1.0: blocks of 32, scales are powers of two. Values are e4m3 and e2m1.
    DType("mxfp8", 1, "bfloat16", "mxfp8", 1e-2, _scaled_alike(Scaling(1, 32, "float8_e8m0fnu"))),
    DType("mxfp4", 1, "bfloat16", "mxfp4", 1e-2, _scaled_alike(Scaling(1, 32, "float8_e8m0fnu"), 2)),
    # NVIDIA's: blocks of 16, scales are e4m3. Its further scale of a whole tensor is left at 1, as by a library's call.
    DType("nvfp4", 1, "bfloat16", "nvfp4", 1e-2, _scaled_alike(Scaling(1, 16, "float8_e4m3fn"), 2)),
    # Of outputs and of what formats lie in: no kernel takes them as operands.
    DType("int32", 4, "int32", "int32", 0.0),
    DType("uint8", 1, "uint8", "uint8", 0.0),
)
DTYPES = {dtype.name: dtype for dtype in _ALL}
OPERAND_DTYPES = tuple(name for name in DTYPES if name not in ("int32", "uint8"))
#: Dtypes whose operands are quantized with scales of their own.
FORMATS = tuple(name for name, dtype in DTYPES.items() if dtype.format)

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
