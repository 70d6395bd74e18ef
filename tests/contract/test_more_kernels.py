"""Test TunableOp, torch.compile, and how mamf treats functions that torch lacks or refuses to run."""

import pytest
import torch
from verdicts import verified

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.errors import UnavailableError
from mamf.operations.matmul.operation import choose_search_kernels, make_matmul_kernel
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.plugins.discovery import make_kernel, make_operation, open_backend
from mamf.testing import KernelContract

SHAPE = MatmulShape(96, 80, 64)
PROBLEM = MatmulProblem()


def prepare_kernel(backend, name, problem=PROBLEM, shape=SHAPE, **options):
    return make_matmul_kernel(name).prepare(
        backend, problem, shape, backend.make_operand_pool(problem.data, problem.seed), **options
    )


# -- tunableop -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tunable(rocm, monkeypatch):
    """Simulate torch.cuda.tunable of a ROCm build, which is off by default. Return its state."""
    state = {"enabled": False, "tuning": False}
    for name, key in (("enable", "enabled"), ("tuning_enable", "tuning")):
        monkeypatch.setattr(torch.cuda.tunable, name, lambda on=True, key=key: state.update({key: on}))
    for name, key in (("is_enabled", "enabled"), ("tuning_is_enabled", "tuning")):
        monkeypatch.setattr(torch.cuda.tunable, name, lambda key=key: state[key])
    return state


class TestTunableOp(KernelContract):
    @pytest.fixture
    def backend(self, rocm, tunable):
        return rocm.kind(0)

    @pytest.fixture
    def kernel(self):
        return make_matmul_kernel("tunableop")

    @pytest.fixture
    def problem(self):
        return MatmulProblem("float32", "float32")


@pytest.mark.parametrize(
    "initial_state", [{"enabled": False, "tuning": False}, {"enabled": True, "tuning": False}], ids=str
)
def test_tuning_is_on_while_the_kernel_runs_and_is_restored_afterward(rocm, tunable, initial_state):
    tunable.update(initial_state)
    with make_matmul_kernel("tunableop").apply_settings(rocm.kind(0), MatmulProblem("float32", "float32")):
        assert tunable == {"enabled": True, "tuning": True}
        assert torch.get_float32_matmul_precision() == "highest"
    assert tunable == initial_state


def test_tuning_is_restored_after_an_error(rocm, tunable):
    with pytest.raises(ValueError), make_matmul_kernel("tunableop").apply_settings(rocm.kind(0), PROBLEM):
        raise ValueError
    assert tunable == {"enabled": False, "tuning": False}


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiling_cpu():
    """Return the CPU backend. Skip the test if Inductor cannot compile for this CPU."""
    backend = open_backend("cpu")
    if reason := make_matmul_kernel("compiled").explain_unavailability(backend):
        pytest.skip(str(reason))
    return backend


def test_a_compiled_matmul_is_right_and_returns_a_new_output(compiling_cpu):
    pool = compiling_cpu.make_operand_pool("normal", 0)
    ready = make_matmul_kernel("compiled").prepare(compiling_cpu, PROBLEM, SHAPE, pool)
    c = pool.take_buffer("c", SHAPE.element_counts["c"], PROBLEM.out_dtype, fill=False)
    assert verified(ready).ok
    assert c.isnan().all()
    output = ready.launches[0]()
    assert output.shape == (SHAPE.m, SHAPE.n)
    assert output.data_ptr() != c.data_ptr()


def test_more_shapes_are_compiled_than_dynamo_allows_for_one_function(compiling_cpu):
    """Compile ten shapes. Dynamo compiles a function at most eight times; with ``fullgraph``, the ninth time fails."""
    for k in range(8, 88, 8):
        problem = MatmulProblem("float32", "float32")
        assert verified(prepare_kernel(compiling_cpu, "compiled", problem, MatmulShape(8, 8, k))).ok


def test_a_kernel_that_compiles_slowly_is_tried_only_if_the_user_names_it(compiling_cpu):
    problem = MatmulProblem("float32", "float32")
    assert [each.name for each in choose_search_kernels(compiling_cpu, problem)] == ["torch.mm"]
    assert [each.name for each in choose_search_kernels(compiling_cpu, problem, ["compiled"])] == ["compiled"]


def test_a_missing_compiler_makes_the_compiled_kernel_unavailable(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = make_matmul_kernel("compiled").explain_unavailability(open_backend("cpu"))
    assert "C++ compiler" in reason.reason
    assert reason.remedy


# -- what torch lacks or refuses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("int_mm", torch, "_int_mm"),
        ("scaled_mm", torch, "_scaled_mm"),
        ("tunableop", torch.cuda, "tunable"),
        ("F.scaled_mm", torch.nn.functional, "scaled_mm"),
    ],
)
def test_a_function_that_this_torch_lacks_makes_its_kernel_unavailable(rocm, monkeypatch, name, owner, function):
    monkeypatch.delattr(owner, function, raising=False)
    reason = make_matmul_kernel(name).explain_unavailability(rocm.kind(0))
    assert reason.reason.endswith(function)
    assert "torch" in reason.remedy


def test_a_torch_without_grouped_mm_says_how_to_get_it(monkeypatch):
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    grouped_mm, cpu = make_kernel(make_operation("grouped"), "F.grouped_mm"), open_backend("cpu")
    assert grouped_mm.explain_unavailability(cpu) is None
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    assert grouped_mm.explain_unavailability(cpu) is None, "older releases of torch have torch._grouped_mm instead"
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    assert "torch>=" in grouped_mm.explain_unavailability(cpu).remedy


INT_MM = ("matmul", "int_mm", torch, "_int_mm", {"dtype": "int8"})
SCALED = ("matmul", "F.scaled_mm", torch.nn.functional, "scaled_mm", {"dtype": "mxfp8"})
GROUPED = ("grouped", "F.grouped_mm", torch.nn.functional, "grouped_mm", {"dtype": "bfloat16"})
BROKEN_LAUNCH = RuntimeError("CUDA error: an illegal memory access was encountered")
REFUSED = (
    (INT_MM, NotImplementedError("Could not run 'aten::_int_mm.out' with arguments from the 'CPU' backend.")),
    (INT_MM, RuntimeError("itensor_view_from_dense expects float/bfloat16/half/int8/fp8 tensor input")),
    (INT_MM, RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")),
    (SCALED, RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")),
    (GROUPED, RuntimeError("torch._grouped_mm is only supported on CUDA devices with compute capability >= 8.0")),
    (GROUPED, RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double")),
    (GROUPED, NotImplementedError("Could not run 'aten::_grouped_mm' with arguments from the 'MPS' backend")),
)


@pytest.mark.parametrize(
    ("case", "error", "status"),
    [
        *((case, error, "unsupported") for case, error in REFUSED),
        *((case, BROKEN_LAUNCH, "failed") for case in (INT_MM, SCALED, GROUPED)),
    ],
)
def test_a_launch_that_torch_refuses_is_unsupported_and_one_that_breaks_has_failed(monkeypatch, case, error, status):
    def refuse(*operands, **options):
        raise error

    name, kernel_name, owner, function, fields = case
    if not hasattr(owner, function):
        pytest.skip(f"this torch has no {function}")
    monkeypatch.setattr(owner, function, refuse)
    operation, cpu = make_operation(name), open_backend("cpu")
    shape = operation.parse_shape("e6t96n32k64" if name == "grouped" else "96x256x384")
    pool = cpu.make_operand_pool("normal", 0)
    problem = operation.make_problem(cpu, fields)
    row = measure_row(
        make_kernel(operation, kernel_name), problem, shape, BurstRegime(cpu), pool, StoppingRule(max_seconds=0.0)
    )
    assert (row.status, str(error)[:60] in row.reason) == (status, True)


def test_a_search_tries_the_other_kernels_if_torch_lacks_int_mm(monkeypatch):
    monkeypatch.delattr(torch, "_int_mm")
    cpu = open_backend("cpu")
    assert [each.name for each in choose_search_kernels(cpu, MatmulProblem("float32", "float32"))] == ["torch.mm"]
    with pytest.raises(UnavailableError):
        choose_search_kernels(cpu, MatmulProblem("int8", "int32"))
