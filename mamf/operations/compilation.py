"""What kernels made by torch.compile share, of either operation."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def with_own_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy whose compilations are counted by themselves.

    Dynamo keeps what it compiled by code object, for all closures of one ``def`` together, and after 8 shapes runs
    further ones uncompiled.
    """
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def compiled_for_repetition() -> AbstractContextManager[object]:
    """Held while a compiled kernel is prepared: its backward must leave the graph's buffers alone, to run again."""
    import torch._functorch.config

    manager: AbstractContextManager[object] = torch._functorch.config.patch(donated_buffer=False)
    return manager
