"""Measure Apple GPUs with the host clock and torch.mps.synchronize.

mamf does not use torch.mps.Event, because until late in 2026 this event could hang after a synchronize, or give an end
time before the start time (pytorch pull request 196395).
"""

from __future__ import annotations

import platform

import torch

from mamf.backend import DeviceInfo, Unavailability
from mamf.torch_backend import HostTimedBackend


class MpsBackend(HostTimedBackend):
    name = "mps"
    runtime = "metal"
    device_type = "mps"
    default_dtype = "float16"
    environment_variables = ("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL")

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        if not torch.backends.mps.is_built():
            return Unavailability(
                "this torch is built without MPS", "pip install torch   # on a Mac with Apple silicon"
            )
        if not torch.backends.mps.is_available():
            return Unavailability("torch sees no Apple GPU", "use macOS 12.3 or newer and an arm64 Python")
        return None

    @classmethod
    def count_devices(cls) -> int:
        return int(torch.mps.device_count())

    @classmethod
    def read_device_name(cls, index: int) -> str:
        # Older releases of torch lack get_name, so return a generic name.
        query = getattr(torch.backends.mps, "get_name", None)
        return str(query()) if query else "Apple GPU"

    def explain_missing_compiler(self) -> Unavailability | None:
        return Unavailability(
            "Inductor supports neither autotuned matmuls nor FlexAttention on mps", "'mamf kernels' lists other kernels"
        )

    def describe(self) -> DeviceInfo:
        cores = getattr(torch.backends.mps, "get_core_count", None)
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=self.read_device_name(self.index),
            vendor="Apple",
            compute_units=int(cores()) if cores else None,
            memory_bytes=int(torch.mps.recommended_max_memory()),
            driver=f"macOS {platform.mac_ver()[0]}",
        )

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def read_free_memory_bytes(self) -> int | None:
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())

    def read_peak_memory_bytes(self) -> int | None:
        return None

    def release_cached_memory(self) -> None:
        torch.mps.empty_cache()

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        if dtype in ("tf32", "float64", "int8") or dtype.startswith("float8"):
            return f"Apple GPUs do not support matmuls of {dtype}; use float16 or float32"
        return super().explain_unsupported_dtype(dtype)
