"""Test that ``mamf verify`` finds changed bits, wrong tiles and lost special values in the output of a kernel."""

import pytest
import torch

from mamf.engine.regimes.base import CheckedKernel, WrongResultError
from mamf.operations.matmul.operation import make_problem
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.matmul.torch_kernels import TorchMm
from mamf.operations.operand_sets import queue_checksum
from mamf.plugins.discovery import open_backend

SHAPE = MatmulShape(200, 330, 70)


class SpoiledMm(TorchMm):
    """A kernel that runs torch.mm and then lets ``spoil`` change C."""

    name = "spoiled"

    def __init__(self, spoil):
        self.spoil = spoil

    def bind_operands(self, problem, a, b, c):
        return lambda: (torch.mm(a, b, out=c), self.spoil(c))[0], 1.0


def prepare_checked_kernel(spoil, dtype="float32", layout="nt", data="normal"):
    backend = open_backend("cpu")
    problem = make_problem(backend, dtype, layout=layout, data=data)
    return backend, CheckedKernel(SpoiledMm(spoil).prepare(backend, problem, SHAPE, backend.make_operand_pool(data, 0)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("data", ["normal", "wide"])
def test_a_right_kernel_keeps_its_bits_and_special_values(dtype, data):
    backend, right = prepare_checked_kernel(lambda c: None, dtype, "tn", data)
    compare = right.prepared.remember_output(0, right.launches[0]())
    right.poison_outputs()
    assert not compare(right.launches[0]())().cells
    assert right.prepared.verify_special_values().ok
    right.warm_up_and_verify(backend)


def test_one_flipped_bit_is_found_and_located():
    flips = iter([False, True])
    _, wrong = prepare_checked_kernel(lambda c: c.view(torch.int32)[130, 70].bitwise_xor_(1) if next(flips) else None)
    difference = wrong.prepared.remember_output(0, wrong.launches[0]())(wrong.launches[0]())()
    assert (difference.cells, difference.value_count) == ({(0, 2, 1)}, 200 * 330)


@pytest.mark.parametrize("spoil", [torch.Tensor.zero_, lambda tile: tile.mul_(2), lambda tile: tile.fill_(torch.nan)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_wrong_tiles_are_located_without_a_right_output(spoil, dtype):
    backend, wrong = prepare_checked_kernel(lambda c: spoil(c[64:128, 256:320]), dtype)
    with pytest.raises(WrongResultError) as caught:
        wrong.warm_up_and_verify(backend)
    assert caught.value.verdict.details["wrong tiles"] == "1 wrong tile of 64x64: row 1 column 4 of matmul 0"


@pytest.mark.parametrize("spoil", [lambda c: c.nan_to_num_(0.0), lambda c: c.clamp_(-1e4, 1e4)])
def test_lost_infinities_and_nan_are_found(spoil):
    _, wrong = prepare_checked_kernel(spoil, "float16")
    assert "an infinity" in wrong.prepared.verify_special_values().reason


@pytest.mark.parametrize("value", [torch.nan, 1.0])
def test_a_wrong_product_of_a_subnormal_number_is_found(value):
    def spoil(c):
        c[(c.abs() < 1e-30).sum(dim=1) > c.shape[1] // 2] = value

    _, wrong = prepare_checked_kernel(spoil)
    assert "a subnormal number" in wrong.prepared.verify_special_values().reason


def flip_a_bit(c):
    c.view(torch.int32)[1, 77] ^= 1


def swap_two_words(c):
    c[0, 1], c[0, 2] = c[0, 2].clone(), c[0, 1].clone()


@pytest.mark.parametrize("change", [flip_a_bit, swap_two_words])
def test_a_checksum_differs_if_the_data_changed(change):
    c = torch.randn(2, 4096)
    before = queue_checksum(c)()
    assert queue_checksum(c.clone())() == before
    change(c)
    assert queue_checksum(c)() != before
