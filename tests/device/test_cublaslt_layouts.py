"""Test cuBLASLt's algorithms on a card: ``python -m pytest tests/device/test_cublaslt_layouts.py``."""

import pytest
from this_accelerator import ACCELERATOR

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape

SHAPE = MatmulShape(1024, 1152, 2048)
WIDE_DTYPES = [
    *(("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32")),
    *(("tf32", "float32"), ("float32", "float32"), ("float64", "float64")),
]
NARROW_DTYPES = [("int8", "int32"), ("int8", "int8"), ("float8_e4m3fn", "bfloat16"), ("float8_e5m2", "bfloat16")]
NARROW_DTYPES += [("float8_e4m3fn", "float16"), ("float8_e4m3fn", "float32")]

if reason := make_matmul_kernel("cublaslt").explain_unavailability(ACCELERATOR):
    pytest.skip(str(reason), allow_module_level=True)


def measure_kernel(name, problem, shape=SHAPE):
    if reason := make_matmul_kernel(name).explain_unsupported_problem(ACCELERATOR, problem):
        pytest.skip(reason)
    pool = ACCELERATOR.make_operand_pool(problem.data, problem.seed)
    return measure_row(
        make_matmul_kernel(name), problem, shape, BurstRegime(ACCELERATOR), pool, StoppingRule(max_seconds=0.05)
    )


@pytest.mark.parametrize("padding", ["", "+8"])
@pytest.mark.parametrize("layout", MATMUL_LAYOUTS)
@pytest.mark.parametrize(("dtype", "out_dtype"), WIDE_DTYPES)
def test_every_layout_is_right(dtype, out_dtype, layout, padding):
    row = measure_kernel("cublaslt", MatmulProblem(dtype, out_dtype, layout + padding))
    assert row.ok, row.reason


@pytest.mark.parametrize("data", ["normal", "uniform", "integers"])
@pytest.mark.parametrize(("dtype", "out_dtype"), NARROW_DTYPES)
def test_operands_of_8_bits_are_right(dtype, out_dtype, data):
    row = measure_kernel("cublaslt", MatmulProblem(dtype, out_dtype, data=data))
    assert row.ok, row.reason
    assert out_dtype != "int8" or row.relative_error == 0


@pytest.mark.parametrize("name", ["cublaslt", "cublaslt-scaled"])
def test_fast_accumulation_is_right(name):
    dtype = "float8_e4m3fn" if name == "cublaslt" else "fp8_rowwise"
    row = measure_kernel(name, MatmulProblem(dtype, fast_accumulation=True))
    assert row.ok, row.reason


@pytest.mark.parametrize("dtype", ["fp8_rowwise", "fp8_1x128_128x128", "fp8_1x128_1x128", "mxfp8", "nvfp4"])
def test_a_scaled_format_is_right_or_the_library_lacks_it(dtype):
    row = measure_kernel("cublaslt-scaled", MatmulProblem(dtype))
    assert row.status in ("ok", "unsupported"), row.reason
    assert row.ok or "CUBLAS_STATUS" in row.reason or "proposes 0 algorithms" in row.reason


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("bfloat16", "bfloat16"), ("int8", "int32"), ("float8_e4m3fn", "bfloat16")]
)
def test_eight_proposals_are_right_on_a_large_shape(dtype, out_dtype):
    problem = MatmulProblem(dtype, out_dtype)
    rows = [measure_kernel(f"cublaslt[{rank}]", problem, MatmulShape(8192, 8192, 8192)) for rank in range(8)]
    reasons = {row.kernel: row.reason for row in rows if not row.ok}
    assert all("cuBLASLt proposes" in reason for reason in reasons.values()), reasons
    assert len(reasons) < 4
