"""Simulated torch modules and libraries of vendors. They record every call, and answer in the vendor's units.

torch still computes on the CPU. Only the answers of vendors' libraries are made up here. A vendor's adapter gets a
``SimulatedTorch`` in place of torch. The real torch does not change: code in it that looks for an accelerator, such as
optimizers, finds the real devices of this machine, and never calls a driver because of a simulated device.
"""

import sys
import time
import types
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import torch
from simulated_sensors import SimulatedAmdSmi, SimulatedHlml, SimulatedNvml
from torch.utils._python_dispatch import TorchDispatchMode

from mamf.backend import MIB
from mamf.plugins.discovery import load_backend_class

GB = 10**9
MILLISECONDS_BETWEEN_EVENTS = 2.0


class FlushRecorder(TorchDispatchMode):
    """A dispatch mode that records each ``zero_`` as a flush of the cache, and does not run it."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        if function is torch.ops.aten.zero_.default:
            self.calls.append(("flush", arguments[0].nbytes))
            return arguments[0]
        return function(*arguments, **(options or {}))


class SimulatedEvent:
    """A fake of torch's event.

    ``elapsed_time`` returns milliseconds. It raises an error until the device has reached both events.
    """

    def __init__(self, module):
        self.module = module
        self.moment = None

    def record(self, stream=None):
        self.module.calls.append(("record",))
        self.module.clock += MILLISECONDS_BETWEEN_EVENTS
        self.moment = self.module.clock

    @property
    def cuda_event(self):
        return id(self)

    def query(self):
        return self.module.reached >= self.moment

    def synchronize(self):
        self.module.calls.append(("wait",))
        self.module.reached = max(self.module.reached, self.moment)

    def elapsed_time(self, end_event):
        if max(self.moment, end_event.moment) > self.module.reached:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end_event.moment - self.moment


class SimulatedTorch:
    """A fake torch for one adapter, with simulated modules. All other attributes are those of the real torch."""

    def __init__(self, **modules):
        vars(self).update(modules)

    def __getattr__(self, name):
        return getattr(torch, name)

    def install(self, monkeypatch, vendor):
        """Replace torch in the adapter of a vendor and nowhere else. Return the backend class."""
        kind = load_backend_class(vendor)
        monkeypatch.setattr(sys.modules[kind.__module__], "torch", self)
        # Let the adapter allocate tensors on the CPU, because the simulated device has no memory.
        monkeypatch.setattr(kind, "open_device", lambda self: torch.device("cpu"))
        return kind


class SimulatedTorchModule:
    """A simulated module with the functions that torch.cuda, torch.xpu and torch.hpu have in common.

    ``devices``: the properties of each device.
    """

    functions = (
        *("Event", "device_count", "empty_cache", "get_device_name", "get_device_properties", "is_available"),
        *("max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved", "memory_stats"),
        *("reset_peak_memory_stats", "set_device", "synchronize"),
    )

    def __init__(self, calls, devices):
        self.calls = calls
        self.devices = devices
        self.clock = self.reached = 0.0
        self.allocated, self.reserved, self.peak = 3 * GB, 5 * GB, 4 * GB

    def namespace(self, **additions):
        """Return the module that an adapter finds in torch. Any name that is not simulated raises AttributeError."""
        return SimpleNamespace(**{name: getattr(self, name) for name in self.functions} | additions)

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
        """Advance the clock like a kernel that spins for this many cycles at 1 GHz."""
        self.calls.append(("_sleep", cycles))
        self.clock += cycles * 1e-6

    def Event(self, enable_timing=False):
        assert enable_timing, "an event without enable_timing cannot measure time"
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
        """Return no statistics, as torch.cuda does before the first allocation.

        test_memory_of_a_launch.py replaces this function.
        """
        return {}

    def reset_peak_memory_stats(self, device):
        self.calls.append(("reset_peak_memory_stats", device))

    def empty_cache(self):
        self.calls.append(("empty_cache",))


def make_version_module(**versions):
    """Return the ``torch.version`` of a torch that was built for these vendors only."""
    return SimpleNamespace(**dict.fromkeys(("cuda", "hip", "xpu")) | versions)


def h100(number=0, **changes):
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
    return SimpleNamespace(**properties | changes)


def simulate_cuda(monkeypatch, calls):
    """Simulate two H100 cards with NVML."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    module = SimulatedTorchModule(calls, [h100(0), h100(1)])
    profiler = SimpleNamespace(start=lambda: calls.append(("start",)), stop=lambda: calls.append(("stop",)))
    nvtx = SimpleNamespace(
        range_push=lambda msg: calls.append(("range_push", msg)), range_pop=lambda: calls.append(("range_pop",))
    )
    simulated = SimulatedTorch(
        version=make_version_module(cuda="12.8"), cuda=module.namespace(profiler=profiler, nvtx=nvtx)
    )
    driver = SimulatedDriver(calls)
    kind = simulated.install(monkeypatch, "cuda")
    monkeypatch.setattr(sys.modules[kind.__module__], "_load_driver", lambda: driver)
    nvml = SimulatedNvml(calls, [h100(0), h100(1)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return SimpleNamespace(kind=kind, torch=simulated, module=module, nvml=nvml, driver=driver)


class SimulatedDriver:
    """A fake of the driver's library, as ctypes loads it.

    ``context``: the current context; None if there is none. ``answer``: the status that ``cuCtxRecordEvent`` returns.
    """

    def __init__(self, calls, context=0x5EED, answer=0):
        self.calls, self.context, self.answer = calls, context, answer

    def cuCtxGetCurrent(self, pointer):
        pointer._obj.value = self.context
        return 0

    def cuCtxRecordEvent(self, context, event):
        self.calls.append(("record in context", context.value, event.value))
        return self.answer


def mi300x(**changes):
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
    return SimpleNamespace(**properties | changes)


def simulate_rocm(monkeypatch, calls):
    """Simulate one MI300X with amdsmi."""
    monkeypatch.delenv("PYTORCH_TUNABLEOP_ENABLED", raising=False)
    module = SimulatedTorchModule(calls, [mi300x()])
    tunable = SimpleNamespace(is_enabled=lambda: False)
    simulated = SimulatedTorch(version=make_version_module(hip="6.4.43482"), cuda=module.namespace(tunable=tunable))
    kind = simulated.install(monkeypatch, "rocm")
    smi = SimulatedAmdSmi(calls)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    return SimpleNamespace(kind=kind, torch=simulated, module=module, smi=smi)


def max_1550(**changes):
    properties = {
        "name": "Intel(R) Data Center GPU Max 1550",
        "max_compute_units": 448,
        "total_memory": 64 * GB,
        "driver_version": "1.6.33578",
    }
    return SimpleNamespace(**properties | changes)


def simulate_xpu(monkeypatch, calls):
    """Simulate one stack of a Data Center GPU Max with an older torch, which reports no sensors and no cache size."""
    module = SimulatedTorchModule(calls, [max_1550()])
    simulated = SimulatedTorch(version=make_version_module(xpu="20250101"), xpu=module.namespace())
    kind = simulated.install(monkeypatch, "xpu")
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    return SimpleNamespace(kind=kind, torch=simulated, module=module)


def simulate_hpu(monkeypatch, calls):
    """Simulate one Gaudi 3 with habana_frameworks and pyhlml."""
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    module = SimulatedTorchModule(calls, [SimpleNamespace(name="GAUDI3")])

    def memory_stats(device):
        return {"Limit": 96 * GB, "InUse": module.allocated, "MaxInUse": module.peak}

    simulated = SimulatedTorch(hpu=module.namespace(memory_stats=memory_stats))
    kind = simulated.install(monkeypatch, "hpu")
    core = SimpleNamespace(mark_step=lambda: calls.append(("mark_step",)))
    package = types.ModuleType("habana_frameworks")
    package.__spec__ = ModuleSpec("habana_frameworks", None)
    for name, part in (("", package), (".torch", SimpleNamespace(core=core)), (".torch.core", core)):
        monkeypatch.setitem(sys.modules, f"habana_frameworks{name}", part)
    hlml = SimulatedHlml(calls)
    monkeypatch.setitem(sys.modules, "pyhlml", hlml)
    return SimpleNamespace(kind=kind, torch=simulated, module=module, hlml=hlml)


def ascend(number=0, **changes):
    """Return device properties with the fields that the C++ library of torch_npu defines."""
    properties = {
        "name": "Ascend910B2",
        "total_memory": 64 * GB,
        "L2_cache_size": 192 * MIB,
        "multi_processor_count": 24,
        "uuid": f"7c1b2c3d-0000-4000-8000-00000000000{number}",
    }
    return SimpleNamespace(**properties | changes)


def simulate_accelerator(monkeypatch, calls):
    """Simulate two devices of a vendor without an adapter, as torch_npu registers them.

    One call of the busy work takes 30 ms on the clock of the devices.
    """
    module = SimulatedTorchModule(calls, [ascend(0), ascend(1, name="Ascend910B3")])

    def get_device_name(device_name=None):
        """Return the name of the current device, whichever device is requested."""
        return module.devices[0].name

    def stream(device=None, priority=0, **kwargs):
        """Return a placeholder, because nothing is launched on the stream."""
        return SimpleNamespace()

    device_module = module.namespace(get_device_name=get_device_name, current_device=lambda: 0, Stream=stream)
    accelerator = SimpleNamespace(
        is_available=lambda: bool(module.devices), current_accelerator=lambda: SimpleNamespace(type="npu")
    )
    simulated = SimulatedTorch(accelerator=accelerator, get_device_module=lambda device_type: device_module)
    kind = simulated.install(monkeypatch, "accelerator")

    def run_busy_work():
        module.clock += 30.0

    reference_load = kind._make_busy_work_function
    monkeypatch.setattr(kind, "_make_busy_work_function", lambda self: run_busy_work)
    # The host reads the clock that events advance. A tiny share of real time makes each reading later than the last.
    monkeypatch.setattr(kind, "now", lambda self: module.clock * 1e-3 + time.perf_counter() * 1e-9)
    return SimpleNamespace(kind=kind, torch=simulated, module=module, own=device_module, reference_load=reference_load)


def simulate_mps(monkeypatch, calls):
    """Simulate one Apple GPU."""
    module = SimpleNamespace(
        device_count=lambda: 1,
        synchronize=lambda: calls.append(("synchronize", None)),
        empty_cache=lambda: calls.append(("empty_cache",)),
        recommended_max_memory=lambda: 48 * GB,
        current_allocated_memory=lambda: 3 * GB,
    )
    mps_backend = SimpleNamespace(
        is_built=lambda: True,
        is_available=lambda: True,
        get_name=lambda: "Apple M3 Max",
        get_core_count=lambda: 40,
    )
    simulated = SimulatedTorch(mps=module, backends=SimpleNamespace(mps=mps_backend))
    return SimpleNamespace(kind=simulated.install(monkeypatch, "mps"), torch=simulated)
