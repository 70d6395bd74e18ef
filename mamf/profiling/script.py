"""A script: run in this process as Python would."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from mamf.errors import UsageError

_INTERRUPTED = 130
#: Files that mamf reads, but cannot run.
_LOGS, _TRACES = (".jsonl",), (".json", ".gz", ".csv")


@dataclass(frozen=True)
class Program:
    """A script with its arguments, or with ``is_module`` a module as ``python -m`` runs it."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def require(self) -> None:
        """Raises UsageError for a file or module that does not exist, and for a log or a trace."""
        kind = "" if self.is_module else Path(self.name).suffix
        if kind in (*_LOGS, *_TRACES):
            read = f"mamf show {self.name}" if kind in _LOGS else f"mamf profile --from {self.name}"
            raise UsageError(f"{self.name} is not a script: read it with '{read}'")
        with self.in_place():
            if not (find_spec(self.name.partition(".")[0]) if self.is_module else Path(self.name).is_file()):
                raise UsageError(f"cannot run {self.name}: there is no such {'module' if self.is_module else 'file'}")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Set arguments and the first folder of modules as the program expects them."""
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
