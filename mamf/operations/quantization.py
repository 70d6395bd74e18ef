"""Quantize matmul operands to scaled formats, with scales computed from the data, and dequantize them exactly.

Values that share a scale form a block. ``block_max`` is the largest magnitude in a block.

- fp8 with float32 scales: the scale maps ``block_max`` to the largest number of the format.
- MX (OCP Microscaling Formats 1.0, section 6.3): the scale is 2^(floor(log2(block_max)) - e), where 2^e is the largest
  power of two in the format. Values that are still too large become the largest number of the format.
- NVFP4: the scale is block_max / 6, rounded to an e4m3 number.

Values are rounded to nearest, ties to even. "e2m1" is a 4-bit float with 2 exponent bits and 1 mantissa bit; "e4m3" is
an 8-bit float, and "e8m0" is a power of two in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mamf.dtypes import DTYPES, Scaling
from mamf.operations.operand_sets import select_along_dim

#: The magnitude of each e2m1 number, indexed by the lower three bits of its code. Bit 3 is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_SIGN_BIT = 8
# An e8m0 scale of 2^e is stored as the number e plus this bias.
_E8M0_BIAS = 127
# The number of values that are quantized at once. Each of the few temporary float32 tensors then needs 256 MiB.
_CHUNK_ELEMENTS = 2**26
# mamf quantizes a multiple of this number of rows at once, so that the rows form whole blocks in every format.
_CHUNK_ROW_MULTIPLE = 128


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized matmul operand with rows of K values.

    - ``elements``: 8-bit floats (rows, K), or bytes (rows, K/2) of two e2m1 values, the first in the lower half.
    - ``scales``: one scale per block, in the shape (rows of blocks, blocks along K). e8m0 scales are stored as bytes.
    - ``scaling``: the size of a block and the dtype of the scales.
    """

    elements: torch.Tensor
    scales: torch.Tensor
    scaling: Scaling

    @property
    def packed_elements(self) -> torch.Tensor:
        """The elements in the dtype that torch's functions expect: float4_e2m1fn_x2 for two values per byte."""
        return self.elements.view(torch.float4_e2m1fn_x2) if self.elements.dtype == torch.uint8 else self.elements

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the number of values per row (K)."""
        rows, k = self.elements.shape
        return rows, k * (2 if self.elements.dtype == torch.uint8 else 1)

    def slice_rows(self, start: int, stop: int) -> QuantizedOperand:
        """Return the rows from ``start`` up to, but not including, ``stop``, as an operand.

        ``start`` must be the first row of a block. The result shares memory with this operand.
        """
        blocks = slice(start // self.scaling.block_rows, -(-stop // self.scaling.block_rows))
        return QuantizedOperand(self.elements[start:stop], self.scales[blocks], self.scaling)

    def split_into_row_chunks(self, chunk_elements: int) -> Iterator[QuantizedOperand]:
        """Split the operand by rows into parts with about ``chunk_elements`` values each. Do not split blocks."""
        rows, k = self.shape
        chunk_rows = max(_CHUNK_ROW_MULTIPLE, chunk_elements // k // _CHUNK_ROW_MULTIPLE * _CHUNK_ROW_MULTIPLE)
        return (self.slice_rows(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values that the elements and scales represent, as a (rows, K) tensor with this ``dtype``."""
        return apply_scales(
            decode_elements(self.elements, dtype), decode_scales(self.scales, self.scaling).to(dtype), self.scaling
        )

    def dequantize_on_host(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy these rows to the host, and return their dequantized values in float64."""
        return QuantizedOperand(
            select_along_dim(self.elements, 0, rows).cpu(),
            select_along_dim(self.scales, 0, rows // self.scaling.block_rows).cpu(),
            Scaling(1, self.scaling.block_columns, self.scaling.scale_dtype),
        ).dequantize(torch.float64)


def quantize_to_format(
    values: torch.Tensor, dtype: str, operand: str, element_memory: torch.Tensor, float8_dtype: torch.dtype
) -> QuantizedOperand:
    """Quantize an operand to a scaled format, and return the quantized operand.

    - ``values``: the operand (rows, K). ``dtype``: the name of the format. ``operand``: ``a`` or ``b``.
    - ``element_memory``: a tensor of bytes in which to store the elements of the result.
    - ``float8_dtype``: the 8-bit float dtype that the device supports.
    """
    scaled_format = DTYPES[dtype].scaled_format
    assert scaled_format is not None
    scaling, rows = scaled_format.get_scaling(operand), len(values)
    is_e2m1 = scaled_format.values_per_byte == 2
    format_max = E2M1_MAGNITUDES[-1] if is_e2m1 else torch.finfo(float8_dtype).max
    elements = element_memory.view(rows, -1)
    chunk_rows = max(
        _CHUNK_ROW_MULTIPLE, _CHUNK_ELEMENTS // values.shape[1] // _CHUNK_ROW_MULTIPLE * _CHUNK_ROW_MULTIPLE
    )
    scales = []
    for start in range(0, rows, chunk_rows):
        chunk = values[start : start + chunk_rows].float()
        scale = compute_block_scales(view_as_blocks(chunk, scaling).abs().amax((1, 3)), scaling, format_max)
        scales.append(scale)
        scaled_values = apply_scales(chunk, 1 / decode_scales(scale, scaling), scaling).clamp(-format_max, format_max)
        elements[start : start + chunk_rows] = (
            pack_e2m1(scaled_values) if is_e2m1 else scaled_values.to(float8_dtype).view(torch.uint8)
        )
    return QuantizedOperand(elements if is_e2m1 else elements.view(float8_dtype), torch.cat(scales), scaling)


def view_as_blocks(values: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """View values (rows, K) as blocks that share a scale: (rows of blocks, rows of a block, blocks along K, columns of
    a block).
    """
    columns = scaling.block_columns or values.shape[1]
    return values.view(-1, scaling.block_rows, values.shape[1] // columns, columns)


def compute_block_scales(block_maxima: torch.Tensor, scaling: Scaling, format_max: float) -> torch.Tensor:
    """Compute the scale of each block, in the dtype of the scales, from the largest magnitude of each block.

    ``format_max``: the largest number of the format.
    """
    if scaling.scale_dtype == "float8_e8m0fnu":
        # The exponent that frexp returns is floor(log2) + 1. The 1 cancels out, because this is a difference of two
        # exponents.
        exponents = torch.frexp(block_maxima)[1] - torch.frexp(torch.tensor(format_max))[1].to(block_maxima.device)
        return (exponents + _E8M0_BIAS).clamp(0, 2 * _E8M0_BIAS).to(torch.uint8)
    scales = block_maxima / format_max
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if scaling.scale_dtype == "float8_e4m3fn":
        return scales.clamp(2.0**-9, torch.finfo(torch.float8_e4m3fn).max).to(torch.float8_e4m3fn)
    return scales


def decode_scales(scales: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Convert the scales of an operand to float32."""
    if scaling.scale_dtype == "float8_e8m0fnu":
        # Build a float32 from its exponent bits, because this is exact on any device. The code 0 means 2^-127, which is
        # subnormal in float32 and which the shift does not produce, so set its bits separately.
        words = scales.int() << 23
        return torch.where(words == 0, 1 << 22, words).view(torch.float32)
    return scales.float()


def apply_scales(values: torch.Tensor, scales: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """Multiply each value of a tensor (rows, K) by the scale of its block, and return the products.

    ``scales``: one number per block, in the shape (rows of blocks, blocks along K).
    """
    return (view_as_blocks(values, scaling) * scales[:, None, :, None]).view(values.shape)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round values (rows, K) to e2m1 numbers, and return bytes (rows, K/2) with the codes of two numbers each.

    Values are rounded to nearest, ties to the even code.
    """
    codes = torch.bucketize(values.abs(), _compute_rounding_boundaries().to(values.device)).to(torch.uint8)
    codes += _E2M1_SIGN_BIT * torch.signbit(values).to(torch.uint8)
    return codes[:, ::2] + 16 * codes[:, 1::2]


def _compute_rounding_boundaries() -> torch.Tensor:
    """Return the seven boundaries with which ``torch.bucketize`` rounds magnitudes to e2m1.

    A boundary is halfway between two numbers of e2m1, and ``bucketize`` rounds a value at the boundary down. If the
    upper number has the even code, lower the boundary slightly, so that ``bucketize`` rounds this value up.
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    is_rounded_up = torch.arange(len(middles)) % 2 == 1
    return torch.where(is_rounded_up, torch.nextafter(middles, torch.zeros(())), middles)


def decode_elements(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers (rows, K) that quantized elements represent before they are multiplied by their scales."""
    if elements.dtype != torch.uint8:
        return elements.to(dtype)
    table = torch.tensor(
        [*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], dtype=dtype, device=elements.device
    )
    return table[torch.stack((elements & 15, elements >> 4), dim=-1).flatten(1).int()]


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rearrange scales (rows, blocks along K) into the layout that Blackwell's tensor cores read, and return them as a
    one-dimensional tensor, padded with zeros.

    The layout has tiles of 128 rows by 4 scales. The tiles of the first 128 rows come first, in the order of K. In a
    tile, the scale of row r and column c is at 16 * (r % 32) + 4 * (r // 32) + c (cuBLAS calls this the 1D block
    scaling factors layout).
    """
    rows, columns = (-(-size // step) for size, step in zip(scales.shape, (128, 4), strict=True))
    words = scales.view(torch.uint8)
    padded = torch.nn.functional.pad(words, (0, 4 * columns - words.shape[1], 0, 128 * rows - words.shape[0]))
    return padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)
