"""The same launch thousands of times leaves the same bits, or the device is no good."""

import pytest
import torch

from mamf.engine.repeating import Repeating
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.selection import kernel
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.operand_sets import queue_checksum
from mamf.plugins.discovery import open_backend
from mamf.testing import Physics, SimulatedBackend, SimulatedMatmul

SHAPE = MatmulShape(4096, 4096, 4096)


class Choosy(SimulatedMatmul):
    """As a library is that asks for whole tiles, and tells what else it lacks when it is launched."""

    def unsupported_shape(self, problem, shape):
        return "it takes multiples of 8" if shape.m % 8 else None

    def refuses(self, error):
        return "NOT_SUPPORTED" in str(error)


def repeated(physics=None, fault=None, launches=5000, shape=SHAPE, backend=None, dtype="bfloat16"):
    backend = backend or SimulatedBackend(physics=physics)
    if fault is not None:
        backend.faults[shape] = fault
    return Repeating(Choosy(), MatmulProblem(dtype), shape, backend, launches).row(backend.operand_pool("normal", 0))


def test_equal_launches_are_equal():
    row = repeated()
    assert (row.status, row.launches) == ("ok", 5000)


def test_a_wrong_result_every_thousandth_launch_is_found():
    row = repeated(Physics(wrong_every=1000))
    assert row.status == "wrong_result"
    assert row.reason == "5 of 5000 equal launches gave different bits than the rest"


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (MemoryError("out of memory"), "failed"),
        (RuntimeError("device lost"), "failed"),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), "unsupported"),
        ("wrong_result", "wrong_result"),
    ],
)
def test_whatever_else_goes_wrong_is_a_status(fault, status):
    row = repeated(fault=fault)
    assert row.status == status
    assert row.reason


def test_a_device_without_room_is_out_of_memory():
    assert repeated(Physics(memory_bytes=1000)).status == "out_of_memory"


@pytest.mark.parametrize("asked", [{"shape": MatmulShape(4095, 4096, 4096)}, {"dtype": "int8"}])
def test_what_the_kernel_cannot_do_is_not_launched(asked):
    backend = SimulatedBackend()
    assert repeated(backend=backend, **asked).status == "unsupported"
    assert backend.launches == 0


def test_a_backend_that_fails_in_answering_is_a_status(monkeypatch):
    monkeypatch.setattr(SimulatedBackend, "is_out_of_memory", lambda self, error: 1 / 0)
    row = repeated(fault=RuntimeError("device lost"))
    assert (row.status, row.reason) == ("failed", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(("missed", "status"), [(1, "ok"), (6, "implausible"), (10, "implausible")])
def test_blocks_that_the_timer_missed_are_set_aside(missed, status, monkeypatch):
    readings = iter([0.0] * missed + [0.1] * (10 - missed))
    monkeypatch.setattr(SimulatedBackend, "seconds_between", lambda self, start, end: next(readings))
    row = repeated(launches=1000)
    assert (row.status, len(row.samples), len(row.implausible_samples)) == (status, 10 - missed, missed)


def test_torchs_products_on_a_cpu_are_equal_and_their_checksums_see_a_bit():
    backend = open_backend("cpu")
    shape, problem = MatmulShape(64, 48, 32), MatmulProblem("float32", "float32")
    row = Repeating(kernel("torch.mm"), problem, shape, backend, 20).row(backend.operand_pool("normal", 0))
    assert row.ok, row.reason
    c = torch.randn(8, 4096)
    before = queue_checksum(c)()
    assert queue_checksum(c.clone())() == before
    c.view(torch.int32)[3, 77] ^= 1
    assert queue_checksum(c)() != before


def test_words_that_change_places_show():
    c = torch.randn(2, 4096)
    before = queue_checksum(c)()
    c[0, 1], c[0, 2] = c[0, 2].clone(), c[0, 1].clone()
    assert queue_checksum(c)() != before
