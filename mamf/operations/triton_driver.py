"""Whether Triton's kernels can run on a device, for all operations that have some."""

from __future__ import annotations

import importlib.util

from mamf.backend import Backend, Unavailable


def check_triton(backend: Backend, instead: str) -> Unavailable | None:
    """Why Triton runs nothing on this backend, or None. ``instead``: the kernel that does."""
    if not backend.is_accelerator:
        return Unavailable("Triton's kernels run on a GPU", f"use the kernel {instead}, which runs everywhere")
    if importlib.util.find_spec("triton") is None:
        return Unavailable("Triton is not installed", "pip install triton")
    try:
        driven = driven_device()
    except Exception as error:  # whatever a vendor's driver throws
        return Unavailable(f"Triton finds no GPU that it can drive ({error})", f"use the kernel {instead}")
    if driven != getattr(backend, "device_type", None):
        return Unavailable(f"Triton drives {driven} here, not {backend.name}", f"use the kernel {instead}")
    return None


def driven_device() -> str:
    """The type of device that Triton's driver runs kernels on. Raises whatever the driver does where there is none."""
    from triton.runtime import driver

    return str(driver.active.get_active_torch_device().type)
