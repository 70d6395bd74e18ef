"""Helpers for kernels that use torch.compile or Triton."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mamf.backend import Backend, Unavailable


def compile_for_shape(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function with torch.compile for one shape. A failure raises instead of running uncompiled code.

    Dynamo caches compilations per code object, so all closures of one ``def`` share a cache, and after 8 shapes further
    ones would run uncompiled. Compiling a copy of the function avoids that.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    copied_function = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    compiled: Callable[..., Any] = torch.compile(copied_function, dynamic=False, fullgraph=True, **options)
    return compiled


def keep_backward_buffers() -> AbstractContextManager[object]:
    """Return a context in which compiled kernels do not reuse buffers of the autograd graph.

    Use it to prepare kernels that run the backward pass several times on one graph.
    """
    import torch._functorch.config

    manager: AbstractContextManager[object] = torch._functorch.config.patch(donated_buffer=False)
    return manager


def check_triton_backend(backend: Backend, alternative: str) -> Unavailable | None:
    """Return why Triton does not support this backend, or None. ``instead``: a kernel that supports it."""
    if not backend.is_accelerator:
        return Unavailable("Triton kernels need a GPU", f"use the kernel {alternative}, which runs everywhere")
    if importlib.util.find_spec("triton") is None:
        return Unavailable("Triton is not installed", "pip install triton")
    try:
        device_type = get_triton_device_type()
    except Exception as error:  # any error of a vendor's driver
        return Unavailable(f"Triton finds no GPU that it supports ({error})", f"use the kernel {alternative}")
    if device_type != getattr(backend, "device_type", None):
        return Unavailable(f"Triton runs on {device_type} here, not on {backend.name}", f"use the kernel {alternative}")
    return None


def get_triton_device_type() -> str:
    """Return the type of device that Triton runs kernels on. Raises the driver's errors if it finds no device."""
    from triton.runtime import driver

    return str(driver.active.get_active_torch_device().type)
