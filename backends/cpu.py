"""Measure the CPU with the host's clock. Compute units are torch's threads, and sensors measure the whole machine."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from mamf.backend import MIB, CheckResult, DeviceInfo, SecondQueue, SensorReading, Telemetry, Unavailability
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.torch_backend import HostTimedBackend

_CACHE_DIRECTORY = Path("/sys/devices/system/cpu/cpu0/cache")
_CPUINFO_FILE = Path("/proc/cpuinfo")
_BFLOAT16_CPU_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
_MIN_WARNED_BUSY_PERCENT = 20.0
#: Parameters of glibc's ``mallopt``, by their numbers in malloc.h, with the highest values that glibc itself chooses
#: (see ``keep_freed_memory``).
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 32 * MIB), (-1, 64 * MIB)


class CpuSensors:
    """Reads the clock and temperature sensors that do not require root. Virtual machines often have no sensors."""

    def read(self, energy: bool = False) -> SensorReading:
        frequency = read_cpu_clock_record()
        sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()
        temperatures = [sensor.current for group in sensors.values() for sensor in group if sensor.current]
        return SensorReading(
            clock_hz=frequency.current * 1e6 if frequency and frequency.current else None,
            celsius=max(temperatures, default=None),
        )


# For CPUs, torch.compile generates C++, so it needs one of these compilers.
_CPP_COMPILERS = ("c++", "g++", "clang++")


class ThreadMark:
    """The time at which a thread reaches a point in its queue.

    ``float(mark)`` waits until the thread has reached this point, and returns this time in seconds of the host's clock.
    """

    def __init__(self, reached_at: Future[float]) -> None:
        self._reached_at = reached_at

    def __float__(self) -> float:
        return self._reached_at.result()


class ThreadQueue(SecondQueue):
    """A second queue for the CPU: a thread that runs launches in order. ``now``: returns the backend's time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._thread = ThreadPoolExecutor(1)
        self._queued_launches: list[Future[object]] = []

    def fork(self) -> None:
        """Do nothing, because all earlier launches on the CPU have already ended."""

    def launch(self, call: Callable[[], object]) -> None:
        self._queued_launches.append(self._thread.submit(call))

    def record_mark(self) -> ThreadMark:
        return ThreadMark(self._thread.submit(self._now))

    def join(self) -> None:
        queued_launches, self._queued_launches = self._queued_launches, []
        for each in queued_launches:
            each.result()


class CpuBackend(HostTimedBackend):
    name = "cpu"
    runtime = "host"
    is_accelerator = False
    device_type = "cpu"
    # Do not let the CPU rest between measurements. A GPU rests until its clock recovers, but the clock of a CPU changes
    # too slowly for that. A matmul on a CPU can take seconds, so rests would only double the time of a run.
    burst_traits = BurstTraits(
        train_seconds=0.1,
        rest_ratio=0.0,
        longest_rest_seconds=0.0,
        warm_in_seconds=0.0,
    )
    sustained_traits = SustainedTraits(soak_seconds=2.0, rest_seconds=0.0)
    environment_variables = ("GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "ONEDNN_MAX_CPU_ISA")

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        return None

    @classmethod
    def count_devices(cls) -> int:
        return 1

    @classmethod
    def read_device_name(cls, index: int) -> str:
        return read_cpu_name()

    def open_device(self) -> torch.device:
        return torch.device("cpu")

    def setup(self) -> None:
        # If the CPU has no bfloat16 instructions, prefer float32, because torch emulates bfloat16 much more slowly.
        self.default_dtype = "bfloat16" if has_native_bfloat16() else "float32"
        keep_freed_memory()

    def explain_missing_compiler(self) -> Unavailability | None:
        if any(map(shutil.which, _CPP_COMPILERS)):
            return None
        return Unavailability("torch.compile needs a C++ compiler", "sudo apt install g++")

    def describe(self) -> DeviceInfo:
        frequency = read_cpu_clock_record()
        return DeviceInfo(
            backend=self.name,
            index=0,
            name=read_cpu_name(),
            vendor=read_cpu_field("vendor_id") or platform.machine(),
            architecture=torch.backends.cpu.get_cpu_capability(),
            compute_units=torch.get_num_threads(),
            memory_bytes=psutil.virtual_memory().total,
            cache_bytes=read_last_level_cache_bytes(),
            max_clock_hz=frequency.max * 1e6 if frequency and frequency.max else None,
            versions={
                "mkl": str(torch.backends.mkl.is_available()),
                "mkldnn": str(torch.backends.mkldnn.is_available()),
            },
            is_accelerator=self.is_accelerator,
        )

    def open_telemetry(self) -> Telemetry | Unavailability:
        reading = CpuSensors().read()
        if reading.clock_hz is None and reading.celsius is None:
            return Unavailability(
                "the operating system reports neither clock nor temperature",
                "this is usual in a virtual machine, so there is nothing to do",
            )
        return CpuSensors()

    @functools.cached_property
    def _thread_queue(self) -> ThreadQueue:
        return ThreadQueue(self.now)

    def get_second_queue(self) -> SecondQueue:
        return self._thread_queue

    def synchronize(self) -> None:
        """Do nothing, because a launch on a CPU returns only when its work is done."""

    def read_free_memory_bytes(self) -> int | None:
        return int(psutil.virtual_memory().available)

    def read_peak_memory_bytes(self) -> int | None:
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "can't allocate memory" in str(error)

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        return "CPUs have no tf32; use float32" if dtype == "tf32" else super().explain_unsupported_dtype(dtype)

    def read_settings(self) -> dict[str, str]:
        return super().read_settings() | {"threads": str(torch.get_num_threads())}

    def check_machine(self) -> list[CheckResult]:
        busy_percent = psutil.cpu_percent(interval=0.2)
        if busy_percent < _MIN_WARNED_BUSY_PERCENT:
            return [CheckResult("cpu load", "ok", f"the CPU is {busy_percent:.0f} % busy")]
        return [
            CheckResult(
                "cpu load",
                "warning",
                f"the CPU is {busy_percent:.0f} % busy with other work",
                "all measured rates are lower, because other work uses cores and cache",
                "top -o %CPU   # shows the processes that use the CPU",
            )
        ]


def read_cpu_clock_record() -> Any:
    """Return psutil's record of the CPU's clock in MHz (current, min and max); None if the clock is unknown."""
    with suppress(NotImplementedError, OSError, AttributeError):
        return psutil.cpu_freq()
    return None


def read_cpu_field(name: str) -> str | None:
    """Return the field ``name`` of the first processor in /proc/cpuinfo; None if the field or the file is missing."""
    if not _CPUINFO_FILE.exists():
        return None
    for line in _CPUINFO_FILE.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def read_cpu_name() -> str:
    return read_cpu_field("model name") or platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB in the process, so that the next launch does not fetch new pages.

    By default, glibc begins to keep such blocks only after the process has freed some. The rate of a kernel that
    allocates memory in each launch then depends on what the process did before: ``compiled-eager`` was twice as fast
    after a search for ceilings. Do nothing if the C library has no ``mallopt``.
    """
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(parameter, value)


def has_native_bfloat16() -> bool:
    flags = (read_cpu_field("flags") or read_cpu_field("Features") or "").split()
    return any(flag in flags for flag in _BFLOAT16_CPU_FLAGS)


def read_last_level_cache_bytes() -> int | None:
    """Return the size of the largest cache of the first core; None if unknown. sysfs gives sizes in KiB or MiB."""
    bytes_by_unit = {"K": 1024, "M": MIB}
    sizes = [path.read_text().strip() for path in _CACHE_DIRECTORY.glob("index*/size")]
    return max((int(size[:-1]) * bytes_by_unit[size[-1]] for size in sizes if size[-1:] in bytes_by_unit), default=None)
