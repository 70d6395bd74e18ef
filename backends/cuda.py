"""Measure NVIDIA GPUs with CUDA events, and read their sensors from NVML."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch
from mamf_backends._card_sharing import list_sharing_ways
from mamf_backends._cuda_stamps import CudaStamps, open_stamps
from mamf_backends._nvml import NvmlSensors, check_device, find_smi_index, open_nvml

from mamf.backend import CheckResult, DeviceInfo, Unavailability
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.machine.environment import get_package_version
from mamf.torch_backend import MultiStreamBackend, hash_identifier

_MIN_MAJOR_CAPABILITY_WITH_TF32 = 8
_MIN_CAPABILITY_WITH_FP8 = (8, 9)


class CudaBackend(MultiStreamBackend):
    name = "cuda"
    runtime = "cuda"
    device_type = "cuda"
    # The defaults of these traits were measured on an NVIDIA H100.
    burst_traits = BurstTraits()
    sustained_traits = SustainedTraits()
    has_graphs = True
    environment_variables = (
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "DISABLE_ADDMM_CUDA_LT",
        "NVIDIA_TF32_OVERRIDE",
        "PYTORCH_TUNABLEOP_ENABLED",
    )

    @classmethod
    def vendor(cls) -> Any:
        return torch.cuda

    def setup(self) -> None:
        super().setup()
        # Drivers for CUDA versions before 12.5 lack this function.
        self.has_idle_marks = hasattr(_load_driver(), "cuCtxRecordEvent")

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        if torch.version.hip is not None:
            return Unavailability("this torch is built for ROCm", "use --backend rocm")
        if torch.version.cuda is None:
            return Unavailability(
                f"this torch ({torch.__version__}) is built without CUDA",
                "with an NVIDIA GPU: pip install --force-reinstall torch   # on Linux the default build has CUDA",
            )
        if not torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            visibility_note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
            return Unavailability(
                f"torch sees no NVIDIA device{visibility_note}", "nvidia-smi   # check that the driver sees a device"
            )
        return None

    def open_telemetry(self) -> NvmlSensors | Unavailability:
        return open_nvml(torch.cuda.get_device_properties(self.index))

    def describe(self) -> DeviceInfo:
        properties = torch.cuda.get_device_properties(self.index)
        sensors = self.telemetry if isinstance(self.telemetry, NvmlSensors) else None
        kilohertz = getattr(properties, "clock_rate", None)
        uuid = sensors.call_or_none(sensors.nvml.nvmlDeviceGetUUID) if sensors else None
        cudnn = torch.backends.cudnn.version()
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=properties.name,
            vendor="NVIDIA",
            architecture=f"sm_{properties.major}{properties.minor}",
            compute_units=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            cache_bytes=getattr(properties, "L2_cache_size", None),
            max_clock_hz=(sensors and sensors.read_max_clock_hz()) or (kilohertz and kilohertz * 1e3) or None,
            power_limit_watts=sensors.read_power_limit_watts() if sensors else None,
            driver=sensors.call_system_or_none(sensors.nvml.nvmlSystemGetDriverVersion) if sensors else None,
            uuid_hash=hash_identifier(str(uuid)) if uuid else None,
            versions={"cuda": str(torch.version.cuda), "cudnn": str(cudnn), **_read_cublas_version()},
        )

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        properties = torch.cuda.get_device_properties(self.index)
        capability = (properties.major, properties.minor)
        if dtype == "float8_e4m3fnuz":
            return "NVIDIA devices have no float8_e4m3fnuz; use float8_e4m3fn"
        if dtype.startswith("float8") and capability < _MIN_CAPABILITY_WITH_FP8:
            return f"{properties.name} has no 8-bit floats, which need compute capability 8.9; use bfloat16"
        if dtype == "tf32" and properties.major < _MIN_MAJOR_CAPABILITY_WITH_TF32:
            return f"{properties.name} has no tf32, which needs compute capability 8.0; use float32"
        return super().explain_unsupported_dtype(dtype)

    def read_settings(self) -> dict[str, str]:
        flags = torch.backends.cuda.matmul
        names = (
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
        return super().read_settings() | {
            **{name: str(getattr(flags, name)) for name in names if hasattr(flags, name)},
            "preferred_blas_library": str(torch.backends.cuda.preferred_blas_library()),
            **self._read_card_vboost(),
        }

    def _read_card_vboost(self) -> dict[str, str]:
        """Return the card's vboost setting as a dictionary, or an empty dictionary if the setting is unknown.

        Without NVML, the setting is unknown, because only NVML knows the card's index in nvidia-smi.
        """
        sensors = self.telemetry if isinstance(self.telemetry, NvmlSensors) else None
        return _read_vboost(find_smi_index(sensors, self.index)) if sensors else {}

    def explain_missing_counters(self) -> Unavailability | None:
        return None

    def record_idle_mark(self, after: Any) -> Any | None:
        """Record and return an event that completes when all work in all streams of the context has ended.

        Return None if this fails. Also return None if the device has already reached the earlier event ``after``,
        because the time between the two events would then depend on the host.
        """
        driver, context = _load_driver(), ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            return None
        event = self.record_mark()
        error_code = driver.cuCtxRecordEvent(context, ctypes.c_void_p(event.cuda_event))
        return None if error_code or self.is_mark_reached(after) else event

    @cached_property
    def clock_stamps(self) -> CudaStamps | Unavailability:
        return open_stamps(_load_driver(), self.index)

    def capture_graph(self, launches: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], list[object]]:
        """Capture launches in a CUDA graph. Return a function that replays the graph, and the results of the launches.

        Each launch runs once before the capture, so that libraries allocate memory and choose kernels before it.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for launch in launches:
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            results = [launch() for launch in launches]
        return graph.replay, results

    @contextmanager
    def open_profiler_window(self, name: str) -> Iterator[None]:
        """Call cudaProfilerStart before the work and cudaProfilerStop after it, and put an NVTX range around the work.

        ncu and nsys can profile only this part of the program.
        """
        self.synchronize()
        torch.cuda.profiler.start()
        try:
            with self.open_profiler_range(name):
                yield
                self.synchronize()
        finally:
            torch.cuda.profiler.stop()

    @contextmanager
    def open_profiler_range(self, name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def find_sharing_ways(self) -> tuple[str, ...]:
        sensors = self.telemetry if isinstance(self.telemetry, NvmlSensors) else None
        ways: tuple[str, ...] = list_sharing_ways(sensors, self.read_device_name(self.index))
        return ways

    def check_machine(self) -> list[CheckResult]:
        if isinstance(self.telemetry, Unavailability):
            effect = "throttling cannot be detected, and the log lacks clock and power"
            return [
                CheckResult("sensors", "warning", self.telemetry.reason, effect, self.telemetry.remedy),
                *_check_environment_variables(),
            ]
        assert isinstance(self.telemetry, NvmlSensors)
        name = self.read_device_name(self.index)
        findings = check_device(self.telemetry, name, self.index, torch.version.cuda)
        vboost_findings = [
            CheckResult("vboost", "ok", f"{value}; a value above 0 moves power from the L2 cache to the SMs")
            for value in self._read_card_vboost().values()
        ]
        return [*findings, *vboost_findings, *_check_environment_variables()]


@cache
def _read_cublas_version() -> dict[str, str]:
    """Return the version of the cuBLAS package as a dictionary, or an empty dictionary if it is not installed.

    Logs record this version, because one version of torch can run with several versions of cuBLAS.
    """
    major = str(torch.version.cuda).split(".")[0]
    version = get_package_version("nvidia-cublas") or get_package_version(f"nvidia-cublas-cu{major}")
    return {"cublas": version} if version else {}


@cache
def _read_vboost(index: int) -> dict[str, str]:
    """Return a card's vboost setting as a dictionary, or an empty dictionary if the setting is unknown.

    vboost moves power from the L2 cache to the SMs. Only the output of nvidia-smi contains this setting.
    ``index``: the card's index in nvidia-smi.
    """
    command = ["nvidia-smi", "boost-slider", "-l", "-i", str(index)]
    try:
        printed_settings = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    numbers = next((re.findall(r"\d+", line) for line in printed_settings.splitlines() if "vboost" in line.lower()), [])
    return {"vboost": numbers[-1]} if numbers else {}


def _load_driver() -> Any:
    """Return the library of the CUDA driver; None if no driver is installed."""
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None


def _check_environment_variables() -> list[CheckResult]:
    harmful_settings = {
        "CUDA_LAUNCH_BLOCKING": (
            "1",
            "each launch waits until the previous one ends, so times of small shapes include host time",
        ),
        "NVIDIA_TF32_OVERRIDE": ("0", "tf32 matmuls run in float32, at a fraction of the speed of tf32"),
    }
    return [
        CheckResult(name, "warning", f"is set to {value}", effect, f"unset {name}")
        for name, (value, effect) in harmful_settings.items()
        if os.environ.get(name) == value
    ]
