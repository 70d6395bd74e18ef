"""Test ``mamf run`` in virtual time: which launches of a kernel are inside the profiler's window."""

import dataclasses
from contextlib import contextmanager

import pytest

from mamf.engine.launching import launch_in_profiler_window
from mamf.errors import DeviceError
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import SimulatedBackend, SimulatedMatmul

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend"]
RUN_MATMUL = ["run", "mamf.testing:SimulatedMatmul", *SIMULATED, "--shape", "4096x4096x4096"]
SHAPE = MatmulShape(4096, 4096, 4096)


@pytest.fixture
def windows(monkeypatch):
    """Return a list with an entry for each profiler window: name, launches before it, launches inside it, device."""
    windows = []

    @contextmanager
    def window(self, name):
        before = self.launch_count
        yield
        windows.append((name, before, self.launch_count - before, self))

    monkeypatch.setattr(SimulatedBackend, "open_profiler_window", window)
    return windows


@pytest.mark.parametrize(
    ("options", "count_before", "count_within"), [([], 1, 1), (["--launches", "5"], 1, 5), (["--no-verify"], 1, 1)]
)
def test_the_window_contains_exactly_the_requested_launches(run, windows, options, count_before, count_within):
    code, out, err = run(*RUN_MATMUL, *options)
    assert (code, err) == (0, "")
    ((name, *launches, device),) = windows
    assert (name, launches) == ("simulated.mm 4096x4096x4096", [count_before, count_within])
    assert device.launch_count == count_before + count_within
    assert ("not verified" in out) == ("--no-verify" in options)


def test_a_wrong_result_is_refused(run, monkeypatch):
    initialize = SimulatedBackend.__init__

    def initialize_with_fault(self, *arguments):
        initialize(self, *arguments)
        self.faults[SHAPE] = "wrong_result"

    monkeypatch.setattr(SimulatedBackend, "__init__", initialize_with_fault)
    code, out, err = run(*RUN_MATMUL)
    assert (code, out) == (1, "")
    assert "relative error 1 against float64; the limit is 0.008" in err
    assert run(*RUN_MATMUL, "--no-verify")[0] == 0


@pytest.mark.parametrize(
    ("error", "message"), [(RuntimeError("an illegal instruction"), "failed: RuntimeError"), (MemoryError(), "failed")]
)
def test_an_error_of_a_launch_is_reported_in_one_line(backend, error, message):
    backend.faults[SHAPE] = error
    with pytest.raises(DeviceError, match=message):
        launch_in_profiler_window(SimulatedMatmul(), MatmulProblem(), SHAPE, backend)


@pytest.mark.parametrize(
    ("digests", "message"),
    [
        (iter("aaaaaaaaaa"), "gave bitwise equal results"),
        (iter("aaaabaaaaa"), "did not all give bitwise equal results"),
    ],
)
def test_determinism_compares_the_results_of_further_launches(run, monkeypatch, digests, message):
    monkeypatch.setattr(SimulatedBackend, "compute_digest", lambda self, result: next(digests))
    code, out, _ = run(*RUN_MATMUL, "--determinism")
    assert code == 0
    assert message in out


def test_results_without_a_checksum_are_not_called_bitwise_equal(run, monkeypatch):
    prepare = SimulatedMatmul.prepare
    monkeypatch.setattr(
        SimulatedMatmul,
        "prepare",
        lambda self, *arguments, **options: dataclasses.replace(
            prepare(self, *arguments, **options), queue_checksum=None
        ),
    )
    out = run(*RUN_MATMUL, "--determinism")[1]
    assert "is unknown" in out
    assert "bitwise equal" not in out


def test_the_parts_of_eager_attention_are_a_table(run):
    pytest.importorskip("torch")
    sizes = ["--seq-lens", "64", "--heads", "2", "--kv-heads", "1", "--head-dims", "8", "--batch", "1"]
    code, out, err = run("run", "eager", "--backend", "cpu", "--dtype", "fp32", *sizes, "--parts", "--launches", "2")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["scores", "softmax", "values"]
    # These parts take 16, 5 and 16 FLOP per score.
    assert [row[4] for row in rows] == ["43.2%", "13.5%", "43.2%"]
    code, _, err = run("run", "sdpa", "--backend", "cpu", "--dtype", "fp32", *sizes, "--parts")
    assert (code, "its parts cannot be timed" in err) == (2, True)
