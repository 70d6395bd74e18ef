"""A script: run in this process as Python would, beside the profilers that it starts itself."""

from __future__ import annotations

import contextlib
import functools
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from mamf.errors import UsageError

_INTERRUPTED = 130
_PREPARE, _EXIT, _EXPORT = "_prepare_trace", "__exit__", "export_chrome_trace"


@dataclass(frozen=True)
class Program:
    """A script with its arguments, or with ``is_module`` a module as ``python -m`` runs it."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def require(self) -> None:
        """Raises UsageError for a file or module that does not exist."""
        with self.in_place():
            if not (find_spec(self.name.partition(".")[0]) if self.is_module else Path(self.name).is_file()):
                raise UsageError(f"cannot run {self.name}: there is no such {'module' if self.is_module else 'file'}")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Arguments and the first folder of modules as the program expects them."""
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(Path().resolve() if self.is_module else Path(self.name).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path

    def run(self) -> int:
        """Run it in its place as Python would; returns its exit code."""
        try:
            if self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as ended:
            return _exit_code(ended.code)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except BaseException as error:
            trace = _within(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return 1
        return 0


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _within(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script on, without the frames that ran it."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        trace = trace.tb_next
    return trace


class ScriptProfilers:
    """The profilers that a script starts itself: torch has one at a time, so mamf steps aside for them.

    ``active``: those at work, from their preparation on. ``is_own``: whether mamf itself starts one.

    ``began`` is called before a profiler of the script is prepared. ``copy``: where its last trace is kept.
    """

    def __init__(self, began: Callable[[], None], copy: Path) -> None:
        self.active: set[int] = set()
        self.is_own = False
        self._began, self._copy = began, copy
        self._last: Any = None

    def watch(self, until: contextlib.ExitStack) -> None:
        """``torch.profiler.profile`` uses ``torch.autograd.profiler.profile``: that one is watched."""
        from torch.autograd.profiler import profile

        for name in (_PREPARE, _EXIT, _EXPORT):
            usual = getattr(profile, name)
            until.callback(setattr, profile, name, usual)
            setattr(profile, name, self._watched(name, usual))

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
