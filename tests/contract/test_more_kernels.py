"""Kernels that a search tries beside the library's default: TunableOp, torch.compile."""

import pytest
import torch
from verdicts import verified

from mamf.errors import UnavailableError
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.selection import kernel, kernels_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.plugins.discovery import open_backend
from mamf.testing import KernelContract

SHAPE = MatmulShape(96, 80, 64)
PROBLEM = MatmulProblem()


def prepared(backend, name, problem=PROBLEM, shape=SHAPE, **options):
    return kernel(name).prepare(backend, problem, shape, backend.operand_pool(problem.data, problem.seed), **options)


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
