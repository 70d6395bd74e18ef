"""Test the quantizers of scaled formats: the error is at most half a step, and the scales are as defined."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.dtypes import DTYPES, SCALED_DTYPES
from mamf.operations.quantization import E2M1_MAGNITUDES, decode_scales, pack_e2m1, quantize_to_format

E4M3 = torch.float8_e4m3fn
#: All numbers of a format, by how many of them a byte contains: e4m3 (1) and e2m1 (2).
GRIDS = {
    1: torch.arange(256, dtype=torch.uint8).view(E4M3).float(),
    2: torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)]),
}
seeds = st.integers(0, 2**31)
exponents = st.integers(-20, 20)
few = settings(max_examples=8, deadline=None)
each_format = pytest.mark.parametrize("dtype", SCALED_DTYPES)


def of(dtype, values, operand="a"):
    format = DTYPES[dtype].scaled_format
    memory = torch.empty(values.numel() // format.values_per_byte, dtype=torch.uint8)
    return quantize_to_format(values, dtype, operand, memory, E4M3)


def normal(seed, exponent, rows=128, k=128):
    values = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    return values.bfloat16().float()


def spread(scales, scaling, values):
    """Return the scale of each value, in the shape of ``values``."""
    columns = scaling.block_columns or values.shape[1]
    return scales.repeat_interleave(scaling.block_rows, 0).repeat_interleave(columns, 1)


def grid_of(dtype):
    grid = GRIDS[DTYPES[dtype].scaled_format.values_per_byte]
    return grid[~grid.isnan()].unique()


@each_format
@pytest.mark.parametrize("operand", ["a", "b"])
@few
@given(seed=seeds, exponent=exponents)
def test_values_come_back_as_the_nearest_of_the_format(dtype, operand, seed, exponent):
    values = normal(seed, min(exponent, 8) if dtype == "nvfp4" else exponent)
    result = of(dtype, values, operand)
    scales = spread(decode_scales(result.scales, result.scaling), result.scaling, values)
    grid = grid_of(dtype)
    # Values beyond the largest number of the format become this number.
    wanted = (values / scales).clamp(grid[0], grid[-1])
    above = torch.searchsorted(grid, wanted).clamp(1, len(grid) - 1)
    nearest = torch.minimum((grid[above] - wanted).abs(), (wanted - grid[above - 1]).abs())
    found = (result.dequantize() / scales - wanted).abs()
    assert (found <= nearest + 1e-6 * wanted.abs() + 1e-12).all()


@each_format
@few
@given(seed=seeds, exponent=exponents)
def test_host_and_device_read_the_same(dtype, seed, exponent):
    values = normal(seed, exponent)
    rows = torch.tensor([0, 5, 127])
    for operand in ("a", "b"):
        result = of(dtype, values, operand)
        assert torch.equal(result.dequantize_on_host(rows), result.dequantize(torch.float64)[rows])


@pytest.mark.parametrize(("dtype", "most"), [("mxfp8", 8), ("mxfp4", 2)])
@few
@given(seed=seeds, exponent=exponents)
def test_mx_scales_are_the_powers_of_two_that_ocp_defines(dtype, most, seed, exponent):
    values = normal(seed, exponent)
    found = decode_scales(of(dtype, values).scales, DTYPES[dtype].scaled_format.a_scaling)
    largest = values.abs().view(128, -1, 32).amax(-1)
    assert torch.equal(found, torch.exp2(torch.floor(torch.log2(largest.double())) - most).float())


@pytest.mark.parametrize("dtype", ["fp8_rowwise", "fp8_1x128_1x128", "fp8_1x128_128x128"])
@pytest.mark.parametrize("operand", ["a", "b"])
@few
@given(seed=seeds, exponent=exponents)
def test_the_largest_of_a_block_is_the_largest_of_the_format(dtype, operand, seed, exponent):
    result = of(dtype, normal(seed, exponent), operand)
    scaling = DTYPES[dtype].scaled_format.get_scaling(operand)
    columns = scaling.block_columns or 128
    blocks = result.elements.float().abs().view(128 // scaling.block_rows, scaling.block_rows, 128 // columns, columns)
    assert (blocks.amax((1, 3)) == 448).all()
    assert result.scales.shape == (128 // scaling.block_rows, 128 // columns)
    assert result.scales.numel() == scaling.count_scales(128, 128)


# -- e2m1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.0, 0), (0.25, 0), (0.26, 1), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (5.1, 7), (6.0, 7)],
)
def test_e2m1_rounds_to_nearest_and_ties_to_even(value, code):
    assert pack_e2m1(torch.tensor([[value, -value]])).item() == code + 16 * (code + 8)
