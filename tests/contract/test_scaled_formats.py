"""Test matmuls of scaled formats.

mamf verifies them against their dequantized operands, and reports the quantization error separately.
"""

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType
from verdicts import verified

from mamf.dtypes import DTYPES, SCALED_DTYPES
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.matmul.operation import MatmulOperation, choose_matmul_kernel, make_matmul_kernel
from mamf.operations.matmul.scaled_formats import DequantizedMatmul, FunctionalScaledMm
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.operations.quantization import E2M1_MAGNITUDES
from mamf.plugins.discovery import MATMUL_KERNEL_GROUP, find_entry_points_by_name, open_backend
from mamf.testing import KernelContract

SHAPE = MatmulShape(96, 256, 384)
CASES = [*(("dequantized", dtype) for dtype in SCALED_DTYPES), ("F.scaled_mm", "fp8_rowwise")]
BLOCKS = {
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x16: (1, 16),
}


@pytest.fixture
def backend():
    return open_backend("cpu")


def prepare_kernel(backend, name, dtype, shape=SHAPE, **options):
    problem = MatmulProblem(dtype)
    return make_matmul_kernel(name).prepare(backend, problem, shape, backend.make_operand_pool("normal", 0), **options)


def measure(kernel, backend, problem):
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(kernel, problem, SHAPE, BurstRegime(backend), pool, StoppingRule(max_seconds=0.0))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
class TestOnCpu(KernelContract):
    @pytest.fixture
    def shape(self):
        return SHAPE

    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self, case):
        return make_matmul_kernel(case[0])

    @pytest.fixture
    def problem(self, case):
        return MatmulProblem(case[1])


def test_every_format_has_its_kernels(backend):
    for dtype in SCALED_DTYPES:
        supporting_kernels = {
            name
            for name in find_entry_points_by_name(MATMUL_KERNEL_GROUP)
            if make_matmul_kernel(name).explain_unsupported_problem(backend, MatmulProblem(dtype)) is None
        }
        # cublaslt-scaled, which needs an NVIDIA device, supports all formats except mxfp4, which cuBLASLt lacks.
        assert supporting_kernels - {"cublaslt-scaled"} == {"F.scaled_mm", "dequantized"}
        assert ("cublaslt-scaled" in supporting_kernels) == (dtype != "mxfp4")
        assert choose_matmul_kernel(backend, MatmulProblem(dtype)).name == "F.scaled_mm"


# -- a simulated library that supports all formats ---------------------------------------------------------------------


def unswizzle(flat, rows, columns):
    """Return swizzled scales as a matrix (rows, columns), using the formula in the documentation of cuBLAS."""
    tiles = -(-columns // 4)
    assert flat.is_contiguous()
    assert flat.shape == (-(-rows // 128) * tiles * 512,)
    index = [
        [
            512 * (row // 128 * tiles + column // 4) + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            for column in range(columns)
        ]
        for row in range(rows)
    ]
    return flat.float()[torch.tensor(index)]


def dequantize_operand(operand, scale, recipe, swizzle_scales):
    """Dequantize an operand (rows, K). Check the shapes and strides of its scales as torch's CUDA code does."""
    if operand.dtype == torch.float4_e2m1fn_x2:
        codes = operand.view(torch.uint8)
        table = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
        values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(1)
    else:
        values = operand.float()
    rows, k = values.shape
    if recipe == ScalingType.RowWise:
        return values * scale.reshape(rows, 1)
    block_rows, block_columns = BLOCKS[recipe]
    if recipe == ScalingType.BlockWise1x128:
        assert (scale.shape, scale.stride()) == ((rows, k // 128), (1, rows))
    elif recipe == ScalingType.BlockWise128x128:
        padded_columns = -(-k // 128 // 4) * 4
        assert (scale.shape, scale.stride()) == ((padded_columns, rows // 128), (1, padded_columns))
        scale = scale.t()[:, : k // 128]
    else:
        assert swizzle_scales == SwizzleType.SWIZZLE_32_4_4
        scale_dtypes = {32: torch.float8_e8m0fnu, 16: torch.float8_e4m3fn}
        assert scale.dtype == scale_dtypes[block_columns]
        scale = unswizzle(scale, rows, k // block_columns)
    return values * scale.repeat_interleave(block_rows, 0).repeat_interleave(block_columns, 1)


def simulated_scaled_mm(
    a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a=None, swizzle_b=None, output_dtype=None, use_fast_accum=False
):
    if recipe_a == ScalingType.RowWise:
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        assert scale_b.stride(1) == 1
    left = dequantize_operand(a, scale_a, recipe_a, swizzle_a)
    right = dequantize_operand(b.t(), scale_b, recipe_b, swizzle_b)
    return (left @ right.t()).to(output_dtype)


@pytest.fixture
def blackwell(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", simulated_scaled_mm)


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
def test_operands_and_scales_have_the_layout_that_the_library_reads(backend, blackwell, dtype):
    assert verified(prepare_kernel(backend, "F.scaled_mm", dtype, sets=2)).ok


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
def test_the_quantization_error_is_reported_separately(backend, blackwell, dtype):
    row = measure(FunctionalScaledMm(), backend, MatmulProblem(dtype))
    assert row.ok, row.reason
    assert row.relative_error < 4e-3
    # The range is wide, because mamf computes this error from 16 x 16 entries, which it draws anew each time.
    low, high = (0.01, 0.08) if dtype.endswith("8") or dtype.startswith("fp8") else (0.05, 0.3)
    assert low < row.details["quantization_error"] < high
    assert MatmulOperation().make_columns(row)["quantization error"] == row.details["quantization_error"]


class OffByAScale(FunctionalScaledMm):
    """A matmul that multiplies each row of A by the scales of another row."""

    def bind_operands(self, backend, problem, a, b, c):
        rolled = type(a)(a.elements, a.scales.view(torch.uint8).roll(1, 0).view(a.scales.dtype), a.scaling)
        return super().bind_operands(backend, problem, rolled, b, c)


@pytest.mark.parametrize("dtype", [dtype for dtype in SCALED_DTYPES if dtype != "fp8_rowwise"])
def test_scales_of_another_row_are_wrong(backend, blackwell, dtype):
    assert measure(OffByAScale(), backend, MatmulProblem(dtype)).status == "wrong_result"


# -- unsupported problems and shapes, and byte counts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (MatmulProblem("mxfp8", layout="nn"), "--layout nt"),
        (MatmulProblem("mxfp8", "int32"), "writes C in bfloat16"),
        (MatmulProblem("mxfp8", fast_accumulation=True), "not support fast accumulation"),
    ],
)
def test_an_unsupported_problem_is_explained(backend, problem, message):
    for kernel in (FunctionalScaledMm(), DequantizedMatmul()):
        assert message in kernel.explain_unsupported_problem(backend, problem)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("fp8_1x128_128x128", "128x64x128", "use a multiple of 128 for N"),
        ("mxfp8", "128x128x48", "of 32 for K"),
        ("fp8_rowwise", "128x8x64", "use a multiple of 16 for N"),
    ],
)
def test_blocks_must_be_whole(dtype, shape, message):
    assert message in FunctionalScaledMm().explain_unsupported_shape(MatmulProblem(dtype), MatmulShape.parse(shape))


def test_bytes_are_those_of_values_and_scales():
    shape = MatmulShape(128, 256, 512)
    values = 128 * 512 + 256 * 512
    scales = {
        "fp8_rowwise": (128 + 256) * 4,
        "fp8_1x128_128x128": (128 * 4 + 2 * 4) * 4,
        "fp8_1x128_1x128": (128 + 256) * 4 * 4,
        "mxfp8": (128 + 256) * 16,
        "mxfp4": (128 + 256) * 16,
        "nvfp4": (128 + 256) * 32,
    }
    for dtype in SCALED_DTYPES:
        operand_bytes = values // DTYPES[dtype].scaled_format.values_per_byte + scales[dtype]
        assert MatmulProblem(dtype).compute_work(shape).nbytes == operand_bytes + 128 * 256 * 2
