"""Test ``mamf profile --nvtx``, which marks each module's forward pass in the profiled steps with a range."""

from contextlib import contextmanager

import pytest
import torch
from test_profile_command import SHORTLY, TINY, script
from torch import nn

from mamf.cli import main
from mamf.errors import UnavailableError
from mamf.profiling.watches import ModuleRangeWatch
from mamf.testing import SimulatedBackend

__all__ = ["script"]

MODEL = TINY.replace("weight = torch.nn.Parameter(torch.zeros(2, 2))", "model = torch.nn.Sequential(torch.nn.ReLU(), "
    "torch.nn.Sequential(torch.nn.Linear(2, 2)))\nweight = model[1][0].weight").replace(
    "(weight @ weight)", "model(torch.ones(2, 2))"
)  # fmt: skip
RANGES = ["Sequential", "0: ReLU", "/0: ReLU", "1: Sequential", "1.0: Linear", "/1.0: Linear", "/1: Sequential"]
RANGES.append("/Sequential")


class RangesBackend(SimulatedBackend):
    """A simulated backend that records when profiler windows and ranges begin and end."""

    def __init__(self):
        super().__init__()
        self.told = []

    @contextmanager
    def open_profiler_window(self, name):
        self.told.append("window")
        yield
        self.told.append("/window")

    @contextmanager
    def open_profiler_range(self, name):
        self.told.append(name)
        try:
            yield
        finally:
            self.told.append(f"/{name}")


@pytest.fixture
def device():
    return RangesBackend()


@pytest.fixture
def model():
    return nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


def test_each_module_of_the_profiled_steps_has_a_range(script, device, monkeypatch, capsys):
    monkeypatch.setattr("mamf.contribution.known_ceilings.open_backend_or_default", lambda named: device)
    assert main([*SHORTLY, "--nvtx", script(MODEL)]) == 0
    assert device.told == ["window", *RANGES, "/window"]
    assert "ranges" not in capsys.readouterr().err


def test_where_nobody_reads_ranges_one_line_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr("mamf.contribution.known_ceilings.open_backend_or_default", lambda named: SimulatedBackend())
    assert main([*SHORTLY, "--nvtx", script(TINY)]) == 0
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "ranges" in each]
    assert line.startswith("mamf: mamf could not mark the modules in the trace: no profiler of Simulated H100")


def unavailable():
    raise UnavailableError("no device")


def broken(self, name):
    raise RuntimeError("no NVTX here")


def test_what_goes_wrong_is_a_remark_and_ends_no_script(device, model, monkeypatch):
    watch = ModuleRangeWatch(unavailable)
    watch.start()
    assert watch.remark == "mamf could not mark the modules in the trace: no device"
    watch = ModuleRangeWatch(lambda: device)
    watch.start()
    monkeypatch.setattr(RangesBackend, "open_profiler_range", broken)
    model(torch.ones(2, 2))
    watch.finish()
    assert watch.remark == "mamf could not mark the modules in the trace: RuntimeError: no NVTX here"
    assert device.told == ["window", "/window"]


class Failing(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError


def test_ranges_end_with_what_breaks_and_with_the_steps(device, model):
    watch, failing = ModuleRangeWatch(lambda: device), nn.Sequential(Failing())
    watch.start()
    with pytest.raises(ZeroDivisionError):
        failing(1)
    assert device.told == ["window", "Sequential", "0: Failing", "/0: Failing", "/Sequential"]
    del device.told[:]
    model[0].register_forward_hook(lambda *_: watch.finish())
    model(torch.ones(2, 2))
    model(torch.ones(2, 2))
    assert device.told == ["Sequential", "0: ReLU", "/0: ReLU", "/Sequential", "/window"]


def test_what_is_compiled_meanwhile_stays_as_it_would_be(device, model, monkeypatch):
    watch = ModuleRangeWatch(lambda: device)
    watch.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        model(torch.ones(2, 2))
    watch.finish()
    assert device.told == ["window", "/window"]
