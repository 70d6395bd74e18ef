"""Runs a script in this process as Python would, and some of its steps under torch.profiler.

A training step ends when its optimizer has stepped, a named function returns, or the script marks its end. An end
within a backward pass waits until the pass has returned: torch.profiler crashes if it is stopped within it. Steps
without the profiler are timed right before those with it, so that the profiler's own cost is seen.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mamf.errors import UsageError, describe_error, first_line
from mamf.profiling import listen, unlisten
from mamf.profiling.events import Trace
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.ranges import ModuleRanges
from mamf.profiling.script import Program
from mamf.profiling.traces import mark_step, read_chrome_trace, synchronize, torch_profiler

_OTHER = "the script starts torch.profiler itself: read its trace with 'mamf profile --from'"


class StepProfiler:
    """Profiles the steps that are due, called at each step's end. ``steps``: how many are timed, then profiled;
    ``watches``: observe the same steps. ``profiled_all`` is called after the last of them. ``stop``: end the script
    then.

    Errors never end the script: they are reported in ``failure``, one line, and nothing is profiled after them.
    """

    def __init__(
        self, steps: int, warmup: int, watches: Sequence[MemoryWatch | ModuleRanges] = (), *, stop: bool = False
    ) -> None:
        self.failure = ""
        self.profiled_all: Callable[[], object] = lambda: None
        self.watches = watches
        self.seen = self.profiled = 0
        self.unprofiled_step_seconds: float | None = None
        self._steps, self._warmup, self.stop = steps, warmup, stop
        self._process = os.getpid()
        self._profiler: Any = None
        self._began, self._has_step_to_end = 0.0, False
        self._is_starting = self._is_running = False

    @property
    def is_complete(self) -> bool:
        return self.profiled == self._steps

    @property
    def is_in_fork(self) -> bool:
        """Whether this is a process that the script forked, which is not profiled."""
        return os.getpid() != self._process

    def step_ended(self) -> None:
        """Several ends within a backward pass, of optimizers that step in hooks, are one."""
        if self.is_in_fork:
            return
        self._has_step_to_end = is_in_backward()
        if self._has_step_to_end:
            return
        self.seen += 1
        if not self.is_complete and not self.failure:
            try:
                self._go_on()
            except Exception as error:  # such as a profiler that is not torch's at work
                self.failure, self._is_running = describe_error(error), False
        if self.stop and self.is_complete:  # once more if the script goes on
            raise SystemExit(0)

    def backward_returned(self) -> None:
        if self._has_step_to_end:
            self.step_ended()

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
            if self.is_complete:
                self.finish()
                self.profiled_all()
            else:
                mark_step()

    def other_began(self) -> None:
        """Give way to a profiler of the script: torch runs one at a time."""
        if self._is_starting or self.is_complete or self.is_in_fork:
            return
        self.failure = _OTHER
        with suppress(RuntimeError):
            self.finish()

    def _start(self) -> None:
        self._profiler = torch_profiler(record_shapes=True)
        self._is_starting = True
        self._profiler.start()
        self._is_starting, self._is_running = False, True
        for watch in self.watches:
            watch.start()
        synchronize()
        mark_step()

    def finish(self) -> None:
        """Stop after the device has finished its queue. Has no effect after the first call."""
        if not self._is_running or self.is_in_fork:
            return
        self._is_running = False
        synchronize()
        for watch in self.watches:
            watch.finish()
        if self.is_complete:
            mark_step()
        self._profiler.stop()

    def read_trace(self, path: Path) -> Trace | None:
        """The profiled steps, None without any. ``path``: where their trace is written."""
        if not self.profiled or self.failure:
            return None
        if not path.exists():
            self._profiler.export_chrome_trace(str(path))
        return read_chrome_trace(path)

    def why_nothing(self, function: str | None) -> str:
        """Why there is no profiled step, in a line. ``function``: the function whose calls are the steps."""
        if self.failure:
            return self.failure
        if not self.seen and function is not None:
            return f"{function} was not called (what the script itself defines is another): call mamf.profiling.step()"
        if not self.seen:
            named = "name a function, as --calls torch:Tensor.backward, or call mamf.profiling.step()"
            return f"no optimizer of torch stepped in this process; {named}"
        return f"the script took {self.seen} of {self._warmup + 2 * self._steps} steps: lower --warmup or --steps"


def profile_program(program: Program, profiler: StepProfiler, function: str | None = None) -> int:
    """Run a program under a profiler: a training step ends when ``function`` (``module:function``) returns, by
    default when the script's first optimizer has stepped. Returns the program's exit code, 0 if it was stopped.

    Raises UsageError for an unknown function.
    """
    with program.in_place(), _following_steps(profiler, function):
        code = program.run()
    if profiler.is_in_fork:  # what follows is the business of the process that was started
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
    return 0 if profiler.stop and profiler.is_complete else code


@contextmanager
def _following_steps(profiler: StepProfiler, function: str | None) -> Iterator[None]:
    """``mamf.profiling.step()`` ends a step in any case."""
    import torch
    from torch.autograd.profiler import profile  # torch.profiler uses it too

    with ExitStack() as stack:
        listen(profiler.step_ended)
        stack.callback(unlisten, profiler.step_ended)
        for name in ("backward", "grad"):
            _wrap(stack, torch.autograd, name, after=profiler.backward_returned)
        _wrap(stack, profile, "_prepare_trace", before=profiler.other_began)
        stack.callback(profiler.finish)
        for watch in profiler.watches:
            if isinstance(watch, MemoryWatch):  # before what ends the step
                stack.callback(_after_optimizers(watch.stepped).remove)
        if function is None:
            stack.callback(_after_optimizers(_ending_steps(profiler)).remove)
        else:
            owner, name = _found(function)
            _wrap(stack, owner, name, after=profiler.step_ended)
        yield


def _wrap(
    stack: ExitStack, owner: Any, name: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool
) -> None:
    """Call others before and after a function, until the stack is closed."""
    usual = getattr(owner, name)

    @functools.wraps(usual)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        before()
        returned = usual(*arguments, **keywords)
        after()
        return returned

    setattr(owner, name, wrapped)
    stack.callback(setattr, owner, name, usual)


def _after_optimizers(call: Callable[[Any], None]) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(lambda optimizer, *_: call(optimizer))


def _ending_steps(profiler: StepProfiler) -> Callable[[object], None]:
    """With several optimizers (a GAN), the first of them ends the step; those that step in hooks of the backward pass
    end it together.
    """
    first: list[object] = []

    def stepped(optimizer: object) -> None:
        by = "backward" if is_in_backward() else optimizer
        if not first:
            first.append(by)
        if first[0] is by:
            profiler.step_ended()

    return stepped


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    import torch

    return torch._C._current_graph_task_id() != -1


def _found(function: str) -> tuple[Any, str]:
    """The module or class that has a function (``module:function``), and its name there. Raises UsageError."""
    module_name, colon, name = function.partition(":")
    *owners, attribute = name.split(".")
    try:
        if not colon:
            raise ValueError("write module:function")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module_name))
        getattr(owner, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--calls {function}: {first_line(error)}") from None
    return owner, attribute


def rank() -> int:
    """The number of this process among those of torchrun."""
    return int(os.environ.get("RANK", "0"))


def keeping_device() -> AbstractContextManager[object]:
    """Restore torch's current device afterwards: opening another one makes that the current one."""
    import torch

    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()
