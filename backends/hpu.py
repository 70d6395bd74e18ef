"""Measure Intel Gaudi devices with habana_frameworks, in eager or lazy mode.

In lazy mode, the library collects launches in a graph, and runs the graph when mark_step is called. mamf calls
mark_step after each launch. Otherwise, if several matmuls write the same output, only the last of them would run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from mamf.backend import MIB, CheckResult, DeviceInfo, SensorReading, Telemetry, Unavailability
from mamf.machine.environment import get_package_version
from mamf.torch_backend import AcceleratorBackend

_GAUDI_PACKAGE = "habana_frameworks"
# List the cache sizes here, because Intel's software does not report them. Gaudi2 has SRAM that software manages, and
# Gaudi3 has an L2 and an L3 cache.
_CACHE_BYTES_BY_MODEL = {"GAUDI2": 48 * MIB, "GAUDI3": 96 * MIB}
_LAZY_MODE_VARIABLE = "PT_HPU_LAZY_MODE"
# Define these constants here, because pyhlml defines them only in a deprecated module.
HLML_CLOCK_SOC = 0
HLML_TEMPERATURE_ON_AIP = 0


class HlmlSensors:
    """Reads the sensors of one Gaudi device from pyhlml. A value that pyhlml cannot read is None."""

    def __init__(self, hlml: Any, handle: Any) -> None:
        self.hlml = hlml
        self.handle = handle

    def call_or_none(self, query: Callable[..., int], *arguments: Any) -> float | None:
        try:
            return float(query(self.handle, *arguments))
        except self.hlml.HLMLError:
            return None

    def read(self, energy: bool = False) -> SensorReading:
        hlml = self.hlml
        megahertz = self.call_or_none(hlml.hlmlDeviceGetClockInfo, HLML_CLOCK_SOC)
        milliwatts = self.call_or_none(hlml.hlmlDeviceGetPowerUsage)
        return SensorReading(
            clock_hz=None if megahertz is None else megahertz * 1e6,
            watts=None if milliwatts is None else milliwatts * 1e-3,
            celsius=self.call_or_none(hlml.hlmlDeviceGetTemperature, HLML_TEMPERATURE_ON_AIP),
        )


def open_hlml(index: int) -> HlmlSensors | Unavailability:
    try:
        hlml = importlib.import_module("pyhlml")
    except ImportError:
        return Unavailability("pyhlml is not installed, so clock and power cannot be read", "pip install habana-pyhlml")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # pyhlml prints a message if it finds no library.
            hlml.hlmlInit()
        return HlmlSensors(hlml, hlml.hlmlDeviceGetHandleByIndex(index))
    except hlml.HLMLError as error:
        return Unavailability(f"pyhlml does not answer ({error})", "hl-smi   # check that the driver runs")


class HpuBackend(AcceleratorBackend):
    name = "hpu"
    runtime = "synapse"
    device_type = "hpu"
    environment_variables = (_LAZY_MODE_VARIABLE, "HABANA_VISIBLE_DEVICES", "PT_HPU_ENABLE_EAGER_CACHE")

    @classmethod
    def vendor(cls) -> Any:
        return torch.hpu  # type: ignore[attr-defined]

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        if importlib.util.find_spec(_GAUDI_PACKAGE) is None:
            return Unavailability(
                "habana_frameworks is not installed",
                "install the Intel Gaudi software stack with its PyTorch bridge (docs.habana.ai, 'Installation')",
            )
        try:
            importlib.import_module(f"{_GAUDI_PACKAGE}.torch")
        except (ImportError, OSError, RuntimeError) as error:
            return Unavailability(
                f"habana_frameworks.torch cannot be loaded ({error})", "hl-smi   # check that the driver runs"
            )
        if not cls.vendor().is_available():
            return Unavailability(
                "no Gaudi device is visible",
                "hl-smi   # check that the driver sees a device, and that no other process uses it",
            )
        return None

    def open_device(self) -> torch.device:
        # Leave out the index, because Intel's software gives each process one device and ignores an index.
        return torch.device("hpu")

    def setup(self) -> None:
        super().setup()
        self.is_lazy = os.environ.get(_LAZY_MODE_VARIABLE, "0") == "1"
        self._core = importlib.import_module(f"{_GAUDI_PACKAGE}.torch.core") if self.is_lazy else None

    def submit(self) -> None:
        if self._core is not None:
            self._core.mark_step()

    def synchronize(self) -> None:
        self.vendor().synchronize()

    def open_telemetry(self) -> Telemetry | Unavailability:
        return open_hlml(self.index)

    def describe(self) -> DeviceInfo:
        name = str(self.vendor().get_device_name(self.index))
        bridge = get_package_version("habana-torch-plugin")
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=name,
            vendor="Intel",
            memory_bytes=int(self.vendor().memory_stats(self.index)["Limit"]),
            cache_bytes=_CACHE_BYTES_BY_MODEL.get(name.upper()),
            driver=bridge,
            versions={"habana": str(bridge)},
        )

    def read_free_memory_bytes(self) -> int | None:
        statistics = self.vendor().memory_stats(self.index)
        return int(statistics["Limit"] - statistics["InUse"])

    def release_cached_memory(self) -> None:
        """Do nothing, because freed memory returns to the device automatically."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "Allocation failed" in str(error)

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        if dtype in ("tf32", "float64", "float8_e4m3fnuz", "int8"):
            return f"Gaudi does not support matmuls of {dtype}; use bfloat16"
        return super().explain_unsupported_dtype(dtype)

    def read_settings(self) -> dict[str, str]:
        return super().read_settings() | {"lazy_mode": str(self.is_lazy)}

    def check_machine(self) -> list[CheckResult]:
        mode = "lazy" if self.is_lazy else "eager"
        finding = f"{mode} mode; the published MAMF figures of Gaudi were measured in lazy mode"
        return [
            CheckResult(
                _LAZY_MODE_VARIABLE,
                "ok" if self.is_lazy else "warning",
                finding,
                "rates in lazy and eager mode differ",
                f"export {_LAZY_MODE_VARIABLE}=1",
            )
        ]
