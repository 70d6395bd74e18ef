"""Vendors' torch modules and libraries as mamf sees them: they record every call and answer in the vendors' own units.

What torch computes still runs on the CPU; only what a vendor's library would answer is made up here.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import torch
from simulated_sensors import SimulatedAmdSmi, SimulatedHlml, SimulatedNvml
from torch.utils._python_dispatch import TorchDispatchMode

from mamf.backend import MIB
from mamf.plugins.discovery import backend_class

GB = 10**9
MILLISECONDS_BETWEEN_EVENTS = 2.0


class FlushRecorder(TorchDispatchMode):
    """Records each write of zeros over a buffer: torch's own view of a flush."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        if function is torch.ops.aten.zero_.default:
            self.calls.append(("flush", arguments[0].nbytes))
        return function(*arguments, **(options or {}))


class SimulatedEvent:
    """torch's event: elapsed_time is in milliseconds, and refused until the device has reached both ends."""

    def __init__(self, module):
        self.module = module
        self.moment = None

    def record(self, stream=None):
        self.module.calls.append(("record",))
        self.module.clock += MILLISECONDS_BETWEEN_EVENTS
        self.moment = self.module.clock

    def synchronize(self):
        self.module.calls.append(("wait",))
        self.module.reached = max(self.module.reached, self.moment)

    def elapsed_time(self, end_event):
        if max(self.moment, end_event.moment) > self.module.reached:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event.moment - self.moment


class SimulatedTorchModule:
    """What torch.cuda, torch.xpu and torch.hpu have in common, for a list of devices' properties."""

    functions = (
        *("Event", "device_count", "empty_cache", "get_device_name", "get_device_properties", "is_available"),
        *("max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats"),
        *("set_device", "synchronize"),
    )

    def __init__(self, calls, devices):
        self.calls = calls
        self.devices = devices
        self.clock = self.reached = 0.0
        self.allocated, self.reserved, self.peak = 3 * GB, 5 * GB, 4 * GB

    def install(self, monkeypatch, namespace):
        for name in self.functions:
            monkeypatch.setattr(namespace, name, getattr(self, name))

    def is_available(self):
        return bool(self.devices)

    def device_count(self):
        return len(self.devices)

    def get_device_properties(self, device):
        return self.devices[device]

    def get_device_name(self, device):
        return self.devices[device].name

    def set_device(self, device):
        self.calls.append(("set_device", device))

    def synchronize(self, device=None):
        self.calls.append(("synchronize", device))
        self.reached = self.clock

    def _sleep(self, cycles):
        """A kernel of known cycles, at 1 GHz."""
        self.calls.append(("_sleep", cycles))
        self.clock += cycles * 1e-6

    def Event(self, enable_timing=False):
        assert enable_timing, "an event that cannot time"
        return SimulatedEvent(self)

    def mem_get_info(self, device):
        total = self.devices[device].total_memory
        return total - self.reserved, total

    def memory_allocated(self, device):
        return self.allocated

    def memory_reserved(self, device):
        return self.reserved

    def max_memory_allocated(self, device):
        return self.peak

    def memory_stats(self, device):
        """As torch.hpu's; torch.cuda and torch.xpu have other keys, see test_memory_of_a_launch.py."""
        return {"Limit": 96 * GB, "InUse": self.allocated, "MaxInUse": self.peak}

    def reset_peak_memory_stats(self, device):
        self.calls.append(("reset_peak_memory_stats", device))

    def empty_cache(self):
        self.calls.append(("empty_cache",))


def on_cpu(monkeypatch, kind):
    """Let a backend allocate where this machine has memory."""
    monkeypatch.setattr(kind, "open_device", lambda self: torch.device("cpu"))


def build_of_torch(monkeypatch, **versions):
    """Make torch look built for these vendors only."""
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, versions.get(name), raising=False)


def h100(number=0, **changed):
    properties = {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 80 * GB,
        "L2_cache_size": 50 * MIB,
        "clock_rate": 1_980_000,  # kHz
        "uuid": f"6a1b2c3d-0000-4000-8000-00000000000{number}",
        "pci_domain_id": 0,
        "pci_bus_id": 0x17 + number,
        "pci_device_id": 0,
    }
    return SimpleNamespace(**properties | changed)


def simulate_cuda(monkeypatch, calls):
    """Two H100, with NVML."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    build_of_torch(monkeypatch, cuda="12.8")
    module = SimulatedTorchModule(calls, [h100(0), h100(1)])
    module.install(monkeypatch, torch.cuda)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append(("start",)))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append(("stop",)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: calls.append(("range_push", msg)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(("range_pop",)))
    nvml = SimulatedNvml(calls, [h100(0), h100(1)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    kind = backend_class("cuda")
    on_cpu(monkeypatch, kind)
    return SimpleNamespace(kind=kind, module=module, nvml=nvml)


def mi300x(**changed):
    properties = {
        "name": "AMD Instinct MI300X",
        "major": 9,
        "minor": 4,
        "gcnArchName": "gfx942:sramecc+:xnack-",
        "multi_processor_count": 304,
        "total_memory": 192 * GB,
        "L2_cache_size": 4 * MIB,
        "clock_rate": 2_100_000,
        "pci_domain_id": 0,
        "pci_bus_id": 0x0C,
        "pci_device_id": 0,
    }
    return SimpleNamespace(**properties | changed)


def simulate_rocm(monkeypatch, calls):
    """One MI300X, with amdsmi."""
    monkeypatch.delenv("PYTORCH_TUNABLEOP_ENABLED", raising=False)
    build_of_torch(monkeypatch, hip="6.4.43482")
    module = SimulatedTorchModule(calls, [mi300x()])
    module.install(monkeypatch, torch.cuda)
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    smi = SimulatedAmdSmi(calls)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    kind = backend_class("rocm")
    on_cpu(monkeypatch, kind)
    return SimpleNamespace(kind=kind, module=module, smi=smi)


def max_1550(**changed):
    properties = {
        "name": "Intel(R) Data Center GPU Max 1550",
        "max_compute_units": 448,
        "total_memory": 64 * GB,
        "driver_version": "1.6.33578",
    }
    return SimpleNamespace(**properties | changed)


def simulate_xpu(monkeypatch, calls):
    """One stack of a Data Center GPU Max, as an older torch shows it: no sensors, no cache size."""
    build_of_torch(monkeypatch, xpu="20250101")
    module = SimulatedTorchModule(calls, [max_1550()])
    module.install(monkeypatch, torch.xpu)
    for name in ("clock_rate", "temperature"):
        monkeypatch.delattr(torch.xpu, name, raising=False)
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    kind = backend_class("xpu")
    on_cpu(monkeypatch, kind)
    return SimpleNamespace(kind=kind, module=module)


def simulate_hpu(monkeypatch, calls):
    """One Gaudi 3 behind habana_frameworks, with pyhlml."""
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    module = SimulatedTorchModule(calls, [SimpleNamespace(name="GAUDI3")])
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    core = SimpleNamespace(mark_step=lambda: calls.append(("mark_step",)))
    package = types.ModuleType("habana_frameworks")
    package.__spec__ = ModuleSpec("habana_frameworks", None)
    for name, part in (("", package), (".torch", SimpleNamespace(core=core)), (".torch.core", core)):
        monkeypatch.setitem(sys.modules, f"habana_frameworks{name}", part)
    hlml = SimulatedHlml(calls)
    monkeypatch.setitem(sys.modules, "pyhlml", hlml)
    kind = backend_class("hpu")
    on_cpu(monkeypatch, kind)
    return SimpleNamespace(kind=kind, module=module, hlml=hlml)


def simulate_mps(monkeypatch, calls):
    """An Apple GPU."""
    for namespace, answers in (
        (
            torch.mps,
            {
                "device_count": lambda: 1,
                "synchronize": lambda: calls.append(("synchronize", None)),
                "empty_cache": lambda: calls.append(("empty_cache",)),
                "recommended_max_memory": lambda: 48 * GB,
                "current_allocated_memory": lambda: 3 * GB,
            },
        ),
        (
            torch.backends.mps,
            {
                "is_built": lambda: True,
                "is_available": lambda: True,
                "get_name": lambda: "Apple M3 Max",
                "get_core_count": lambda: 40,
            },
        ),
    ):
        for name, answer in answers.items():
            monkeypatch.setattr(namespace, name, answer, raising=False)
    kind = backend_class("mps")
    on_cpu(monkeypatch, kind)
    return SimpleNamespace(kind=kind)
