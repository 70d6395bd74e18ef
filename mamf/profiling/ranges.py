"""Ranges around modules, for the trace and for the vendor's own profiler: which module launched a kernel."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from mamf.errors import UnavailableError, describe_error
from mamf.profiling.classes import MODULE


class ModuleRanges:
    """A range around the forward pass of every module, from ``start`` to ``finish``, within a window of the vendor's
    profiler. ``remark``: why ranges are missing, a line. Errors here never end the script.

    ``opened``: makes the backend, or in_trace for ranges in the trace. ``start`` calls it, because the script may first
    choose its devices.
    """

    def __init__(self, opened: Callable[[], Any]) -> None:
        self.remark = ""
        self._opened = opened
        self._backend: Any = None
        self._running = ExitStack()
        self._open = _Open()
        #: Names of modules within the outermost that was called.
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def start(self) -> None:
        with self._giving_up():
            self._backend = backend = self._opened()
            if backend.profiler_range("a module") is None:
                raise UnavailableError(f"no profiler of {backend.info.name} ({backend.name}) reads them")
            self._running.enter_context(backend.profiler_window("steps"))
            for each in _eager_modules():
                self._running.callback(each.register_forward_pre_hook(self._enter, prepend=True).remove)
                self._running.callback(each.register_forward_hook(self._leave, always_call=True).remove)

    def finish(self) -> None:
        """Has no effect after the first call."""
        with self._giving_up():
            while self._open.ranges:
                self._open.ranges.pop()[1].__exit__(None, None, None)
            self._running.close()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._give_up(describe_error(error))

    def _give_up(self, reason: str) -> None:
        self.remark = f"there are no ranges by module: {reason}"
        self._open = _Open()
        self._running.close()

    def _enter(self, module: Any, *_: object) -> None:
        import torch

        if torch.compiler.is_compiling():  # compiled code stays unchanged
            return
        with self._giving_up():
            own = self._backend.profiler_range(self._name(module))
            own.__enter__()
            self._open.ranges.append((module, own))

    def _leave(self, module: Any, *_: object) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        ranges = self._open.ranges
        if ranges and ranges[-1][0] is module:
            with self._giving_up():
                ranges.pop()[1].__exit__(None, None, None)

    def _name(self, module: Any) -> str:
        """Such as ``model.layers.0.mlp: LlamaMLP``."""
        if module not in self._names:
            for name, each in module.named_modules():
                kind = type(each).__name__
                self._names.setdefault(each, f"{name}: {kind}" if name else kind)
        return self._names[module]


def in_trace() -> SimpleNamespace:
    """In place of a backend: ranges in the trace of torch.profiler, from which times by module follow."""
    from torch.profiler import record_function

    return SimpleNamespace(profiler_window=nullcontext, profiler_range=lambda name: record_function(f"{MODULE}{name}"))


# Hooks of what is compiled, or of all modules at once, would make torch compile in the middle of the profiled steps.
def _eager_modules() -> list[Any]:
    import torch

    found = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    compiled = [each for each in found if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None)]
    parts = {part for each in compiled for part in each.modules() if part is not each or not hasattr(each, "_orig_mod")}
    return [each for each in found if each not in parts and not isinstance(each, torch.fx.GraphModule)]


class _Open(threading.local):
    """Open ranges per thread: checkpointed modules run again in the thread of the backward pass."""

    def __init__(self) -> None:
        self.ranges: list[tuple[Any, AbstractContextManager[object]]] = []
