"""What kernels that are made by torch.compile share."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def compile_for_shape(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function compiled by torch.compile for one shape; an error instead of a slow, uncompiled run.

    Dynamo keeps compilations by code object, for all closures of one ``def`` together, and runs further ones
    uncompiled after 8 shapes. So a copy of the function is compiled.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, fullgraph=True, **options)
    return compiled


def keep_backward_buffers() -> AbstractContextManager[object]:
    """Held while a compiled kernel is prepared: its backward must leave the graph's buffers alone, to run again."""
    import torch._functorch.config

    manager: AbstractContextManager[object] = torch._functorch.config.patch(donated_buffer=False)
    return manager
