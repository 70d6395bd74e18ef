"""Products in Gluon: what they refuse. Their results need a card: tests/device/test_hopper_products.py."""

import sys

import pytest
import torch

from mamf.errors import UnsupportedError
from mamf.operations.matmul.operation import choose_search_kernels, make_matmul_kernel
from mamf.operations.matmul.shapes import MATMUL_LAYOUTS, MatmulProblem, MatmulShape

SHAPE = MatmulShape(512, 512, 512)


@pytest.fixture
def device(cuda, monkeypatch):
    """An H100 that Triton drives."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    monkeypatch.setattr("mamf.operations.compilation.get_triton_device_type", lambda: "cuda")
    return cuda.kind(0)


def test_its_tiles_are_kernels_of_their_own(device):
    problem = MatmulProblem()
    variants = make_matmul_kernel("gluon").variants(device, problem, SHAPE)
    assert len({each.name for each in variants}) == len(variants) >= 2
    assert all(make_matmul_kernel(each.name).name == each.name for each in variants)
    assert [each.name for each in make_matmul_kernel(variants[1].name).variants(device, problem, SHAPE)] == [
        variants[1].name
    ]
    assert "gluon" not in [each.name for each in choose_search_kernels(device, problem)]
    assert [each.name for each in choose_search_kernels(device, problem, ["gluon"])] == ["gluon"]


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        *(("gluon", MatmulProblem(layout=layout), f"not {layout}") for layout in MATMUL_LAYOUTS if layout != "nt"),
        ("gluon", MatmulProblem("float32", "float32"), "does not support float32"),
        ("gluon", MatmulProblem("bfloat16", "float32"), "writes bfloat16"),
        ("gluon", MatmulProblem(fast_accumulation=True), "no fast accumulation"),
    ],
)
def test_combinations_are_refused_in_a_line(device, name, problem, reason):
    assert reason in make_matmul_kernel(name).unsupported(device, problem)


def test_rows_in_memory_must_be_aligned():
    assert make_matmul_kernel("gluon").unsupported_shape(MatmulProblem(), MatmulShape(3, 8, 8)) is None
    assert make_matmul_kernel("gluon").unsupported_shape(MatmulProblem(), MatmulShape(3, 8, 12))
    assert make_matmul_kernel("gluon").unsupported_shape(MatmulProblem(), MatmulShape(3, 12, 8))


def test_a_triton_without_this_gluon_is_unsupported(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    a = torch.zeros(64, 64)
    with pytest.raises(UnsupportedError, match="lacks the Gluon"):
        make_matmul_kernel("gluon").bind(MatmulProblem(), a, a, a)
