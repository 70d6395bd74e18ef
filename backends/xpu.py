"""Measure Intel GPUs with torch.xpu, or with intel-extension-for-pytorch if torch was built without XPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from mamf.backend import DeviceInfo, SensorReading, Telemetry, Unavailability
from mamf.torch_backend import MultiStreamBackend, hash_identifier

_INTEL_EXTENSION_PACKAGE = "intel_extension_for_pytorch"


class XpuSensors:
    """Reads the clock and temperature of one Intel GPU from torch.xpu. This requires torch 2.13 or newer, and pyzes.

    A value that torch.xpu cannot read is None.
    """

    def __init__(self, vendor: Any, index: int) -> None:
        self.vendor = vendor
        self.index = index

    def call_or_none(self, query: Callable[[int], float] | None) -> float | None:
        try:
            return None if query is None else float(query(self.index))
        except (RuntimeError, ImportError):
            return None

    def read(self, energy: bool = False) -> SensorReading:
        megahertz = self.call_or_none(getattr(self.vendor, "clock_rate", None))
        return SensorReading(
            clock_hz=None if megahertz is None else megahertz * 1e6,
            # Do not read the power, because torch.xpu.power_draw takes 100 ms, far too long between timed launches.
            celsius=self.call_or_none(getattr(self.vendor, "temperature", None)),
        )


class XpuBackend(MultiStreamBackend):
    name = "xpu"
    runtime = "sycl"
    device_type = "xpu"
    environment_variables = (
        "ONEAPI_DEVICE_SELECTOR",
        "SYCL_CACHE_PERSISTENT",
        "ZE_AFFINITY_MASK",
        "ZE_FLAT_DEVICE_HIERARCHY",
    )

    @classmethod
    def vendor(cls) -> Any:
        return torch.xpu

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        try:
            import_extension_if_needed()
        except (ImportError, OSError, RuntimeError, SystemExit) as error:
            # The extension raises SystemExit if it was built for another version of torch.
            return Unavailability(
                f"{_INTEL_EXTENSION_PACKAGE} cannot be loaded ({error})",
                f"pip uninstall {_INTEL_EXTENSION_PACKAGE}   # or install the one for this torch",
            )
        if torch.xpu.is_available():
            return None
        if getattr(torch.version, "xpu", None) is None:
            return Unavailability(
                f"this torch ({torch.__version__}) is built without XPU",
                "install an XPU build of torch first (pytorch.org, 'Get started', XPU)",
            )
        return Unavailability("torch sees no Intel GPU", "sycl-ls   # check that the driver sees a device")

    def open_telemetry(self) -> Telemetry | Unavailability:
        sensors = XpuSensors(torch.xpu, self.index)
        if sensors.read() == SensorReading():
            return Unavailability(
                "this torch.xpu cannot read sensors", "pip install pyzes   # with torch 2.13 or newer"
            )
        return sensors

    def describe(self) -> DeviceInfo:
        properties = torch.xpu.get_device_properties(self.index)
        uuid = getattr(properties, "uuid", None)
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=properties.name,
            vendor="Intel",
            architecture=getattr(properties, "architecture", None) and str(properties.architecture),
            compute_units=properties.max_compute_units,
            memory_bytes=properties.total_memory,
            cache_bytes=getattr(properties, "last_level_cache_size", None),
            driver=str(properties.driver_version),
            uuid_hash=hash_identifier(str(uuid)) if uuid else None,
            versions={"xpu": str(getattr(torch.version, "xpu", None))},
        )

    def read_free_memory_bytes(self) -> int | None:
        try:
            return super().read_free_memory_bytes()
        except (RuntimeError, AttributeError):  # Some devices, and torch before 2.6, do not report free memory.
            return None

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        if dtype in ("tf32", "float8_e4m3fnuz"):
            return f"mamf does not support {dtype} on torch.xpu; use another dtype"
        return super().explain_unsupported_dtype(dtype)


def import_extension_if_needed() -> None:
    """Import intel-extension-for-pytorch, which adds Intel GPUs to torch, if torch itself does not support them."""
    if not torch.xpu.is_available() and importlib.util.find_spec(_INTEL_EXTENSION_PACKAGE) is not None:
        importlib.import_module(_INTEL_EXTENSION_PACKAGE)
