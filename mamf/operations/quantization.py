"""Quantizes operands to scaled formats, with scales computed from the data, and dequantizes them exactly.

- fp8 with float32 scales: the scale maps a block's largest value to the largest value of the format.
- MX (OCP Microscaling Formats 1.0, 6.3): the scale is 2^(floor(log2 largest) - e), where e is the exponent of the
  format's largest value. Larger values saturate.
- NVFP4: the scale is e4m3, the block's largest value / 6, rounded.

Values round to nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mamf.dtypes import DTYPES, Format, Scaling
from mamf.operations.operand_sets import select

#: The magnitudes of e2m1, indexed by code; bit 3 is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGN = 8
# Exponents of e8m0 are biased by 127.
_E8M0_BIAS = 127
# Values to quantize at once: this takes a few times 256 MiB of temporary memory.
_CHUNK = 2**26
# The rows of a chunk are a multiple of this, so that it contains whole blocks of any format.
_CHUNK_ROWS = 128


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized operand with rows of K values. ``elements``: (rows, K) 8-bit floats, or (rows, K/2) bytes of two e2m1
    values, the first in the lower half. ``scales``: one per block, (rows of blocks, blocks along K); e8m0 as bytes.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    scaling: Scaling

    @property
    def packed(self) -> torch.Tensor:
        """The elements in torch's dtype: float4_e2m1fn_x2 for two values per byte."""
        return self.elements.view(torch.float4_e2m1fn_x2) if self.elements.dtype == torch.uint8 else self.elements

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of values per row (K)."""
        rows, k = self.elements.shape
        return rows, k * (2 if self.elements.dtype == torch.uint8 else 1)

    def slice_rows(self, start: int, stop: int) -> QuantizedOperand:
        """Return the rows from ``start``, which must be the first row of a block, up to but not including ``stop``."""
        blocks = slice(start // self.scaling.rows, -(-stop // self.scaling.rows))
        return QuantizedOperand(self.elements[start:stop], self.scales[blocks], self.scaling)

    def split_rows(self, elements: int) -> Iterator[QuantizedOperand]:
        """Yield the operand in parts of consecutive rows, with whole blocks and about ``elements`` elements each."""
        rows, k = self.shape
        step = max(_CHUNK_ROWS, elements // k // _CHUNK_ROWS * _CHUNK_ROWS)
        return (self.slice_rows(start, min(start + step, rows)) for start in range(0, rows, step))

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized values, (rows, K)."""
        return apply_scales(
            decode(self.elements, dtype), decode_scales(self.scales, self.scaling).to(dtype), self.scaling
        )

    def dequantize_on_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the dequantized values of these rows, on the host in float64."""
        return QuantizedOperand(
            select(self.elements, 0, rows).cpu(),
            select(self.scales, 0, rows // self.scaling.rows).cpu(),
            Scaling(1, self.scaling.columns, self.scaling.dtype),
        ).values(torch.float64)


def quantize_to_format(
    values: torch.Tensor, dtype: str, operand: str, memory: torch.Tensor, e4m3: torch.dtype
) -> QuantizedOperand:
    """Quantize ``values`` (rows, K) as ``operand`` (``a`` or ``b``) of a format; the elements are written to ``memory``
    (bytes). ``e4m3``: the 8-bit float dtype that the device supports.
    """
    format = DTYPES[dtype].format
    assert format is not None
    scaling, rows = format.get_scaling(operand), values.shape[0]
    elements = memory.view(rows, -1)
    step = max(_CHUNK_ROWS, _CHUNK // values.shape[1] // _CHUNK_ROWS * _CHUNK_ROWS)
    scales = []
    for start in range(0, rows, step):
        chunk = values[start : start + step].float()
        scale = compute_block_scales(compute_block_maxima(chunk, scaling), scaling, get_max_format_value(format, e4m3))
        scales.append(scale)
        elements[start : start + step] = encode(chunk, scale, scaling, format, e4m3)
    return QuantizedOperand(
        elements if format.values_per_byte == 2 else elements.view(e4m3), torch.cat(scales), scaling
    )


def get_max_format_value(format: Format, e4m3: torch.dtype) -> float:
    return E2M1_MAGNITUDES[-1] if format.values_per_byte == 2 else torch.finfo(e4m3).max


def compute_block_maxima(values: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Return the largest magnitude of each block."""
    rows, k = values.shape
    columns = scaling.columns or k
    return values.abs().view(rows // scaling.rows, scaling.rows, k // columns, columns).amax((1, 3))


def compute_block_scales(largest: torch.Tensor, scaling: Scaling, most: float) -> torch.Tensor:
    """Compute the scales of blocks from their largest magnitudes. ``most``: the format's largest value."""
    if scaling.dtype == "float8_e8m0fnu":
        # The exponents of frexp are floor(log2) + 1, on both sides of the difference.
        exponents = torch.frexp(largest)[1] - torch.frexp(torch.tensor(most))[1].to(largest.device)
        return (exponents + _E8M0_BIAS).clamp(0, 2 * _E8M0_BIAS).to(torch.uint8)
    scales = largest / most
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if scaling.dtype == "float8_e4m3fn":
        return scales.clamp(2.0**-9, torch.finfo(torch.float8_e4m3fn).max).to(torch.float8_e4m3fn)
    return scales


def decode_scales(scales: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Convert scales to float32."""
    if scaling.dtype == "float8_e8m0fnu":
        # Write the exponent bits of a float32, which is exact on any device. 2^-127 is a subnormal float32.
        words = scales.int() << 23
        return torch.where(words == 0, 1 << 22, words).view(torch.float32)
    return scales.float()


def apply_scales(values: torch.Tensor, scales: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Multiply each value (rows, K) by the scale of its block."""
    rows, k = values.shape
    columns = scaling.columns or k
    blocks = values.view(rows // scaling.rows, scaling.rows, k // columns, columns)
    return (blocks * scales[:, None, :, None]).view(rows, k)


def encode(
    values: torch.Tensor, scales: torch.Tensor, scaling: Scaling, format: Format, e4m3: torch.dtype
) -> torch.Tensor:
    """Divide values by their scales and convert them to the format's bytes."""
    most = get_max_format_value(format, e4m3)
    rest = apply_scales(values, 1 / decode_scales(scales, scaling), scaling).clamp(-most, most)
    return rest.to(e4m3).view(torch.uint8) if format.values_per_byte == 1 else pack_e2m1(rest)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round values to e2m1, to nearest with ties to the even code, and pack two per byte."""
    codes = torch.bucketize(values.abs(), _list_rounding_boundaries().to(values.device)).to(torch.uint8)
    codes += _SIGN * torch.signbit(values).to(torch.uint8)
    return codes[:, ::2] + 16 * codes[:, 1::2]


def _list_rounding_boundaries() -> torch.Tensor:
    """Return the boundaries between the magnitudes of e2m1 for rounding.

    ``bucketize`` rounds a value at a boundary down. Where a tie must round up to the even code, the boundary is
    therefore slightly below the middle.
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    goes_up = torch.arange(len(middles)) % 2 == 1
    return torch.where(goes_up, torch.nextafter(middles, torch.zeros(())), middles)


def decode(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert elements to numbers (rows, K), without applying the scales."""
    if elements.dtype != torch.uint8:
        return elements.to(dtype)
    table = torch.tensor(
        [*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], dtype=dtype, device=elements.device
    )
    codes = torch.stack((elements & 15, elements >> 4), dim=-1).flatten(1)
    return table[codes.int()]


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rearrange scales of blocks along K into the layout of Blackwell's tensor cores: flat, padded with zeros.

    The layout has tiles of 128 rows by 4 scales, ordered along K first; in a tile, the scale of row r and column c is
    at 16 * (r % 32) + 4 * (r // 32) + c (cuBLAS, 1D block scaling factors layout).
    """
    rows, columns = (-(-size // step) for size, step in zip(scales.shape, (128, 4), strict=True))
    words = scales.view(torch.uint8)
    padded = torch.nn.functional.pad(words, (0, 4 * columns - words.shape[1], 0, 128 * rows - words.shape[0]))
    return padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
