"""Test the names of dtypes, and the largest errors that count as rounding."""

import pytest

from mamf.dtypes import DTYPES, OPERAND_DTYPES, canonicalize_dtype_name, compute_error_tolerance


@pytest.mark.parametrize(
    ("alias", "name"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("FP32", "float32"), ("e4m3", "fp8"), ("tf32", "tf32")],
)
def test_aliases_mean_one_dtype(alias, name):
    assert canonicalize_dtype_name(alias) == name


def test_float32_computed_as_tf32_fails_as_float32():
    assert (
        compute_error_tolerance("float32", "float32", False)
        < 2.8e-4
        < compute_error_tolerance("tf32", "float32", False)
    )


@pytest.mark.parametrize("dtype", [name for name in OPERAND_DTYPES if DTYPES[name].itemsize > 1 or name == "int8"])
def test_one_wrong_element_of_256_exceeds_the_tolerance(dtype):
    assert compute_error_tolerance(dtype, DTYPES[dtype].default_output_dtype, False) < 1 / 16
