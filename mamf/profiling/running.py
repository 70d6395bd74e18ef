"""Runs a script in this process as Python would, and profiles some of its steps with torch.profiler.

A training step ends when its optimizer has stepped, when a named function returns, or when the script marks its end. If
that is within a backward pass, the step ends when the pass returns, because torch.profiler crashes if it is stopped
within one. Steps without the profiler are timed right before those with it, to show what the profiler costs.
"""

from __future__ import annotations

import ast
import atexit
import functools
import importlib
import os
import runpy
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from mamf.errors import UsageError, describe_error, get_first_line
from mamf.profiling.traces import STEP_MARK, Trace, read_trace
from mamf.profiling.watches import DtypeWatch, MemoryWatch, ModuleRanges

Watch = MemoryWatch | DtypeWatch | ModuleRanges

_INTERRUPTED_EXIT_CODE = 130
#: Suffixes of files that mamf reads and cannot run.
_LOG_SUFFIXES, _TRACE_SUFFIXES = (".jsonl",), (".json", ".gz", ".csv")
# A log level at which the profiler's library does not print a line at each start and stop.
_QUIET_KINETO_LOG_LEVEL = "6"
_MAIN_PREFIX, _DECORATOR_VARIABLE = "__main__:", "__mamf_decorator__"


@dataclass(frozen=True)
class Program:
    """A script and its arguments. ``is_module``: ``name`` is a module, run as by ``python -m``."""

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check_exists(self) -> None:
        """Raise UsageError if the file or module does not exist, or is a log or a trace."""
        kind = "" if self.is_module else Path(self.name).suffix
        if kind in (*_LOG_SUFFIXES, *_TRACE_SUFFIXES):
            read = f"mamf show {self.name}" if kind in _LOG_SUFFIXES else f"mamf profile --from {self.name}"
            raise UsageError(f"{self.name} is not a script: read it with '{read}'")
        with self.prepare_interpreter():
            if not (find_spec(self.name.partition(".")[0]) if self.is_module else Path(self.name).is_file()):
                raise UsageError(f"cannot run {self.name}: there is no such {'module' if self.is_module else 'file'}")

    @contextmanager
    def prepare_interpreter(self) -> Iterator[None]:
        """Set ``sys.argv`` and the first folder in ``sys.path`` as the program expects them, until the context ends."""
        argv, path = sys.argv, list(sys.path)
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(Path().resolve() if self.is_module else Path(self.name).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, path

    def run(self, run_decorated: Callable[[], None] | None = None) -> int:
        """Run the program as Python would, and return its exit code. ``run_decorated``: from ``make_decorated_run``."""
        try:
            if run_decorated:
                run_decorated()
            elif self.is_module:
                runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.name, run_name="__main__")
        except SystemExit as exit_request:
            if exit_request.code is None or isinstance(exit_request.code, int):
                return exit_request.code or 0
            sys.stderr.write(f"{exit_request.code}\n")
            return 1
        except KeyboardInterrupt:
            return _INTERRUPTED_EXIT_CODE
        except BaseException as error:
            trace = _drop_runner_frames(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return 1
        return 0

    def make_decorated_run(self, function: str, decorator: object) -> Callable[[], None]:
        """Return a function that runs the program with a decorator around a function that it defines.

        Raises UsageError if the program does not define it.
        """
        spec = find_spec(self.name) if self.is_module else None
        if spec is not None and spec.submodule_search_locations:  # a package
            spec = find_spec(f"{self.name}.__main__")
        path = spec.origin if spec and spec.origin else self.name
        try:
            tree = ast.parse(Path(path).read_bytes(), path)
        except SyntaxError as error:
            raise UsageError(f"cannot run {path}: {get_first_line(error)}") from None
        defined: Any = tree
        for name in function.split("."):
            inner = (each for each in defined.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)))
            defined = next((each for each in inner if each.name == name), None)
            if defined is None:
                raise UsageError(f"--calls {_MAIN_PREFIX}{function}: {Path(path).name} defines no such function")
        defined.decorator_list.insert(0, ast.Name(_DECORATOR_VARIABLE, ast.Load()))
        code = compile(ast.fix_missing_locations(tree), path, "exec")
        main = types.ModuleType("__main__")
        main.__dict__.update(
            __file__=path, __spec__=spec, __package__=spec and spec.parent, **{_DECORATOR_VARIABLE: decorator}
        )

        def run_decorated() -> None:
            sys.argv[0], original, sys.modules["__main__"] = path, sys.modules["__main__"], main
            try:
                exec(code, main.__dict__)
            finally:
                sys.modules["__main__"] = original

        return run_decorated


def _drop_runner_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that ran the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        trace = trace.tb_next
    return trace


class StepProfiler:
    """Profiles some training steps of a script. Call ``end_step`` at the end of each step.

    - ``warmup``: how many steps to skip. ``steps``: how many steps to time after that, and then to profile.
    - ``watches``: further observers of the profiled steps. ``stop``: whether to end the script after the last step.
    - ``on_profiled``: called once, right after the last profiled step.
    - ``failure``: an error, in one line. Errors never end the script; after one, nothing more is profiled.

    A script may fork processes that train. mamf profiles the first process of this rank that ends a step. That process
    makes a file in ``folder``, so that the others know.
    """

    def __init__(
        self,
        steps: int,
        warmup: int,
        folder: Path,
        watches: Sequence[Watch] = (),
        *,
        stop: bool = False,
    ) -> None:
        self.failure = self._remark = ""
        #: The names of optimizers that stepped outside of a backward pass, by id.
        self.optimizers: dict[int, str] = {}
        self.on_profiled: Callable[[], object] = lambda: None
        self.watches = watches
        self.unprofiled_step_seconds: float | None = None
        self._steps, self._warmup, self.stop = steps, warmup, stop
        self._step_count = self._profiled_steps = 0
        self._first_process_id, self._rank, self._claim_file = os.getpid(), get_rank(), folder / "profiled"
        self._profiled_process_id: int | None = None
        self._profiler: Any = None
        self._unprofiled_start_seconds, self._has_delayed_step, self._has_delayed_sigterm = 0.0, False, False
        self._is_starting = self._is_running = False

    @property
    def is_complete(self) -> bool:
        return self._profiled_steps == self._steps

    @property
    def _is_unprofiled_process(self) -> bool:
        return os.getpid() != (self._profiled_process_id or self._first_process_id)

    def _claim_steps(self) -> bool:
        """Return whether this process is the one to profile: the first in which this is called."""
        if self._profiled_process_id is None and get_rank() == self._rank:
            is_first = os.getpid() == self._first_process_id  # even if the script has removed the folder
            try:
                self._claim_file.touch(exist_ok=False)
                is_first = True
            except FileExistsError:
                is_first = False
            except OSError:
                pass  # only the first process can report without the folder
            self._profiled_process_id = os.getpid() if is_first else 0
        return self._profiled_process_id == os.getpid()

    def end_step(self) -> None:
        """End a step. Several calls within one backward pass, of optimizers that step in its hooks, end one step."""
        if not self._claim_steps():
            return
        self._has_delayed_step = is_in_backward()
        if self._has_delayed_step:
            return
        self._step_count += 1
        if not (self.is_complete or self.failure or self._remark):
            with self._record_errors():
                self._switch_profiler_at_step()
        if self.stop and self.is_complete:  # also at later steps, if the script catches SystemExit and continues
            raise SystemExit(0)

    def end_delayed_step_after_backward(self) -> None:
        if self._has_delayed_sigterm:
            self.keep_steps_and_exit()
        if self._has_delayed_step:
            self.end_step()

    @contextmanager
    def _record_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # for example because another profiler is active
            self.failure, self._is_running = describe_error(error), False

    def _switch_profiler_at_step(self) -> None:
        if self._step_count == self._warmup:
            wait_for_device()
            self._unprofiled_start_seconds = time.perf_counter()
        elif self._step_count == self._warmup + self._steps:
            wait_for_device()
            self.unprofiled_step_seconds = (time.perf_counter() - self._unprofiled_start_seconds) / self._steps
            self._start()
        elif self._is_running:
            self._profiled_steps += 1
            if self.is_complete:
                self.finish()
                self.on_profiled()
            else:
                mark_end_of_step()

    def stop_for_profiler_of_script(self) -> None:
        """Stop when the script starts a profiler, because torch runs one at a time. Keep the steps profiled so far."""
        if self._is_starting or self.is_complete or self.failure or self._remark or self._is_unprofiled_process:
            return
        warmup = self._step_count - 2 * self._steps
        advice = f"; --warmup {warmup} gives {self._steps}" if warmup > 0 else ""
        if self._is_running:
            advice += "; mamf's profiler slowed the steps before that, so the script's own timing of them is wrong"
        if self._profiled_steps:
            self._remark = (
                f"{self._profiled_steps} of {self._steps} steps, because the script started a profiler{advice}"
            )
            with self._record_errors():
                self.finish()
                self.on_profiled()
        else:
            self.failure = f"the script starts torch.profiler itself: read its trace with 'mamf profile --from'{advice}"
            with suppress(RuntimeError):
                self.finish()

    def keep_steps_and_exit(self, *_: object) -> None:
        """Handle SIGTERM: keep the steps profiled so far, then end by the signal."""
        self._has_delayed_sigterm = not self._is_unprofiled_process and is_in_backward()
        if self._has_delayed_sigterm:  # this is called again when the backward pass has returned
            return
        if not (self._is_unprofiled_process or self.is_complete or self._remark):
            with self._record_errors():
                self.finish()
                self.on_profiled()
            if self.failure:
                sys.stderr.write(f"mamf: {self.failure}\n")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _start(self) -> None:
        self._profiler = make_torch_profiler(record_shapes=True)
        self._is_starting = True
        self._profiler.start()
        self._is_starting, self._is_running = False, True
        for watch in self.watches:
            watch.start()
        wait_for_device()
        mark_end_of_step()

    def finish(self) -> None:
        """Stop the profiler when the device has finished its queue. Later calls have no effect."""
        if not self._is_running or self._is_unprofiled_process:
            return
        self._is_running = False
        wait_for_device()
        for watch in self.watches:
            watch.finish()
        if self.is_complete:
            mark_end_of_step()
        self._profiler.stop()

    def read_trace(self, path: Path) -> Trace | None:
        """Return the trace of the profiled steps; None if there are none. ``path``: the file to write the trace to."""
        if not self._profiled_steps or self.failure:
            return None
        if not path.exists():
            self._profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
        first, *others = self.optimizers.values() or [""]
        several = f"several optimizers step: only the first, {first}, ends a step; others are {', '.join(others)}"
        return replace(trace, notes=(*trace.notes, *filter(None, (self._remark, several if others else ""))))

    def explain_no_profile(self, function: str | None) -> str:
        """Say in one line why no step was profiled. ``function``: the function whose calls are the steps."""
        if self.failure:
            return self.failure
        if not self._step_count and self._claim_file.exists():
            steps = self._warmup + 2 * self._steps
            return (
                f"the script forked a training process, which took fewer than {steps} steps: lower --warmup or --steps"
            )
        if not self._step_count and function is not None:
            return f"{function} was not called: write __main__:FUNCTION for a function that the script defines"
        if not self._step_count:
            named = "name a function that is a step, such as --calls torch:Tensor.backward or --calls __main__:train"
            return f"no optimizer of torch stepped in this process; {named}"
        return (
            f"the script took {self._step_count} of {self._warmup + 2 * self._steps} steps: lower --warmup or --steps"
        )


def profile_program(program: Program, profiler: StepProfiler, function: str | None = None) -> int:
    """Run a program under a profiler. Return its exit code; 0 if it was stopped.

    A training step ends when ``function`` (``module:function``) returns, or by default when the first optimizer of the
    script has stepped. Raises UsageError for an unknown function.
    """
    run_decorated, process = None, os.getpid()
    with program.prepare_interpreter(), _install_hooks_on_steps(profiler, function):
        if function and function.startswith(_MAIN_PREFIX):
            decorator = functools.partial(_wrap_with_hooks, after=profiler.end_step)
            run_decorated = program.make_decorated_run(function.removeprefix(_MAIN_PREFIX), decorator)
        code = program.run(run_decorated)
    if os.getpid() != process:  # the script forked this process: only its parent reports a profile
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
    return 0 if profiler.stop and profiler.is_complete else code


@contextmanager
def _install_hooks_on_steps(profiler: StepProfiler, function: str | None) -> Iterator[None]:
    import torch
    from torch.autograd.profiler import profile  # torch.profiler calls it too

    with ExitStack() as stack:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, profiler.keep_steps_and_exit)
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        for name in ("backward", "grad"):
            _replace_with_wrapper(stack, torch.autograd, name, after=profiler.end_delayed_step_after_backward)
        _replace_with_wrapper(stack, profile, "_prepare_trace", before=profiler.stop_for_profiler_of_script)
        stack.callback(profiler.finish)
        for watch in profiler.watches:
            if not isinstance(watch, ModuleRanges):  # registered first, so that it runs before the step ends
                stack.callback(_call_after_optimizer_step(watch.record_step).remove)
        if function is None:
            stack.callback(_call_after_optimizer_step(_make_optimizer_hook(profiler)).remove)
        elif not function.startswith(_MAIN_PREFIX):
            owner, name = _find_owner_and_name(function)
            _replace_with_wrapper(stack, owner, name, after=profiler.end_step)
        yield


def _replace_with_wrapper(
    stack: ExitStack, owner: Any, name: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool
) -> None:
    """Call ``before`` and ``after`` with each call of a function, until the stack is closed."""
    original = getattr(owner, name)
    setattr(owner, name, _wrap_with_hooks(original, before, after))
    stack.callback(setattr, owner, name, original)


def _wrap_with_hooks(original: Any, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> Any:
    @functools.wraps(original)
    def call_with_hooks(*arguments: Any, **keywords: Any) -> Any:
        before()
        returned = original(*arguments, **keywords)
        after()
        return returned

    return call_with_hooks


def _call_after_optimizer_step(call: Callable[[Any], None]) -> Any:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(lambda optimizer, *_: call(optimizer))


def _make_optimizer_hook(profiler: StepProfiler) -> Callable[[object], None]:
    """Return the function to call when an optimizer has stepped.

    With several optimizers (a GAN), the first one ends the step. Optimizers that step in hooks of the backward pass end
    it together.
    """
    first: list[object] = []

    def end_step_of_first_optimizer(optimizer: object) -> None:
        by = "backward" if is_in_backward() else optimizer
        if by is optimizer:
            profiler.optimizers[id(optimizer)] = type(optimizer).__name__
        if not first:
            first.append(by)
        if first[0] is by:
            profiler.end_step()

    return end_step_of_first_optimizer


def is_in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    import torch

    return torch._C._current_graph_task_id() != -1


def _find_owner_and_name(function: str) -> tuple[Any, str]:
    """Find the module or class that has a function (``module:function``); return it and the function's name in it.

    Raises UsageError if there is none.
    """
    module_name, colon, name = function.partition(":")
    *owners, attribute = name.split(".")
    try:
        if not colon:
            raise ValueError("write module:function")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module_name))
        getattr(owner, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--calls {function}: {get_first_line(error)}") from None
    return owner, attribute


def get_rank() -> int:
    """Return the rank of this process, as torchrun sets it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def keep_current_device() -> AbstractContextManager[object]:
    """Return a context after which torch's current device is restored, because opening a device changes it."""
    import torch

    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()


def list_device_kernels(launch: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that a launch runs on the device, in order; empty on a CPU.

    Raises RuntimeError if another profiler is active.
    """
    with make_torch_profiler() as profiler:
        mark_end_of_step()
        launch()
        wait_for_device()
        mark_end_of_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = read_trace(path).events
    return [event.name for event in sorted(events, key=lambda event: event.start) if event.is_on_device]


def make_torch_profiler(**options: Any) -> Any:
    """Make a torch.profiler for the host and all devices that torch supports."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO_LOG_LEVEL)
    from torch.profiler import profile, supported_activities

    # A single cycle keeps its events in any case, but some releases of torch warn if acc_events is not set.
    return profile(activities=supported_activities(), acc_events=True, **options)


def mark_end_of_step() -> None:
    from torch.profiler import record_function

    with record_function(STEP_MARK):
        pass


def wait_for_device() -> None:
    """Wait for the device, if there is one."""
    import torch

    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch 2.5 has no torch.accelerator
    if accelerator.is_available():
        accelerator.wait_for_device()
