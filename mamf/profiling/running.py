"""Runs a script in this process as Python would, and some of its steps under torch.profiler.

A training step ends when its optimizer has stepped, a named function returns, or the script marks its end. An end
within a backward pass waits until the pass has returned: torch.profiler crashes if it is stopped within it. Steps
without the profiler are timed right before those with it, so that the profiler's own cost is seen.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mamf.errors import UsageError, first_line
from mamf.operations.tracing.events import Trace
from mamf.operations.tracing.torch_traces import mark_step, synchronize, torch_profiler
from mamf.operations.tracing.traces import read_chrome_trace
from mamf.profiling import listen, unlisten
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.ranges import ModuleRanges
from mamf.profiling.script import Program, ScriptProfilers

_OF_SCRIPT = "these are the steps of the script's own torch.profiler: it left too few others"
_ASIDE = "the script starts torch.profiler itself: mamf steps aside, and profiles other steps if there are enough"


class StepProfiler:
    """Profiles the steps that are due, called at each step's end. ``steps``: how many are timed, then profiled;
    ``watches``: observe the same steps. ``profiled_all`` is called after the last of them. ``stop``: end the script
    then. ``say`` prints a line; ``folder`` is for files in between.

    Errors never end the script: they are reported in ``failure``, one line.
    """

    def __init__(
        self,
        steps: int,
        warmup: int,
        folder: Path,
        watches: Sequence[MemoryWatch | ModuleRanges] = (),
        *,
        stop: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self.failure = ""
        self.profiled_all: Callable[[], object] = lambda: None
        self.watches = watches
        self.seen = self.profiled = self._undisturbed = 0
        self.unprofiled_step_seconds: float | None = None
        self.others = ScriptProfilers(self._step_aside, folder / "script.json")
        self._steps, self._warmup, self.stop = steps, warmup, stop
        self._folder, self._say = folder, functools.cache(say)  # once
        self._profiler: Any = None
        self._began, self._is_running = 0.0, False
        self._has_step_to_end = False

    @property
    def is_complete(self) -> bool:
        return self.profiled == self._steps

    def step_ended(self) -> None:
        """Several ends within a backward pass, of optimizers that step in hooks, are one."""
        if is_in_backward():
            self._has_step_to_end = True
            return
        self._has_step_to_end = False
        self.seen += 1
        if not self.is_complete and not self.others.active:
            try:
                self._go_on()
            except Exception as error:  # such as a profiler that is not torch's at work
                self.failure, self._is_running = first_line(error), False
        if self.stop and self.is_complete:  # once more if the script goes on
            raise SystemExit(0)

    def backward_returned(self) -> None:
        if self._has_step_to_end:
            self.step_ended()

    def _go_on(self) -> None:
        self._undisturbed += 1
        if self._undisturbed == self._warmup:
            synchronize()
            self._began = time.perf_counter()
        elif self._undisturbed == self._warmup + self._steps:
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

    # What was timed or profiled of incomplete steps is dropped; after the script's profiler they begin anew.
    def _step_aside(self) -> None:
        if self.is_complete:
            return
        self._say(_ASIDE)
        with suppress(RuntimeError):
            self.finish()
        self.profiled, self.unprofiled_step_seconds = 0, None
        self._undisturbed = min(self._undisturbed, self._warmup - 1)

    def _start(self) -> None:
        self._profiler = torch_profiler(record_shapes=True)
        self.others.is_own = True
        self._profiler.start()
        self.others.is_own = False
        self._is_running = True
        for watch in self.watches:
            watch.start()
        synchronize()
        mark_step()

    def finish(self) -> None:
        """Stop after the device has finished its queue. Has no effect after the first call."""
        if not self._is_running:
            return
        self._is_running = False
        synchronize()
        for watch in self.watches:
            watch.finish()
        if self.is_complete:
            mark_step()
        self._profiler.stop()

    def read_trace(self, kept: Path | None) -> Trace | None:
        """The profiled steps, or at the end of the script those that it traced itself; None without any.

        ``kept``: where the trace stays.
        """
        path, own = kept or self._folder / "trace.json", None if self.profiled else self.others.trace()
        if own:
            shutil.copyfile(own, path)
        elif not self.profiled:
            return None
        elif not path.exists():
            self._profiler.export_chrome_trace(str(path))
        trace = read_chrome_trace(path)
        return replace(trace, notes=(*trace.notes, _OF_SCRIPT)) if own else trace

    def why_nothing(self, function: str | None) -> str:
        """Why there is no profiled step, in a line. ``function``: the function whose calls are the steps."""
        if self.failure:
            return f"torch.profiler says: {self.failure}"
        if not self.seen and function is not None:
            return f"{function} was not called (what the script itself defines is another): call mamf.profiling.step()"
        if not self.seen:
            named = "name a function, as --calls torch:Tensor.backward, or call mamf.profiling.step()"
            return f"no optimizer of torch stepped; {named}"
        return f"the script took {self.seen} of {self._warmup + 2 * self._steps} steps: lower --warmup or --steps"


def profile_program(program: Program, profiler: StepProfiler, function: str | None = None) -> int:
    """Run a program under a profiler: a training step ends when ``function`` (``module:function``) returns, by
    default when the script's first optimizer has stepped. Returns the program's exit code, 0 if it was stopped.

    Raises UsageError for an unknown function.
    """
    with program.in_place(), _following_steps(profiler, function):
        code = program.run()
    return 0 if profiler.stop and profiler.is_complete else code


@contextmanager
def _following_steps(profiler: StepProfiler, function: str | None) -> Iterator[None]:
    """``mamf.profiling.step()`` ends a step in any case."""
    with ExitStack() as stack:
        listen(profiler.step_ended)
        stack.callback(unlisten, profiler.step_ended)
        stack.callback(_follow_backward(profiler))
        profiler.others.watch(stack)
        stack.callback(profiler.finish)
        for watch in profiler.watches:
            if isinstance(watch, MemoryWatch):  # before what ends the step
                stack.callback(_follow_memory(watch).remove)
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
        """With several optimizers (a GAN), the first of them ends the step. Those that step in hooks of the backward
        pass end it together.
        """
        by = "backward" if is_in_backward() else optimizer
        if not first:
            first.append(by)
        if first[0] is by:
            profiler.step_ended()

    return register_optimizer_step_post_hook(stepped)


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    import torch

    return torch._C._current_graph_task_id() != -1


def _follow_backward(profiler: StepProfiler) -> Callable[[], None]:
    """Tell the profiler when a backward pass has returned; returns a call that restores torch."""
    import torch

    usual = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

    def following(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*arguments: Any, **keywords: Any) -> Any:
            returned = run(*arguments, **keywords)
            profiler.backward_returned()
            return returned

        return call

    def restore() -> None:
        for name, run in usual.items():
            setattr(torch.autograd, name, run)

    for name, run in usual.items():
        setattr(torch.autograd, name, following(run))
    return restore


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


# The number of this process among those of torchrun.
def rank() -> int:
    return int(os.environ.get("RANK", "0"))


# Opening another device makes it torch's current one: afterwards that is again the one from before.
def keeping_device() -> AbstractContextManager[object]:
    import torch

    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()
