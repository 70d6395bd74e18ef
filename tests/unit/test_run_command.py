"""Test ``mamf run`` in virtual time: which launches of a kernel are inside the profiler's window."""

import dataclasses
from contextlib import contextmanager

import pytest

from mamf.engine.launching import launch_in_profiler_window
from mamf.errors import DeviceError
from mamf.operations.matmul.shapes import MatmulProblem, MatmulShape
from mamf.testing import SimulatedBackend, SimulatedMatmul

SIMULATED = ["--backend", "mamf.testing:SimulatedBackend"]
PRODUCT = ["run", "mamf.testing:SimulatedMatmul", *SIMULATED, "--shape", "4096x4096x4096"]
SHAPE = MatmulShape(4096, 4096, 4096)


@pytest.fixture
def windows(monkeypatch):
    """Return a list with an entry for each profiler window: name, launches before it, launches inside it, device."""
    found = []

    @contextmanager
    def window(self, name):
        before = self.launch_count
        yield
        found.append((name, before, self.launch_count - before, self))

    monkeypatch.setattr(SimulatedBackend, "open_profiler_window", window)
    return found


@pytest.mark.parametrize(
    ("given", "before", "within"), [([], 1, 1), (["--launches", "5"], 1, 5), (["--no-verify"], 1, 1)]
)
def test_exactly_the_launches_asked_for_stand_in_the_window(run, windows, given, before, within):
    code, out, err = run(*PRODUCT, *given)
    assert (code, err) == (0, "")
    ((name, *launches, device),) = windows
    assert (name, launches) == ("simulated.mm 4096x4096x4096", [before, within])
    assert device.launch_count == before + within
    assert ("not verified" in out) == ("--no-verify" in given)


def test_a_wrong_result_is_refused(run, monkeypatch):
    opened = SimulatedBackend.__init__

    def faulty(self, *arguments):
        opened(self, *arguments)
        self.faults[SHAPE] = "wrong_result"

    monkeypatch.setattr(SimulatedBackend, "__init__", faulty)
    code, out, err = run(*PRODUCT)
    assert (code, out) == (1, "")
    assert "relative error 1 against float64; the limit is 0.008" in err
    assert run(*PRODUCT, "--no-verify")[0] == 0


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("an illegal instruction"), "failed: RuntimeError"), (MemoryError(), "failed")]
)
def test_what_a_launch_throws_is_told_in_a_line(backend, error, told):
    backend.faults[SHAPE] = error
    with pytest.raises(DeviceError, match=told):
        launch_in_profiler_window(SimulatedMatmul(), MatmulProblem(), SHAPE, backend)


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        (iter("aaaaaaaaaa"), "gave bitwise equal results"),
        (iter("aaaabaaaaa"), "did not all give bitwise equal results"),
    ],
)
def test_further_launches_are_held_to_one_another(run, monkeypatch, digests, told):
    monkeypatch.setattr(SimulatedBackend, "compute_digest", lambda self, result: next(digests))
    code, out, _ = run(*PRODUCT, "--determinism")
    assert code == 0
    assert told in out


def test_what_cannot_be_read_is_not_said_to_be_equal(run, monkeypatch):
    prepare = SimulatedMatmul.prepare
    monkeypatch.setattr(
        SimulatedMatmul,
        "prepare",
        lambda self, *asked, **options: dataclasses.replace(prepare(self, *asked, **options), queue_checksum=None),
    )
    out = run(*PRODUCT, "--determinism")[1]
    assert "is unknown" in out
    assert "last bit" not in out


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
