"""Compile functions for one shape, read the architecture of a device, and check whether Triton works."""

from __future__ import annotations

import importlib.util
import re
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from mamf.backend import Backend, Unavailability


def compile_with_static_shapes(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a copy of a function that torch.compile compiles for one shape.

    If compilation fails, a call raises an error instead of running uncompiled code. The function is copied, because
    Dynamo has one cache for each code object, and all closures of one ``def`` share a code object. Without copies, the
    cache would be full after 8 shapes, and Dynamo would run the function uncompiled.
    """
    assert isinstance(function, types.FunctionType)
    copied_function = types.FunctionType(
        *(function.__code__.replace(), function.__globals__, function.__name__),
        *(function.__defaults__, function.__closure__),
    )
    return torch.compile(copied_function, dynamic=False, fullgraph=True, **options)


def keep_backward_buffers() -> AbstractContextManager[object]:
    """Return a context in which torch.compile generates code that keeps the buffers of the autograd graph after a
    backward pass.

    Prepare kernels in this context if they run the backward pass several times on one autograd graph.
    """
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]


def get_architecture_major_version(backend: Backend) -> int:
    """Return the major version of the NVIDIA architecture of a backend's device, such as 9 for sm_90; 0 if unknown."""
    match = re.fullmatch(r"sm_(\d+)\d", backend.info.architecture or "", re.ASCII)
    return int(match[1]) if match else 0


def explain_triton_unavailability(backend: Backend, alternative_kernel: str) -> Unavailability | None:
    """Return why Triton cannot run kernels on this backend, or None if it can.

    ``alternative_kernel``: the name of a kernel without Triton, which the result suggests to the user.
    """
    if not backend.is_accelerator:
        return Unavailability(
            "Triton kernels need a GPU", f"use the kernel {alternative_kernel}, which runs everywhere"
        )
    if importlib.util.find_spec("triton") is None:
        return Unavailability("Triton is not installed", "pip install triton")
    try:
        device_type = get_triton_device_type()
    except Exception as error:  # A vendor's driver may raise any error.
        return Unavailability(f"Triton finds no GPU that it supports ({error})", f"use the kernel {alternative_kernel}")
    if device_type != getattr(backend, "device_type", None):
        return Unavailability(
            f"Triton runs on {device_type} here, not on {backend.name}", f"use the kernel {alternative_kernel}"
        )
    return None


def get_triton_device_type() -> str:
    """Return torch's name for the type of device that Triton runs kernels on, such as ``cuda``.

    Raises an error of the vendor's driver if Triton finds no device.
    """
    from triton.runtime import driver

    return str(driver.active.get_active_torch_device().type)
