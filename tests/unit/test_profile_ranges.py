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
        self.events = []

    @contextmanager
    def open_profiler_window(self, name):
        self.events.append("window")
        yield
        self.events.append("/window")

    @contextmanager
    def open_profiler_range(self, name):
        self.events.append(name)
        try:
            yield
        finally:
            self.events.append(f"/{name}")


@pytest.fixture
def device():
    return RangesBackend()


@pytest.fixture
def model():
    return nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))


def test_each_module_of_the_profiled_steps_has_a_range(script, device, monkeypatch, capsys):
    monkeypatch.setattr("mamf.contribution.known_ceilings.open_backend_or_default", lambda named: device)
    assert main([*SHORTLY, "--nvtx", script(MODEL)]) == 0
    assert device.events == ["window", *RANGES, "/window"]
    assert "ranges" not in capsys.readouterr().err


def test_a_device_without_a_profiler_is_reported_in_a_line(script, monkeypatch, capsys):
    monkeypatch.setattr("mamf.contribution.known_ceilings.open_backend_or_default", lambda named: SimulatedBackend())
    assert main([*SHORTLY, "--nvtx", script(TINY)]) == 0
    (line,) = [message for message in capsys.readouterr().err.splitlines() if "ranges" in message]
    assert line.startswith("mamf: mamf could not mark the modules in the trace: no profiler of Simulated H100")


def raise_unavailable():
    raise UnavailableError("no device")


def raise_error(self, name):
    raise RuntimeError("no NVTX here")


def test_errors_become_remarks_and_do_not_end_the_script(device, model, monkeypatch):
    watch = ModuleRangeWatch(raise_unavailable)
    watch.start()
    assert watch.remark == "mamf could not mark the modules in the trace: no device"
    watch = ModuleRangeWatch(lambda: device)
    watch.start()
    monkeypatch.setattr(RangesBackend, "open_profiler_range", raise_error)
    model(torch.ones(2, 2))
    watch.finish()
    assert watch.remark == "mamf could not mark the modules in the trace: RuntimeError: no NVTX here"
    assert device.events == ["window", "/window"]


class FailingModule(nn.Module):
    def forward(self, x):
        raise ZeroDivisionError


def test_ranges_end_when_a_module_fails_and_when_the_steps_end(device, model):
    watch, failing_model = ModuleRangeWatch(lambda: device), nn.Sequential(FailingModule())
    watch.start()
    with pytest.raises(ZeroDivisionError):
        failing_model(1)
    assert device.events == ["window", "Sequential", "0: FailingModule", "/0: FailingModule", "/Sequential"]
    del device.events[:]
    model[0].register_forward_hook(lambda *_: watch.finish())
    model(torch.ones(2, 2))
    model(torch.ones(2, 2))
    assert device.events == ["Sequential", "0: ReLU", "/0: ReLU", "/Sequential", "/window"]


def test_modules_get_no_ranges_while_torch_compiles(device, model, monkeypatch):
    watch = ModuleRangeWatch(lambda: device)
    watch.start()
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        model(torch.ones(2, 2))
    watch.finish()
    assert device.events == ["window", "/window"]
