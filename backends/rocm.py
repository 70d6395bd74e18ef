"""Measure AMD GPUs with torch.cuda on HIP, read their sensors from amdsmi, and check whether TunableOp and
NUMA balancing are enabled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from mamf_backends._card_sharing import detect_other_amd_processes, find_amd_partition, make_sharing_warnings

from mamf.backend import MIB, CheckResult, DeviceInfo, SensorReading, Telemetry, Unavailability
from mamf.torch_backend import MultiStreamBackend, hash_identifier

_NUMA_BALANCING_FILE = Path("/proc/sys/kernel/numa_balancing")
# Size in bytes of the Infinity Cache (the last-level cache) by architecture, because HIP reports only the L2 cache of
# one die (ROCm/ROCm#4203).
_INFINITY_CACHE_BYTES_BY_ARCHITECTURE = {"gfx942": 256 * MIB, "gfx950": 256 * MIB}
_ARCHITECTURES_WITH_FP8 = ("gfx94", "gfx95", "gfx12")
_ARCHITECTURES_WITH_TF32 = ("gfx94", "gfx95")
# Reasons for throttling. Each key is the name of a counter in amdsmi that increases while the card is throttled for
# this reason (MI300 and newer).
_THROTTLE_REASON_BY_COUNTER = {
    "ppt_residency_acc": "power cap",
    "socket_thm_residency_acc": "socket thermal slowdown",
    "hbm_thm_residency_acc": "memory thermal slowdown",
    "vr_thm_residency_acc": "voltage regulator thermal slowdown",
    "prochot_residency_acc": "hardware thermal slowdown",
}
# Libraries that mark ranges for profilers, in order of preference. The first one belongs to rocprofv3 and can also
# pause the profiler. The second one is older.
_ROCTX_LIBRARIES = ("librocprofiler-sdk-roctx.so", "libroctx64.so")
_ALL_THREADS = ctypes.c_uint64(0)
# Values in which all bits are set. amdsmi returns one of them, or "N/A", for a sensor field that the device does not
# support.
_UNSUPPORTED_VALUES = (2**16 - 1, 2**32 - 1, 2**64 - 1)


class AmdSmiSensors:
    """Reads the sensors of one AMD device from amdsmi. If amdsmi returns "N/A" or raises an error, the value is None.

    ``is_whole_card``: False for a partition of a card, whose power amdsmi cannot measure.
    """

    def __init__(self, smi: Any, handle: Any, is_whole_card: bool = True) -> None:
        self.smi = smi
        self.handle = handle
        self.is_whole_card = is_whole_card
        self._throttle_counters = self.read_throttle_counters()

    def call_or_none(self, query: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return query(self.handle, *arguments)
        except self.smi.AmdSmiException:
            return None

    def get_first_number(self, answer: Any, *names: str) -> float | None:
        """Return the first number among the fields ``names`` of amdsmi's answer; None if none of them is a number."""
        for name in names:
            value = answer.get(name) if isinstance(answer, dict) else None
            if isinstance(value, (int, float)) and value not in _UNSUPPORTED_VALUES:
                return float(value)
        return None

    def read(self, energy: bool = False) -> SensorReading:
        smi = self.smi
        megahertz = self.get_first_number(self.call_or_none(smi.amdsmi_get_clock_info, smi.AmdSmiClkType.GFX), "clk")
        power_info = self.call_or_none(smi.amdsmi_get_power_info) if self.is_whole_card else None
        energy_info = self.call_or_none(smi.amdsmi_get_energy_count) if self.is_whole_card and energy else None
        energy_count = self.get_first_number(energy_info, "energy_accumulator")
        microjoules_per_count = self.get_first_number(energy_info, "counter_resolution")
        celsius = self.call_or_none(
            smi.amdsmi_get_temp_metric, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        )
        return SensorReading(
            clock_hz=None if megahertz is None else megahertz * 1e6,
            watts=self.get_first_number(power_info, "current_socket_power", "average_socket_power"),
            joules=None
            if energy_count is None or microjoules_per_count is None
            else energy_count * microjoules_per_count * 1e-6,
            celsius=float(celsius) if isinstance(celsius, (int, float)) else None,
            throttle_reasons=self.read_throttle_reasons(),
        )

    def read_throttle_counters(self) -> dict[str, float]:
        metrics = self.call_or_none(self.smi.amdsmi_get_gpu_metrics_info)
        counters = {name: self.get_first_number(metrics, name) for name in _THROTTLE_REASON_BY_COUNTER}
        return {name: count for name, count in counters.items() if count is not None}

    def read_throttle_reasons(self) -> tuple[str, ...]:
        """Return the reasons for which the card was throttled since the last call."""
        # Do not call amdsmi_get_violation_status, which compares the same counters, but takes 100 ms.
        counters_before, self._throttle_counters = self._throttle_counters, self.read_throttle_counters()
        increased_counters = [
            name for name, count in self._throttle_counters.items() if count > counters_before.get(name, count)
        ]
        return tuple(reason for name, reason in _THROTTLE_REASON_BY_COUNTER.items() if name in increased_counters)

    def read_max_clock_hz(self) -> float | None:
        megahertz = self.get_first_number(
            self.call_or_none(self.smi.amdsmi_get_clock_info, self.smi.AmdSmiClkType.GFX), "max_clk"
        )
        return None if megahertz is None else megahertz * 1e6

    def read_power_limit_watts(self) -> float | None:
        # Do not use power_limit of power_info, which is in microwatts on bare metal, but in watts elsewhere.
        microwatts = self.get_first_number(self.call_or_none(self.smi.amdsmi_get_power_cap_info), "power_cap")
        return None if microwatts is None else microwatts * 1e-6

    def read_uuid(self) -> str | None:
        uuid = self.call_or_none(self.smi.amdsmi_get_gpu_device_uuid)
        return uuid if isinstance(uuid, str) and uuid != "N/A" else None


def open_amdsmi(properties: Any, is_whole_card: bool = True) -> AmdSmiSensors | Unavailability:
    """Return the sensors of a device, or the reason why they are unavailable.

    mamf finds the device in amdsmi by PCI address, because HIP_VISIBLE_DEVICES changes the indices of devices.
    ``properties``: torch.cuda's properties of the device. ``is_whole_card``: see AmdSmiSensors.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # amdsmi prints a message if it finds no library.
            import amdsmi
    except ModuleNotFoundError:
        return Unavailability(
            "amdsmi is not installed, so clock, power and temperature cannot be read", "pip install amdsmi"
        )
    except (AttributeError, ImportError, KeyError, OSError) as error:
        # The library of ROCm is missing, or lacks a function that this release of amdsmi calls.
        return Unavailability(
            f"amdsmi cannot be loaded ({error})", "pip install /opt/rocm/share/amd_smi   # fits the installed ROCm"
        )
    if not hasattr(properties, "pci_bus_id"):
        return Unavailability("this torch does not report the PCI address of the device", "pip install --upgrade torch")
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        amdsmi.amdsmi_init()
        return AmdSmiSensors(amdsmi, amdsmi.amdsmi_get_processor_handle_from_bdf(address), is_whole_card)
    except amdsmi.AmdSmiException as error:
        return Unavailability(
            f"amdsmi does not answer ({error})", "check that amd-smi runs, and that you are in the render group"
        )


class RocmBackend(MultiStreamBackend):
    name = "rocm"
    runtime = "hip"
    device_type = "cuda"
    environment_variables = (
        "GPU_MAX_HW_QUEUES",
        "HIPBLASLT_ALLOW_TF32",
        "HIP_FORCE_DEV_KERNARG",
        "HIP_VISIBLE_DEVICES",
        "HSA_NO_SCRATCH_RECLAIM",
        "PYTORCH_TUNABLEOP_ENABLED",
        "PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS",
        "PYTORCH_TUNABLEOP_TUNING",
        "ROCR_VISIBLE_DEVICES",
    )

    @classmethod
    def vendor(cls) -> Any:
        return torch.cuda

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        if torch.version.hip is None:
            return Unavailability(
                f"this torch ({torch.__version__}) is built without ROCm",
                "install a ROCm build of torch first (pytorch.org, 'Get started', ROCm)",
            )
        if not torch.cuda.is_available():
            return Unavailability(
                "torch sees no AMD device",
                "rocminfo   # check that the driver sees a device, and that you are in the render group",
            )
        return None

    @property
    def architecture(self) -> str:
        return str(torch.cuda.get_device_properties(self.index).gcnArchName).split(":")[0]

    def open_telemetry(self) -> Telemetry | Unavailability:
        return open_amdsmi(torch.cuda.get_device_properties(self.index), self.read_partition() is None)

    def read_partition(self) -> str | None:
        partition: str | None = find_amd_partition(self.read_bus_address())
        return partition

    def find_sharing_ways(self) -> tuple[str, ...]:
        sensors = self.telemetry if isinstance(self.telemetry, AmdSmiSensors) else None
        return tuple(filter(None, [self.read_partition(), detect_other_amd_processes(sensors)]))

    def describe(self) -> DeviceInfo:
        properties = torch.cuda.get_device_properties(self.index)
        sensors = self.telemetry if isinstance(self.telemetry, AmdSmiSensors) else None
        uuid = sensors.read_uuid() if sensors else None
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=properties.name,
            vendor="AMD",
            architecture=self.architecture,
            compute_units=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            cache_bytes=_INFINITY_CACHE_BYTES_BY_ARCHITECTURE.get(
                self.architecture, getattr(properties, "L2_cache_size", None)
            ),
            max_clock_hz=sensors.read_max_clock_hz() if sensors else None,
            power_limit_watts=sensors.read_power_limit_watts() if sensors else None,
            uuid_hash=hash_identifier(uuid) if uuid else None,
            versions={"hip": str(torch.version.hip)},
        )

    def resolve_dtype(self, name: str) -> str:
        # MI300 supports only the fnuz variant of 8-bit floats. MI350 and newer use the OCP standard.
        return (
            "float8_e4m3fnuz"
            if name == "fp8" and self.architecture.startswith("gfx94")
            else super().resolve_dtype(name)
        )

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        architecture = self.architecture
        uses_fnuz = architecture.startswith("gfx94")
        if dtype.startswith("float8") and not architecture.startswith(_ARCHITECTURES_WITH_FP8):
            return f"{architecture} has no 8-bit floats; use bfloat16"
        if dtype == "float8_e4m3fnuz" and not uses_fnuz:
            return f"{architecture} has no float8_e4m3fnuz; use float8_e4m3fn"
        if dtype in ("float8_e4m3fn", "float8_e5m2") and uses_fnuz:
            return f"{architecture} has no {dtype}; use float8_e4m3fnuz"
        if dtype == "tf32" and not architecture.startswith(_ARCHITECTURES_WITH_TF32):
            return f"{architecture} has no tf32; use float32"
        return super().explain_unsupported_dtype(dtype)

    def read_settings(self) -> dict[str, str]:
        tunable_module = getattr(torch.cuda, "tunable", None)
        is_tunable_op_enabled = tunable_module is not None and tunable_module.is_enabled()
        return super().read_settings() | {
            "tunable_op": str(is_tunable_op_enabled),
            "preferred_blas_library": str(torch.backends.cuda.preferred_blas_library()),
        }

    def explain_missing_counters(self) -> Unavailability | None:
        return Unavailability(
            "mamf does not read counters on AMD devices, because they differ by architecture (rocprofv3 -L lists them)",
            "rocprofv3 --selected-regions --pmc COUNTER -- mamf run KERNEL   # for "
            "rates, use 'mamf sweep' or 'mamf attention'",
        )

    @contextlib.contextmanager
    def open_profiler_window(self, name: str) -> Iterator[None]:
        """Resume rocprofv3 before the work and pause it after the work, and put a roctx range around the work.

        With --selected-regions, rocprofv3 records only this part of the program.
        """
        self.synchronize()
        if self._roctx is None:
            yield
            self.synchronize()
            return
        # The older roctx library has no functions to resume or pause the profiler, so replace them with functions that
        # do nothing.
        resume, pause = (getattr(self._roctx, f"roctxProfiler{word}", lambda thread: 0) for word in ("Resume", "Pause"))
        resume(_ALL_THREADS)
        try:
            with open_roctx_range(self._roctx, name):
                yield
                self.synchronize()
        finally:
            pause(_ALL_THREADS)

    def open_profiler_range(self, name: str) -> contextlib.AbstractContextManager[None] | None:
        return None if self._roctx is None else open_roctx_range(self._roctx, name)

    @functools.cached_property
    def _roctx(self) -> ctypes.CDLL | None:
        return load_roctx_library()

    def check_machine(self) -> list[CheckResult]:
        findings = [check_numa_balancing(), check_tunable_op(), *make_sharing_warnings(self.find_sharing_ways())]
        if isinstance(self.telemetry, Unavailability):
            effect = "throttling cannot be detected, and the log lacks clock and power"
            findings.append(CheckResult("sensors", "warning", self.telemetry.reason, effect, self.telemetry.remedy))
        return findings


@contextlib.contextmanager
def open_roctx_range(roctx: ctypes.CDLL, name: str) -> Iterator[None]:
    roctx.roctxRangePushA(name.encode())
    try:
        yield
    finally:
        roctx.roctxRangePop()


def load_roctx_library() -> ctypes.CDLL | None:
    """Load the roctx library and return it; None if it is not installed."""
    for name in _ROCTX_LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    return None


def check_numa_balancing() -> CheckResult:
    if not _NUMA_BALANCING_FILE.exists():
        return CheckResult("numa_balancing", "unknown", "the Linux kernel does not report NUMA balancing")
    if _NUMA_BALANCING_FILE.read_text().strip() == "0":
        return CheckResult("numa_balancing", "ok", "off")
    effect = "Linux moves memory pages while the device waits, so measured rates are lower and noisier"
    return CheckResult("numa_balancing", "warning", "on", effect, "sudo sysctl kernel.numa_balancing=0")


def check_tunable_op() -> CheckResult:
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") == "1":
        return CheckResult("TunableOp", "ok", "on: each shape is tuned before it is timed")
    effect = "rocBLAS and hipBLASLt use default algorithms, which are often slower than tuned ones (but on an "
    "MI355X they were faster)"
    return CheckResult("TunableOp", "warning", "off", effect, "export PYTORCH_TUNABLEOP_ENABLED=1")
