"""Test the cuBLASLt kernels on a simulated H100, with a fake libcublasLt that computes on the host."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch
from fake_cublaslt import EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED, FakeCublasLt, install
from verdicts import verified

from mamf.backend import Unavailability
from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.engine.runner import RunSetup
from mamf.engine.strategies.rows import OneKernelStrategy
from mamf.errors import UnavailableError, UsageError
from mamf.operations.matmul import cublaslt_library
from mamf.operations.matmul.operation import choose_search_kernels, make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape
from mamf.plans import ALGORITHM_PHASE, MATMUL, SWEEP, Plan
from mamf.testing import KernelContract

SHAPE = MatmulShape(96, 80, 64)
PROBLEM = MatmulProblem()
WIDE_DTYPES = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
    ("tf32", "float32"),
    ("float32", "float32"),
    ("float64", "float64"),
]
NARROW_DTYPES = [
    ("int8", "int32"),
    ("int8", "int8"),
    *((dtype, out) for dtype in ("float8_e4m3fn", "float8_e5m2") for out in ("bfloat16", "float16", "float32")),
]
#: ``load_cublaslt`` without its cache, so that each call searches for the library.
load_without_cache = cublaslt_library.load_cublaslt.__wrapped__
SCALED_FORMATS = ("fp8_rowwise", "fp8_1x128_128x128", "fp8_1x128_1x128", "mxfp8", "nvfp4")


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch, FakeCublasLt())


@pytest.fixture
def h100(cuda, library):
    return cuda.kind(0)


def prepare_kernel(backend, name="cublaslt", problem=PROBLEM, shape=SHAPE, **options):
    return make_matmul_kernel(name).prepare(
        backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed), **options
    )


def measure_kernel(backend, name="cublaslt", problem=PROBLEM, shape=SHAPE):
    pool = backend.make_operand_pool(problem.data, problem.seed)
    return measure_row(
        make_matmul_kernel(name), problem, shape, BurstRegime(backend), pool, StoppingRule(max_seconds=0.0)
    )


class TestCublasLt(KernelContract):
    @pytest.fixture(params=["cublaslt", "cublaslt[4]"])
    def kernel(self, request):
        return make_matmul_kernel(request.param)

    @pytest.fixture
    def backend(self, h100):
        return h100

    @pytest.fixture(params=[("bfloat16", "bfloat16"), ("int8", "int32"), ("int8", "int8")], ids=" ".join)
    def problem(self, request):
        return MatmulProblem(*request.param)


# -- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["", "+8", "+1"])
@pytest.mark.parametrize("layout", MATMUL_LAYOUTS)
@pytest.mark.parametrize(("dtype", "out_dtype"), WIDE_DTYPES)
def test_every_layout_and_padding_is_right(h100, dtype, out_dtype, layout, padding):
    problem = MatmulProblem(dtype, out_dtype, layout + padding)
    assert verified(prepare_kernel(h100, problem=problem, sets=2)).ok


@pytest.mark.parametrize("layout", ["nt", "nt+24"])
@pytest.mark.parametrize(("dtype", "out_dtype"), NARROW_DTYPES)
def test_operands_of_8_bits_are_right(h100, dtype, out_dtype, layout):
    assert measure_kernel(h100, problem=MatmulProblem(dtype, out_dtype, layout)).ok


@pytest.mark.parametrize("dtype", SCALED_FORMATS)
def test_scaled_formats_are_right(h100, dtype):
    needed_dtype = {"mxfp8": "float8_e8m0fnu", "nvfp4": "float4_e2m1fn_x2"}.get(dtype, "float8_e4m3fn")
    if not hasattr(torch, needed_dtype):
        pytest.skip(f"torch {torch.__version__} has no {needed_dtype}")
    row = measure_kernel(h100, "cublaslt-scaled[1]", MatmulProblem(dtype), MatmulShape(192, 256, 384))
    assert row.ok


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "compute_type"),
    [
        ("float16", "float16", 68),
        ("float32", "float32", 68),
        ("tf32", "float32", 77),
        ("float64", "float64", 70),
        ("int8", "int8", 72),
    ],
)
def test_the_compute_type_follows_the_dtype(h100, library, dtype, out_dtype, compute_type):
    prepare_kernel(h100, problem=MatmulProblem(dtype, out_dtype))
    ((count, workspace_bytes, requested_compute_type, attributes),) = library.heuristic_requests
    assert (count, requested_compute_type, 25 in attributes) == (8, compute_type, False)
    assert workspace_bytes >= 32 * 2**20


@pytest.mark.parametrize("name", ["cublaslt", "cublaslt-scaled"])
def test_fast_accumulation_is_requested(h100, library, name):
    problem = MatmulProblem("float8_e4m3fn" if name == "cublaslt" else "fp8_rowwise", fast_accumulation=True)
    prepare_kernel(h100, name, problem)
    assert library.heuristic_requests[0][3][25] == 1


# -- int8 outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["normal", "uniform"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda output: output[5, 7].add_(2),
        lambda output: output[:16, :16].zero_(),
        lambda output: output[:16, :16].copy_(output[16:32, 16:32].clone()),
        lambda output: output.copy_(output.roll(1, 0)),
        lambda output: output.neg_(),
    ],
    ids=["entry", "unwritten tile", "wrong tile", "rows moved", "sign"],
)
def test_wrong_int8_outputs_are_refused_and_located(h100, library, data, spoil):
    ready = prepare_kernel(h100, problem=MatmulProblem("int8", "int8", data=data), shape=MatmulShape(256, 512, 2048))
    library.spoil = spoil
    result = ready.launches[0]()
    verdict = ready.verify_whole_output(0, result)
    assert not verdict.ok
    assert verdict.error > 0
    assert ready.locate_wrong_cells(0, result).cells


def test_int8_outputs_may_round_to_either_side_only_halfway(h100, library):
    """Check that int8 outputs halfway between two integers may be rounded up or down. Larger errors are wrong.

    The operands are integers from -2 to 2, so all sums are exact, and half of the sums are odd. With this K the output
    scale is 1/2, so the output of an odd sum is halfway between two integers.
    """
    problem = MatmulProblem("int8", "int8", data="integers")
    shape = MatmulShape(64, 64, 256)
    assert problem.compute_output_scale(shape.k) == 0.5
    pool = h100.make_operand_pool("integers", 0)
    ready = make_matmul_kernel("cublaslt").prepare(h100, problem, shape, pool)
    a = pool.take_buffer("a", 64 * 256, "int8").view(64, 256).double()
    b = pool.take_buffer("b", 64 * 256, "int8").view(64, 256).double()
    exact_output = (a @ b.t()) / 2
    # Halves are rounded up, not to even.
    library.spoil = lambda output: output.copy_(torch.floor(exact_output + 0.5).t().to(torch.int8))
    result = ready.launches[0]()
    assert ready.verify_whole_output(0, result).ok
    assert ready.verify(0, result).ok
    library.spoil = lambda output: output.copy_(torch.floor(exact_output).t().sub(1).to(torch.int8))
    result = ready.launches[0]()
    assert not ready.verify_whole_output(0, result).ok
    assert not ready.verify(0, result).ok


# -- proposals -------------------------------------------------------------------------------------------------------


def test_a_proposal_is_bound_once_and_launched(h100, library):
    ready = prepare_kernel(h100, "cublaslt[3]")
    assert len(library.heuristic_requests) == 1
    for _ in range(2):
        ready.launches[0]()
    assert library.launched_ranks == [3, 3]


def test_a_search_tries_as_many_algorithms_as_it_requests_from_the_heuristic(h100):
    variants = make_matmul_kernel("cublaslt").list_variants(h100, PROBLEM, SHAPE)
    assert [variant.name for variant in variants] == [f"cublaslt[{rank}]" for rank in range(8)]
    rows = [measure_kernel(h100, variant.name) for variant in variants[3:6]]
    assert [row.status for row in rows] == ["ok", "ok", "unsupported"]
    assert [each.name for each in make_matmul_kernel("cublaslt[2]").list_variants(h100, PROBLEM, SHAPE)] == [
        "cublaslt[2]"
    ]


def test_descriptors_are_destroyed_with_the_launch(h100, library):
    ready = prepare_kernel(h100, sets=2)
    gc.collect()
    assert library.live_descriptor_types
    del ready
    gc.collect()
    assert library.live_descriptor_types == []


def test_a_sweep_ranks_the_proposals_and_measures_the_fastest_again(h100, library, monkeypatch):
    plan = Plan(SWEEP, MATMUL, (PROBLEM,), ("cublaslt",), (SHAPE,), seconds=0.01)
    rows = list(OneKernelStrategy(RunSetup(plan, h100, [("cublaslt", make_matmul_kernel("cublaslt"))])).yield_results())
    tried_rows = [row for row in rows if row.phase == ALGORITHM_PHASE]
    (final_row,) = [row for row in rows if not row.phase]
    assert [row.kernel for row in tried_rows] == [f"cublaslt[{rank}]" for rank in range(8)]
    assert [row.status for row in tried_rows] == ["ok"] * 5 + ["unsupported"] * 3
    fastest_row = max((row for row in tried_rows if row.ok), key=lambda row: row.best_rate)
    assert (final_row.status, final_row.kernel) == ("ok", fastest_row.kernel), final_row.reason


def test_a_search_tries_the_kernels_that_the_user_names_or_the_default_ones(h100):
    def list_names(*problem, kernel_names=None):
        return [each.name for each in choose_search_kernels(h100, MatmulProblem(*problem), kernel_names)]

    named_twice = ["cublaslt[2]", "torch.mm", "cublaslt[2]"]
    assert list_names("bfloat16", kernel_names=named_twice) == ["cublaslt[2]", "torch.mm"]
    assert list_names("bfloat16") == ["torch.mm", "cublaslt"]
    assert list_names("int8", "int32") == ["int_mm", "cublaslt"]
    assert list_names("float8_e4m3fn") == ["scaled_mm", "cublaslt"]
    # It must come after F.scaled_mm, which early releases of torch lack.
    assert list_names("mxfp8")[-1] == "cublaslt-scaled"
    # None of the torch functions that models call has int8 outputs.
    assert list_names("int8", "int8") == ["cublaslt"]


def test_a_proposal_is_named_by_its_rank():
    assert (make_matmul_kernel("cublaslt[3]").name, make_matmul_kernel("cublaslt[3]").proposal_index) == (
        "cublaslt[3]",
        3,
    )
    assert (make_matmul_kernel("cublaslt").name, make_matmul_kernel("cublaslt").proposal_index) == ("cublaslt", 0)
    with pytest.raises(UsageError, match=r"torch.mm has no algorithms to choose from: remove \[3\]"):
        make_matmul_kernel("torch.mm[3]")


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "status", "expected"),
    [
        ("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED, "unsupported"),
        ("cublasLtMatmulDescSetAttribute", INVALID_VALUE, "unsupported"),
        ("cublasLtMatmul", NOT_SUPPORTED, "unsupported"),
        ("cublasLtMatmul", INVALID_VALUE, "failed"),
        ("cublasLtMatmul", EXECUTION_FAILED, "failed"),
        ("cublasLtMatrixLayoutCreate", EXECUTION_FAILED, "failed"),
    ],
)
def test_an_error_status_is_named_in_the_reason(cuda, monkeypatch, function, status, expected):
    library = install(monkeypatch, FakeCublasLt(status_by_function={function: status}))
    row = measure_kernel(cuda.kind(0))
    assert row.status == expected
    assert f"{function} returned CUBLAS_STATUS_" in row.reason
    gc.collect()
    assert library.live_descriptor_types == []


# -- finding the library ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(monkeypatch):
    """Return a dict of libraries by path. ctypes can load these libraries and no others.

    Each value is a library and whether the process has already loaded it. Such a library can only be opened with the
    mode RTLD_NOLOAD.
    """
    libraries_by_path = {}

    def open_library(path, mode=ctypes.DEFAULT_MODE):
        if path not in libraries_by_path or (libraries_by_path[path][1] and mode == ctypes.DEFAULT_MODE):
            raise OSError(f"{path}: cannot open shared object file")
        return libraries_by_path[path][0]

    fake_ctypes = SimpleNamespace(CDLL=open_library, DEFAULT_MODE=ctypes.DEFAULT_MODE)
    monkeypatch.setattr(cublaslt_library, "ctypes", fake_ctypes)
    monkeypatch.setattr(cublaslt_library, "sys", SimpleNamespace(platform="linux", path=["/site"]))
    return libraries_by_path


def test_the_library_that_torch_has_loaded_comes_first(files):
    loaded_library, library_in_wheel = FakeCublasLt(120901), FakeCublasLt(130100)
    files["libcublasLt.so.12"] = loaded_library, True
    files["/site/nvidia/cu13/lib/libcublasLt.so.13"] = library_in_wheel, False
    assert load_without_cache().version == (12, 9, 1)


@pytest.mark.parametrize(
    "path",
    ["/site/nvidia/cu13/lib/libcublasLt.so.13", "/site/nvidia/cublas/lib/libcublasLt.so.12", "libcublasLt.so.13"],
)
def test_the_library_is_found_in_a_wheel_or_the_system(files, path):
    files[path] = FakeCublasLt(), False
    assert load_without_cache().version == (13, 1, 0)


def test_an_unknown_release_is_unavailable(cuda, files, monkeypatch):
    files["libcublasLt.so.13"] = FakeCublasLt(140002), False
    monkeypatch.setattr(cublaslt_library, "load_cublaslt", load_without_cache)
    reason = make_matmul_kernel("cublaslt").explain_unavailability(cuda.kind(0))
    assert reason.reason == "cuBLASLt 14.0.2 is not supported, only versions 12 and 13"
    assert reason.remedy


def test_without_the_library_it_says_how_to_get_it(cuda, files, monkeypatch):
    monkeypatch.setattr(cublaslt_library, "load_cublaslt", load_without_cache)
    reason = make_matmul_kernel("cublaslt-scaled").explain_unavailability(cuda.kind(0))
    assert isinstance(reason, Unavailability)
    assert "libcublasLt" in reason.reason
    assert "torch" in reason.remedy
    with pytest.raises(UnavailableError):
        choose_search_kernels(cuda.kind(0), PROBLEM, ["cublaslt"])
