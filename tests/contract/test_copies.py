"""Test the operation ``copies``: the contract of its kernel, and that a wrong byte is found."""

import pytest

from mamf.operations.copies import CopyProblem, CopyShape
from mamf.operations.copies_kernels import TorchCopies
from mamf.plugins.discovery import make_kernel, make_operation, open_backend
from mamf.testing.contracts import AnyKernelContract


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
class TestCopies(AnyKernelContract):
    @pytest.fixture
    def backend(self):
        return open_backend("cpu")

    @pytest.fixture
    def kernel(self):
        return make_kernel(make_operation("copies"), "torch")

    @pytest.fixture
    def problem(self, direction):
        return CopyProblem(direction)

    @pytest.fixture
    def shape(self):
        return CopyShape(2**16 + 8)


def test_a_copy_to_a_peer_needs_a_second_device():
    backend = open_backend("cpu")
    assert "needs a second device" in TorchCopies().explain_unsupported_problem(backend, CopyProblem("to_peer"))


def test_a_copy_with_a_wrong_byte_is_refused():
    backend = open_backend("cpu")
    problem, shape = CopyProblem("to_host"), CopyShape(4096)
    pool = backend.make_operand_pool(problem.data, problem.seed)
    prepared = TorchCopies().prepare(backend, problem, shape, pool)
    prepared.launches[0]()
    assert prepared.verify(0, None).ok
    pool.take_buffer("own", 4096, "int8")[77] += 1
    assert not prepared.verify(0, None).ok
