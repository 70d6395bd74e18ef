"""Helpers for kernels that use torch.compile."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def compile_for_shape(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function with torch.compile for one shape. A failure raises instead of running uncompiled.

    Dynamo caches compilations per code object, so all closures of one ``def`` share a cache, and after 8 shapes further
    ones run uncompiled. Compiling a copy of the function avoids that.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True, **options)
    return compiled


def keep_backward_buffers() -> AbstractContextManager[object]:
    """A context for preparing compiled kernels whose backward pass runs repeatedly, so it must not reuse the graph's
    buffers.
    """
    import torch._functorch.config

    manager: AbstractContextManager[object] = torch._functorch.config.patch(donated_buffer=False)
    return manager
