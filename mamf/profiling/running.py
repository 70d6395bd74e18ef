"""Runs a script in this process as Python would, and some of its steps under torch.profiler.

A training step ends when its optimizer has stepped, a named function returns, or the script marks its end. Steps
without the profiler are timed right before those with it, so that the profiler's own cost is seen.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from mamf.errors import NothingProfiledError, UsageError, first_line
from mamf.operations.tracing.torch_traces import mark_step, synchronize, torch_profiler
from mamf.profiling import listen, unlisten
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.ranges import ModuleRanges

_INTERRUPTED = 130


class StepProfiler:
    """Profiles the steps that are due, called at each step's end. ``steps``: how many are timed, then profiled;
    ``memory`` and ``ranges``: observe the same steps.

    Errors never end the script: they are reported in ``failure``, one line.
    """

    def __init__(
        self, steps: int, warmup: int, memory: MemoryWatch | None = None, ranges: ModuleRanges | None = None
    ) -> None:
        self.failure = ""
        self.memory = memory
        self._watches = [each for each in (memory, ranges) if each is not None]
        self.seen = 0
        self.profiled = 0
        self.unprofiled_step_seconds: float | None = None
        self._steps, self._warmup = steps, warmup
        self._began = 0.0
        self._profiler: Any = None
        self._is_running = False

    @property
    def due(self) -> int:
        """How many steps a script must take to be profiled."""
        return self._warmup + 2 * self._steps

    def step_ended(self) -> None:
        self.seen += 1
        try:
            self._go_on()
        except RuntimeError as error:  # such as another profiler at work
            self.failure, self._is_running = first_line(error), False

    def _go_on(self) -> None:
        if self.seen == self._warmup:
            synchronize()
            self._began = time.perf_counter()
        elif self.seen == self._warmup + self._steps:
            synchronize()
            self.unprofiled_step_seconds = (time.perf_counter() - self._began) / self._steps
            self._start()
        elif self._is_running:
            self.profiled += 1
            if self.profiled == self._steps:
                self.finish()
            else:
                mark_step()

    def _start(self) -> None:
        self._profiler = torch_profiler(record_shapes=True)
        self._profiler.start()
        self._is_running = True
        for watch in self._watches:
            watch.start()
        synchronize()
        mark_step()

    def finish(self) -> None:
        """Stop after the device has finished its queue. Has no effect after the first call."""
        if not self._is_running:
            return
        self._is_running = False
        synchronize()
        for watch in self._watches:
            watch.finish()
        if self.profiled == self._steps:
            mark_step()
        self._profiler.stop()

    def write_trace(self, path: Path) -> None:
        """The profiled steps as a Chrome trace."""
        self._profiler.export_chrome_trace(str(path))

    def why_nothing(self, function: str | None) -> str:
        """Why there is no profiled step, in a line. ``function``: the function whose calls are the steps."""
        if self.failure:
            return f"torch.profiler says: {self.failure}"
        if not self.seen and function is not None:
            return f"{function} was not called (what the script itself defines is another): call mamf.profiling.step()"
        if not self.seen:
            return "no optimizer of torch stepped; name a function by --calls, or call mamf.profiling.step()"
        return f"the script took {self.seen} of {self.due} steps: lower --warmup or --steps"


def profile_script(script: Path, arguments: Sequence[str], profiler: StepProfiler, function: str | None = None) -> int:
    """Run a script under a profiler: a training step ends when ``function`` (``module:function``) returns, by
    default when the script's first optimizer has stepped. Returns the script's exit code.

    Raises UsageError for an unknown function, NothingProfiledError if no step was profiled.
    """
    with _as_program(script, arguments), _following_steps(profiler, function):
        code = _run(script)
    if not profiler.profiled:
        raise NothingProfiledError(profiler.why_nothing(function), code)
    return code


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Run a script with its arguments as Python would; returns its exit code."""
    with _as_program(script, arguments):
        return _run(script)


@contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return _exit_code(ended.code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:
        trace = _within(script, error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _within(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script on, without the frames that ran it."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


@contextmanager
def _following_steps(profiler: StepProfiler, function: str | None) -> Iterator[None]:
    """``mamf.profiling.step()`` ends a step in any case."""
    with ExitStack() as stack:
        listen(profiler.step_ended)
        stack.callback(unlisten, profiler.step_ended)
        stack.callback(profiler.finish)
        if profiler.memory is not None:  # before what ends the step
            stack.callback(_follow_memory(profiler.memory).remove)
        if function is None:
            stack.callback(_follow_optimizer(profiler).remove)
        else:
            stack.callback(_follow_function(profiler, function))
        yield


def _follow_memory(memory: MemoryWatch) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(lambda optimizer, *_: memory.stepped(optimizer))


def _follow_optimizer(profiler: StepProfiler) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: list[object] = []

    def stepped(optimizer: object, *_: object) -> None:
        """With several optimizers (a GAN), the first of them ends the step."""
        if not first:
            first.append(optimizer)
        if first[0] is optimizer:
            profiler.step_ended()

    return register_optimizer_step_post_hook(stepped)


def _follow_function(profiler: StepProfiler, function: str) -> Callable[[], None]:
    """Wrap a function to mark steps; returns a call that restores it."""
    module_name, colon, name = function.partition(":")
    *owners, attribute = name.split(".")
    try:
        if not colon:
            raise ValueError("write module:function")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module_name))
        followed = getattr(owner, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--calls {function}: {first_line(error)}") from None

    @functools.wraps(followed)
    def following(*arguments: Any, **keywords: Any) -> Any:
        returned = followed(*arguments, **keywords)
        profiler.step_ended()
        return returned

    setattr(owner, attribute, following)
    return lambda: setattr(owner, attribute, followed)


def is_reporting_rank() -> bool:
    """Whether this process reports: of torchrun's processes only the first does."""
    return os.environ.get("RANK", "0") == "0"
