"""The profilers that a script starts itself. torch has one at a time, so mamf steps aside for them."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PREPARE, _EXIT, _EXPORT = "_prepare_trace", "__exit__", "export_chrome_trace"


class ScriptProfilers:
    """``active``: those at work, from their preparation on. ``is_own``: whether mamf itself starts one.

    ``began`` is called before a profiler of the script is prepared. ``copy``: where its last trace is kept.
    """

    def __init__(self, began: Callable[[], None], copy: Path) -> None:
        self.active: set[int] = set()
        self.is_own = False
        self._began, self._copy = began, copy
        self._last: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """``torch.profiler.profile`` uses ``torch.autograd.profiler.profile``: that one is watched."""
        from torch.autograd.profiler import profile

        usual = {name: getattr(profile, name) for name in (_PREPARE, _EXIT, _EXPORT)}
        for name, method in usual.items():
            setattr(profile, name, self._watched(name, method))
        try:
            yield
        finally:
            for name, method in usual.items():
                setattr(profile, name, method)

    def trace(self) -> Path | None:
        """The script's last trace, None without any. One that it did not export is saved here, which torch does
        only once: call this at the script's end.
        """
        if not self._copy.exists() and getattr(self._last, "kineto_results", None) is not None:
            with contextlib.suppress(RuntimeError):
                self._last.kineto_results.save(str(self._copy))
        return self._copy if self._copy.exists() else None

    def _watched(self, name: str, usual: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(usual)
        def method(profiler: Any, *arguments: Any, **keywords: Any) -> object:
            if name == _PREPARE and not self.is_own:
                self._began()
                self.active.add(id(profiler))
            returned = usual(profiler, *arguments, **keywords)
            if name == _EXIT and id(profiler) in self.active:
                self.active.discard(id(profiler))
                self._last = profiler
                self._copy.unlink(missing_ok=True)
            elif name == _EXPORT and profiler is self._last:
                with contextlib.suppress(OSError):
                    shutil.copyfile((*arguments, *keywords.values())[0], self._copy)
            return returned

        return method
