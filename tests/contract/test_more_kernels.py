"""Kernels that a search tries beside the library's default: cuBLASLt's algorithms, TunableOp, torch.compile."""

import gc
import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from verdicts import verified

from mamf.engine.measure import measure
from mamf.engine.regimes import Burst, StoppingRule
from mamf.errors import UnavailableError, UnsupportedError, UsageError
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.selection import kernel, kernels_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import open_backend
from mamf.testing import KernelContract

SHAPE = MatmulShape(96, 80, 64)
PROBLEM = MatmulProblem()


def prepared(backend, name, problem=PROBLEM, shape=SHAPE, **options):
    return kernel(name).prepare(backend, problem, shape, backend.operand_pool(problem.data, problem.seed), **options)


# -- cublaslt --------------------------------------------------------------------------------------------------------


def simulated_nvmath(calls, proposals=5):
    """nvmath.linalg.advanced as mamf uses it: records each call, computes with torch, knows no keyword of its own."""

    class Matmul:
        def __init__(self, a, b, /, c=None, *, alpha=None, beta=None, options=None):
            calls.append(("Matmul", alpha, beta, options))
            self.operands = (a, b, c)

        def plan(self, *, preferences):
            calls.append(("plan", preferences.limit))
            return [f"algorithm {rank}" for rank in range(min(proposals, preferences.limit))]

        def execute(self, *, algorithm):
            calls.append(("execute", algorithm))
            a, b, c = self.operands
            return torch.mm(a, b, out=c)

        def free(self):
            calls.append(("free",))

    kinds = SimpleNamespace(COMPUTE_32F="32F", COMPUTE_32F_FAST_TF32="32F as TF32")
    return {
        "Matmul": Matmul,
        "MatmulOptions": lambda **options: options,
        "MatmulPlanPreferences": SimpleNamespace,
        "MatmulComputeType": kinds,
    }


@pytest.fixture
def nvmath(cuda, calls, monkeypatch):
    """An H100 with nvmath-python, whose cuBLASLt proposes five algorithms."""
    for name in ("nvmath", "nvmath.linalg", "nvmath.linalg.advanced"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["nvmath.linalg.advanced"]).update(simulated_nvmath(calls))
    backend = cuda.kind(0)
    calls.clear()
    return backend


class TestCublasLt(KernelContract):
    @pytest.fixture(params=["cublaslt", "cublaslt[4]"])
    def kernel(self, request):
        return kernel(request.param)

    @pytest.fixture
    def backend(self, nvmath):
        return nvmath

    @pytest.fixture
    def problem(self):
        return PROBLEM


def test_cublaslt_is_planned_once_and_runs_in_place_what_it_is_asked_for(nvmath, calls):
    ready = prepared(nvmath, "cublaslt[3]")
    options = {"inplace": True, "compute_type": "32F"}
    assert calls == [("Matmul", 1.0, 0.0, options), ("plan", 8)]
    calls.clear()
    assert verified(ready).ok
    ready.launches[0]()
    assert calls == [("execute", "algorithm 3")] * 2


def test_cublaslt_without_a_rank_runs_the_first_choice(nvmath, calls):
    prepared(nvmath, "cublaslt").launches[0]()
    assert ("execute", "algorithm 0") in calls


@pytest.mark.parametrize(
    ("problem", "options"),
    [
        (MatmulProblem("float16", "float16"), {"compute_type": "32F"}),
        (MatmulProblem("float32", "float32"), {"compute_type": "32F"}),
        (MatmulProblem("tf32", "float32"), {"compute_type": "32F as TF32"}),
        (MatmulProblem("float64", "float64"), {}),
    ],
    ids=lambda value: getattr(value, "dtype", ""),
)
def test_cublaslt_computes_as_the_dtype_says(nvmath, calls, problem, options):
    prepared(nvmath, "cublaslt", problem)
    assert calls[0][-1] == {"inplace": True, **options}


def test_a_rank_beyond_what_is_proposed_is_unsupported_and_frees_its_plan(nvmath, calls):
    with pytest.raises(UnsupportedError, match="proposes only 5 algorithms"):
        prepared(nvmath, "cublaslt[5]")
    assert calls[-1] == ("free",)


def test_a_search_tries_as_many_algorithms_as_are_asked_of_the_heuristic(nvmath):
    variants = kernel("cublaslt").variants(nvmath, PROBLEM, SHAPE)
    assert [variant.name for variant in variants] == [f"cublaslt[{rank}]" for rank in range(8)]
    statuses = []
    for variant in variants[3:6]:
        pool = nvmath.operand_pool("normal", 0)
        row = measure(variant, PROBLEM, SHAPE, Burst(nvmath), pool, StoppingRule(seconds=0.0))
        statuses.append((row.kernel, row.status))
    assert statuses == [("cublaslt[3]", "ok"), ("cublaslt[4]", "ok"), ("cublaslt[5]", "unsupported")]


def test_a_plan_is_freed_with_the_launch(nvmath, calls):
    ready = prepared(nvmath, "cublaslt", sets=2)
    gc.collect()
    assert ("free",) not in calls
    del ready
    gc.collect()
    assert calls.count(("free",)) == 2


def test_cublaslt_writes_the_dtype_it_reads(nvmath):
    reason = kernel("cublaslt").unsupported(nvmath, MatmulProblem("bfloat16", "float32"))
    assert "writes bfloat16 for bfloat16, not float32" in reason
    assert "no dtype int8" in kernel("cublaslt").unsupported(nvmath, MatmulProblem("int8", "int32"))


def test_cublaslt_refuses_fast_accumulation_as_torch_mm_does(nvmath):
    problem = MatmulProblem(fast_accumulation=True)
    assert "no fast accumulation" in kernel("torch.mm").unsupported(nvmath, problem)
    assert "no fast accumulation" in (kernel("cublaslt").unsupported(nvmath, problem) or "")


def test_without_nvmath_cublaslt_says_how_to_get_it(cuda, monkeypatch):
    monkeypatch.delitem(sys.modules, "nvmath", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = kernel("cublaslt").unavailable(cuda.kind(0))
    assert "nvmath-python is not installed" in reason.reason
    assert reason.remedy == "pip install 'mamf[cublaslt]'"


def test_cublaslt_is_for_nvidia():
    reason = kernel("cublaslt[2]").unavailable(open_backend("cpu"))
    assert "NVIDIA" in reason.reason
    assert "--backend cuda" in reason.remedy


def test_an_algorithm_is_named_by_its_rank():
    assert (kernel("cublaslt[3]").name, kernel("cublaslt[3]").rank) == ("cublaslt[3]", 3)
    assert (kernel("cublaslt").name, kernel("cublaslt").rank) == ("cublaslt", 0)
    with pytest.raises(UsageError, match=r"torch.mm has no algorithms to choose from: leave \[3\] out"):
        kernel("torch.mm[3]")


def test_what_is_tried_on_nvidia_unasked_and_asked(nvmath):
    asked = ["cublaslt[2]", "torch.mm", "cublaslt[2]"]
    assert [each.name for each in kernels_for(nvmath, PROBLEM)] == ["torch.mm", "cublaslt"]
    assert [each.name for each in kernels_for(nvmath, PROBLEM, asked)] == ["cublaslt[2]", "torch.mm"]


# -- tunableop -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tunable(rocm, monkeypatch):
    """torch.cuda.tunable of a ROCm build: off, as it is until asked for."""
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
        return kernel("tunableop")

    @pytest.fixture
    def problem(self):
        return MatmulProblem("float32", "float32")


@pytest.mark.parametrize("before", [{"enabled": False, "tuning": False}, {"enabled": True, "tuning": False}], ids=str)
def test_tuning_is_on_while_the_kernel_runs_and_then_as_it_was(rocm, tunable, before):
    tunable.update(before)
    with kernel("tunableop").settings(rocm.kind(0), MatmulProblem("float32", "float32")):
        assert tunable == {"enabled": True, "tuning": True}
        assert torch.get_float32_matmul_precision() == "highest"
    assert tunable == before


def test_tuning_is_as_it_was_after_an_error_too(rocm, tunable):
    with pytest.raises(ValueError), kernel("tunableop").settings(rocm.kind(0), PROBLEM):
        raise ValueError
    assert tunable == {"enabled": False, "tuning": False}


def test_the_default_kernel_is_measured_untuned(rocm, tunable):
    with kernel("torch.mm").settings(rocm.kind(0), PROBLEM):
        assert tunable == {"enabled": False, "tuning": False}
    assert [each.name for each in kernels_for(rocm.kind(0), PROBLEM)] == ["torch.mm", "tunableop"]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_tunable_op_is_for_rocm(cuda, name):
    reason = kernel("tunableop").unavailable(open_backend(name))
    assert "ROCm" in reason.reason
    assert "--backend rocm" in reason.remedy


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiling():
    """The CPU, where Inductor can compile."""
    backend = open_backend("cpu")
    if reason := kernel("compiled").unavailable(backend):
        pytest.skip(str(reason))
    return backend


def test_a_compiled_product_is_right_and_returns_its_own_output(compiling):
    pool = compiling.operand_pool("normal", 0)
    ready = kernel("compiled").prepare(compiling, PROBLEM, SHAPE, pool)
    c = pool.take("c", SHAPE.elements["c"], PROBLEM.out_dtype, fill=False)
    assert verified(ready).ok
    assert c.isnan().all()
    output = ready.launches[0]()
    assert output.shape == (SHAPE.m, SHAPE.n)
    assert output.data_ptr() != c.data_ptr()


def test_more_shapes_are_compiled_than_dynamo_keeps_of_one_function(compiling):
    """Eight, and with fullgraph the ninth fails."""
    for k in range(8, 88, 8):
        assert verified(prepared(compiling, "compiled", MatmulProblem("float32", "float32"), MatmulShape(8, 8, k))).ok


@pytest.mark.parametrize("wrong", [lambda a, b: a @ b + 1, lambda a, b: None, lambda a, b: (a @ b)[:1]])
def test_a_compiled_product_that_is_wrong_is_caught(compiling, monkeypatch, wrong):
    monkeypatch.setattr(torch, "compile", lambda function, **options: wrong)
    assert not verified(prepared(compiling, "compiled")).ok


def test_what_compiles_for_long_is_tried_only_when_asked_for(compiling):
    problem = MatmulProblem("float32", "float32")
    assert [each.name for each in kernels_for(compiling, problem)] == ["torch.mm"]
    assert [each.name for each in kernels_for(compiling, problem, ["compiled"])] == ["compiled"]


def test_without_a_compiler_it_is_said(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = kernel("compiled").unavailable(open_backend("cpu"))
    assert "C++ compiler" in reason.reason
    assert reason.remedy


# -- an older torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "owner", "function"),
    [
        ("int_mm", torch, "_int_mm"),
        ("scaled_mm", torch, "_scaled_mm"),
        ("tunableop", torch.cuda, "tunable"),
    ],
)
def test_a_function_that_this_torch_lacks_makes_its_kernel_unavailable(rocm, monkeypatch, name, owner, function):
    monkeypatch.delattr(owner, function)
    reason = kernel(name).unavailable(rocm.kind(0))
    assert f"no torch.{'cuda.' if owner is torch.cuda else ''}{function}" in reason.reason
    assert "torch" in reason.remedy


def test_the_other_kernels_are_found_without_it(monkeypatch):
    monkeypatch.delattr(torch, "_int_mm")
    cpu = open_backend("cpu")
    assert [each.name for each in kernels_for(cpu, MatmulProblem("float32", "float32"))] == ["torch.mm"]
    with pytest.raises(UnavailableError):
        kernels_for(cpu, MatmulProblem("int8", "int32"))


def test_an_nvmath_without_products_is_unsupported(nvmath, monkeypatch):
    monkeypatch.delattr(sys.modules["nvmath.linalg.advanced"], "MatmulPlanPreferences")
    with pytest.raises(UnsupportedError, match="does not support cuBLASLt products"):
        prepared(nvmath, "cublaslt")
