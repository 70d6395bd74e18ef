"""Test the matmuls of quack-kernels with a simulated quack, which accepts only what release 0.6.5 accepts."""

import importlib
import importlib.util
import inspect
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from mamf.engine.measure import measure_row
from mamf.engine.regimes import BurstRegime, StoppingRule
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape
from mamf.plugins.discovery import open_backend
from mamf.testing import KernelContract

PROBLEM, SHAPE = MatmulProblem(), MatmulShape(96, 80, 64)
IS_INSTALLED = importlib.util.find_spec("quack") is not None


@dataclass(frozen=True)
class GemmConfig:
    """A fake of ``GemmConfig`` in quack 0.6.5, with all its fields. mamf sets some of them."""

    tile_m: int = 128
    tile_n: int = 192
    tile_k: int | None = None
    num_warps: int | None = None
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1
    cluster_k: int = 1
    split_k: int = 1
    swap_ab: bool = False
    max_swizzle_size: int = 8
    device_capacity: int = 9
    use_tma_gather: bool = False


def gemm(A, B, out, C=None, bias=None, alpha=1.0, beta=1.0, *, config=None):
    """Multiply A by B. The parameters are the first ones of ``gemm_tuned.fn`` in quack, and ``config``."""
    torch.mm(A, B, out=out)


@pytest.fixture
def device(cuda, monkeypatch):
    """Return a simulated H100 with a simulated quack-kernels."""

    contents = {
        "quack": {},
        "quack.gemm_config": {"GemmConfig": GemmConfig},
        "quack.gemm_interface": {"gemm_tuned": SimpleNamespace(fn=gemm)},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return cuda.kind(0)


class TestQuack(KernelContract):
    @pytest.fixture(params=["quack", "quack[128x192/c2x1/pingpong]"])
    def kernel(self, request):
        return make_matmul_kernel(request.param)

    @pytest.fixture
    def backend(self, device):
        return device

    @pytest.fixture(params=["bfloat16", "float16"])
    def problem(self, request):
        return MatmulProblem(request.param, request.param)


def measure_one_row(name, device):
    pool = device.make_operand_pool("normal", 0)
    return measure_row(
        make_matmul_kernel(name), PROBLEM, SHAPE, BurstRegime(device), pool, StoppingRule(max_seconds=0.0)
    )


def test_configurations_are_variants_and_a_configuration_is_its_only_variant(device):
    variants = make_matmul_kernel("quack").list_variants(device, PROBLEM, SHAPE)
    assert len({variant.name for variant in variants}) == len(variants) >= 4
    assert all(make_matmul_kernel(variant.name).name == variant.name for variant in variants)
    assert [each.name for each in make_matmul_kernel(variants[1].name).list_variants(device, PROBLEM, SHAPE)] == [
        variants[1].name
    ]


@pytest.mark.parametrize("layout", MATMUL_LAYOUTS)
def test_a_shape_with_unaligned_rows_is_unsupported(layout):
    problem = MatmulProblem(layout=layout)
    assert make_matmul_kernel("quack").explain_unsupported_shape(problem, MatmulShape(64, 64, 64)) is None
    assert "multiple of 8" in make_matmul_kernel("quack").explain_unsupported_shape(problem, MatmulShape(64, 60, 64))


@pytest.mark.parametrize("problem", [MatmulProblem("bfloat16", "float32"), MatmulProblem("int8", "int32"),
                                     MatmulProblem(fast_accumulation=True)], ids=str)  # fmt: skip
def test_an_unsupported_problem_is_explained(device, problem):
    assert make_matmul_kernel("quack").explain_unsupported_problem(device, problem)


def test_a_quack_of_another_release_is_unsupported(device, monkeypatch):
    monkeypatch.delattr(sys.modules["quack.gemm_interface"], "gemm_tuned")
    row = measure_one_row("quack", device)
    assert (row.status, "differs from 0.6" in row.reason) == ("unsupported", True)


def test_a_configuration_that_quack_refuses_is_unsupported(device, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("tile_n must be a multiple of 16")

    monkeypatch.setattr(sys.modules["quack.gemm_interface"].gemm_tuned, "fn", refuse)
    assert measure_one_row("quack", device).status == "unsupported"


def test_without_quack_or_its_hardware_the_reason_says_what_is_missing(cuda, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert (
        make_matmul_kernel("quack").explain_unavailability(cuda.kind(0)).remedy
        == "pip install 'quack-kernels>=0.6.5,<0.7'"
    )
    assert "NVIDIA" in make_matmul_kernel("quack").explain_unavailability(open_backend("cpu")).reason


@pytest.mark.skipif(not IS_INSTALLED, reason="quack-kernels is not installed")
def test_the_simulated_quack_has_the_parameters_of_the_installed_one():
    real = importlib.import_module("quack.gemm_config").GemmConfig
    assert list(inspect.signature(GemmConfig).parameters) == list(inspect.signature(real).parameters)
    parameters = inspect.signature(importlib.import_module("quack.gemm_interface").gemm_tuned.fn).parameters
    assert set(inspect.signature(gemm).parameters) <= set(parameters)
