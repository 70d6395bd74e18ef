"""Checks whether Triton kernels can run on a device, for all operations."""

from __future__ import annotations

import importlib.util

from mamf.backend import Backend, Unavailable


def check_triton(backend: Backend, instead: str) -> Unavailable | None:
    """Why Triton does not support this backend, or None. ``instead``: a kernel that does."""
    if not backend.is_accelerator:
        return Unavailable("Triton kernels need a GPU", f"use the kernel {instead}, which runs everywhere")
    if importlib.util.find_spec("triton") is None:
        return Unavailable("Triton is not installed", "pip install triton")
    try:
        driven = driven_device()
    except Exception as error:  # whatever a vendor's driver throws
        return Unavailable(f"Triton finds no GPU that it supports ({error})", f"use the kernel {instead}")
    if driven != getattr(backend, "device_type", None):
        return Unavailable(f"Triton runs on {driven} here, not on {backend.name}", f"use the kernel {instead}")
    return None


def driven_device() -> str:
    """The type of device that Triton's driver runs kernels on. Raises the driver's errors if there is none."""
    from triton.runtime import driver

    return str(driver.active.get_active_torch_device().type)
