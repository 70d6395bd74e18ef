"""Test the quantizers of scaled formats: the error is at most half a step, and the scales are as defined."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamf.dtypes import DTYPES, SCALED_DTYPES
from mamf.operations.quantization import E2M1_MAGNITUDES, decode_scales, pack_e2m1, quantize_to_format

E4M3 = torch.float8_e4m3fn
#: All numbers of a format, by how many of them a byte contains: e4m3 (1) and e2m1 (2).
NUMBERS_BY_VALUES_PER_BYTE = {
    1: torch.arange(256, dtype=torch.uint8).view(E4M3).float(),
    2: torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)]),
}
seeds = st.integers(0, 2**31)
exponents = st.integers(-20, 20)
few_examples = settings(max_examples=8, deadline=None)
each_format = pytest.mark.parametrize("dtype", SCALED_DTYPES)


def quantize(dtype, values, operand="a"):
    scaled_format = DTYPES[dtype].scaled_format
    memory = torch.empty(values.numel() // scaled_format.values_per_byte, dtype=torch.uint8)
    return quantize_to_format(values, dtype, operand, memory, E4M3)


def make_normal_values(seed, exponent, rows=128, k=128):
    values = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    return values.bfloat16().float()


def expand_scales(scales, scaling, values):
    """Return the scale of each value, in the shape of ``values``."""
    columns = scaling.block_columns or values.shape[1]
    return scales.repeat_interleave(scaling.block_rows, 0).repeat_interleave(columns, 1)


def make_grid(dtype):
    grid = NUMBERS_BY_VALUES_PER_BYTE[DTYPES[dtype].scaled_format.values_per_byte]
    return grid[~grid.isnan()].unique()


@each_format
@pytest.mark.parametrize("operand", ["a", "b"])
@few_examples
@given(seed=seeds, exponent=exponents)
def test_values_are_rounded_to_the_nearest_number_of_the_format(dtype, operand, seed, exponent):
    values = make_normal_values(seed, min(exponent, 8) if dtype == "nvfp4" else exponent)
    result = quantize(dtype, values, operand)
    scales = expand_scales(decode_scales(result.scales, result.scaling), result.scaling, values)
    grid = make_grid(dtype)
    # Values beyond the largest number of the format become this number.
    scaled_values = (values / scales).clamp(grid[0], grid[-1])
    upper_index = torch.searchsorted(grid, scaled_values).clamp(1, len(grid) - 1)
    min_errors = torch.minimum((grid[upper_index] - scaled_values).abs(), (scaled_values - grid[upper_index - 1]).abs())
    errors = (result.dequantize() / scales - scaled_values).abs()
    assert (errors <= min_errors + 1e-6 * scaled_values.abs() + 1e-12).all()


@each_format
@few_examples
@given(seed=seeds, exponent=exponents)
def test_host_and_device_dequantize_to_the_same_values(dtype, seed, exponent):
    values = make_normal_values(seed, exponent)
    rows = torch.tensor([0, 5, 127])
    for operand in ("a", "b"):
        result = quantize(dtype, values, operand)
        assert torch.equal(result.dequantize_on_host(rows), result.dequantize(torch.float64)[rows])


@pytest.mark.parametrize(("dtype", "max_exponent"), [("mxfp8", 8), ("mxfp4", 2)])
@few_examples
@given(seed=seeds, exponent=exponents)
def test_mx_scales_are_the_powers_of_two_that_ocp_defines(dtype, max_exponent, seed, exponent):
    values = make_normal_values(seed, exponent)
    scales = decode_scales(quantize(dtype, values).scales, DTYPES[dtype].scaled_format.a_scaling)
    block_max = values.abs().view(128, -1, 32).amax(-1)
    assert torch.equal(scales, torch.exp2(torch.floor(torch.log2(block_max.double())) - max_exponent).float())


@pytest.mark.parametrize("dtype", ["fp8_rowwise", "fp8_1x128_1x128", "fp8_1x128_128x128"])
@pytest.mark.parametrize("operand", ["a", "b"])
@few_examples
@given(seed=seeds, exponent=exponents)
def test_the_largest_value_of_a_block_becomes_the_largest_number_of_the_format(dtype, operand, seed, exponent):
    result = quantize(dtype, make_normal_values(seed, exponent), operand)
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
