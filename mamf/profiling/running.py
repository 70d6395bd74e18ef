"""Run a training script in this process as the command ``python`` would, and profile some of its steps with
torch.profiler.

A training step ends when its optimizer has stepped, or when a function that the user named returns. If this happens
within a backward pass, the training step ends when the backward pass returns, because torch.profiler crashes if it is
stopped within a backward pass. Right before the profiled steps, mamf times the same number of steps without the
profiler. The report compares both times, because the profiler slows the script.
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
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mamf.errors import UsageError, describe_error, get_first_message_line
from mamf.profiling.log import get_rank
from mamf.profiling.traces import STEP_MARK, Trace, read_trace
from mamf.profiling.watches import DtypeWatch, MemoryWatch, ModuleRangeWatch

#: For each suffix of run logs and traces, the command that reads such files. If the user passes such a file instead of
#: a script, the error message names this command.
_READ_COMMAND_BY_SUFFIX = {".jsonl": "mamf show", **dict.fromkeys((".json", ".gz", ".csv"), "mamf profile --from")}
# Value of KINETO_LOG_LEVEL at which Kineto, the library of torch.profiler, prints nothing when it starts and stops.
_QUIET_KINETO_LOG_LEVEL = "6"
_MAIN_MODULE_PREFIX, _DECORATOR_VARIABLE = "__main__:", "__mamf_decorator__"


@dataclass(frozen=True)
class Program:
    """A Python program to profile, with its arguments.

    ``name``: the path of a script or, if ``is_module`` is true, the name of a module to run as ``python -m`` does.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def require_runnable_program(self) -> None:
        """Raise UsageError if the script or module does not exist, or if the file is a run log or a trace."""
        suffix = Path(self.name).suffix
        if not self.is_module and suffix in _READ_COMMAND_BY_SUFFIX:
            raise UsageError(
                f"{self.name} is not a script: read it with '{_READ_COMMAND_BY_SUFFIX[suffix]} {self.name}'"
            )
        with self.prepare_interpreter():
            if not (find_spec(self.name.partition(".")[0]) if self.is_module else Path(self.name).is_file()):
                raise UsageError(
                    f"cannot run {self.name}: there is no such {'module' if self.is_module else 'file'}; check its name"
                )

    @contextmanager
    def prepare_interpreter(self) -> Iterator[None]:
        """Within the context, set ``sys.argv`` and the first folder of ``sys.path`` as Python does for the program."""
        original_argv, path = sys.argv, list(sys.path)
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, str(Path().resolve() if self.is_module else Path(self.name).resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = original_argv, path

    def run(self, run_decorated: Callable[[], None] | None = None) -> int:
        """Run the program and return its exit code.

        ``run_decorated``: a function from ``make_decorated_run`` that runs the program; None runs it unchanged.
        """
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
            return 128 + signal.SIGINT
        except BaseException as error:
            traceback = error.__traceback__
            # Drop the outer frames of mamf and runpy, so that the traceback begins with the script's own frame.
            while traceback and traceback.tb_frame.f_code.co_filename in (
                __file__,
                runpy.run_path.__code__.co_filename,
            ):
                traceback = traceback.tb_next
            sys.excepthook(type(error), error.with_traceback(traceback), traceback)
            return 1
        return 0

    def make_decorated_run(self, function: str, decorator: object) -> Callable[[], None]:
        """Return a function that runs the program with ``decorator`` applied to the program's function ``function``.

        ``function`` may be a method, such as ``Trainer.step``. Raises UsageError if the program does not define
        the function.
        """
        spec = find_spec(self.name) if self.is_module else None
        if spec is not None and spec.submodule_search_locations:  # Python runs the __main__ of a package.
            spec = find_spec(f"{self.name}.__main__")
        path = spec.origin if spec and spec.origin else self.name
        try:
            tree = ast.parse(Path(path).read_bytes(), path)
        except SyntaxError as error:
            raise UsageError(f"cannot run {path}: {get_first_message_line(error)}") from None
        definition: Any = tree
        for name in function.split("."):
            inner_definitions = (each for each in definition.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)))
            definition = next((each for each in inner_definitions if each.name == name), None)
            if definition is None:
                raise UsageError(f"--calls {_MAIN_MODULE_PREFIX}{function}: {Path(path).name} defines no such function")
        definition.decorator_list.insert(0, ast.Name(_DECORATOR_VARIABLE, ast.Load()))
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


class StepProfiler:
    """The profiler of some training steps of a script. Hooks in the script call ``end_step`` at the end of each step.

    - ``warmup_steps``: the number of steps to skip at the beginning.
    - ``steps_to_profile``: the number of steps to profile. Before these steps, mamf times the same number of steps
      without the profiler.
    - ``watches``: objects of mamf.profiling.watches, which also observe the profiled steps.
    - ``ends_script``: whether to end the script after the last profiled step.
    - ``on_profiled``: a function to call once, right after the last profiled step.
    - ``failure``: one line that says why profiling failed; empty if it did not fail. An error ends the profiling, but
      never the script.

    A script may fork processes that train. mamf profiles only the first process of this rank that ends a step. This
    process creates a file in ``folder``, which tells the other processes that they are not profiled.
    """

    def __init__(
        self,
        steps_to_profile: int,
        warmup_steps: int,
        folder: Path,
        watches: Sequence[MemoryWatch | DtypeWatch | ModuleRangeWatch] = (),
        *,
        ends_script: bool = False,
    ) -> None:
        self.failure = self._remark = ""
        #: Class name of each optimizer that stepped, by the optimizer's id(). All optimizers that step in hooks of the
        #: backward pass share the key 0.
        self.optimizer_names_by_id: dict[int, str] = {}
        self.on_profiled: Callable[[], object] = lambda: None
        self.watches = watches
        self.unprofiled_step_seconds: float | None = None
        self._steps_to_profile, self._warmup_steps, self.ends_script = steps_to_profile, warmup_steps, ends_script
        self._ended_step_count = self._profiled_steps = 0
        self._first_process_id, self._rank, self._claim_file = os.getpid(), get_rank(), folder / "profiled"
        self._profiled_process_id: int | None = None
        self._profiler: Any = None
        self._unprofiled_start_seconds, self._has_delayed_step, self._has_delayed_sigterm = 0.0, False, False
        self._is_running = False

    @property
    def is_complete(self) -> bool:
        return self._profiled_steps == self._steps_to_profile

    @property
    def _is_unprofiled_process(self) -> bool:
        return os.getpid() != (self._profiled_process_id or self._first_process_id)

    def _claim_profiling(self) -> bool:
        """Try to claim profiling for this process, and return whether that succeeded. It succeeds only in the first
        process of this rank that calls this method.
        """
        if self._profiled_process_id is None and get_rank() == self._rank:
            try:
                self._claim_file.touch(exist_ok=False)
                is_first = True
            except FileExistsError:
                is_first = False
            except OSError:
                # If the folder is missing, profile the process that created this object, because only this process can
                # report a profile.
                is_first = os.getpid() == self._first_process_id
            self._profiled_process_id = os.getpid() if is_first else 0
        return self._profiled_process_id == os.getpid()

    def end_step(self) -> None:
        """End a training step. During a backward pass, postpone the end of the step until the pass returns.

        If several optimizers step in hooks of one backward pass, they therefore end only one training step.
        """
        if not self._claim_profiling():
            return
        self._has_delayed_step = is_in_backward_pass()
        if self._has_delayed_step:
            return
        self._ended_step_count += 1
        if not (self.is_complete or self.failure or self._remark):
            with self._record_errors():
                self._start_or_stop_profiler()
        # If the script catches SystemExit and continues, raise SystemExit at the end of each later step too.
        if self.ends_script and self.is_complete:
            raise SystemExit(0)

    def end_step_if_first_optimizer(self, optimizer: object, *_: object) -> None:
        """End a training step if ``optimizer``, which has just stepped, is the first optimizer that the script stepped.

        If a script has several optimizers, as for a GAN, only the first optimizer ends training steps.
        """
        optimizer_id = 0 if is_in_backward_pass() else id(optimizer)
        self.optimizer_names_by_id.setdefault(optimizer_id, type(optimizer).__name__)
        if optimizer_id == next(iter(self.optimizer_names_by_id)):
            self.end_step()

    def end_delayed_step_after_backward(self) -> None:
        if self._has_delayed_sigterm:
            self.keep_steps_and_exit()
        if self._has_delayed_step:
            self.end_step()

    @contextmanager
    def _record_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # torch raises an error, for example, if another profiler is running.
            self.failure, self._is_running = describe_error(error), False

    def _start_or_stop_profiler(self) -> None:
        if self._ended_step_count == self._warmup_steps:
            wait_for_device()
            self._unprofiled_start_seconds = time.perf_counter()
        elif self._ended_step_count == self._warmup_steps + self._steps_to_profile:
            wait_for_device()
            self.unprofiled_step_seconds = (
                time.perf_counter() - self._unprofiled_start_seconds
            ) / self._steps_to_profile
            self._start_profiler()
        elif self._is_running:
            self._profiled_steps += 1
            if self.is_complete:
                self._finish_and_report()
            else:
                mark_end_of_step()

    def _finish_and_report(self) -> None:
        with self._record_errors():
            self.finish()
            self.on_profiled()

    def stop_for_profiler_of_script(self) -> None:
        """Stop profiling, and keep the steps profiled so far, when the script starts its own torch.profiler. torch can
        run only one profiler at a time.
        """
        is_starting = self._profiler is not None and not self._is_running
        if is_starting or self.is_complete or self.failure or self._remark or self._is_unprofiled_process:
            return
        warmup = self._ended_step_count - 2 * self._steps_to_profile
        advice = f"; with --warmup {warmup} mamf can profile {self._steps_to_profile} steps" if warmup > 0 else ""
        if self._is_running:
            advice += "; mamf's profiler slowed the steps before that, so the script's own timing of them is wrong"
        if self._profiled_steps:
            self._remark = (
                f"mamf profiled only {self._profiled_steps} of {self._steps_to_profile} steps, "
                f"because the script started a profiler{advice}"
            )
            self._finish_and_report()
        else:
            self.failure = f"the script starts torch.profiler itself: read its trace with 'mamf profile --from'{advice}"
            with suppress(RuntimeError):
                self.finish()

    def keep_steps_and_exit(self, *_: object) -> None:
        """Handle SIGTERM: keep the steps profiled so far, then let the signal end this process.

        If a backward pass is running, wait for its end, because torch.profiler cannot be stopped within it.
        """
        self._has_delayed_sigterm = not self._is_unprofiled_process and is_in_backward_pass()
        if self._has_delayed_sigterm:  # end_delayed_step_after_backward calls this method again.
            return
        if not (self._is_unprofiled_process or self.is_complete or self._remark):
            self._finish_and_report()
            if self.failure:
                sys.stderr.write(f"mamf: {self.failure}\n")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _start_profiler(self) -> None:
        self._profiler = make_torch_profiler(record_shapes=True)
        self._profiler.start()
        self._is_running = True
        for watch in self.watches:
            watch.start()
        wait_for_device()
        mark_end_of_step()

    def finish(self) -> None:
        """Wait until the device has finished all queued work, then stop the profiler. Later calls have no effect."""
        if not self._is_running or self._is_unprofiled_process:
            return
        self._is_running = False
        wait_for_device()
        for watch in self.watches:
            watch.finish()
        if self.is_complete:
            mark_end_of_step()
        self._profiler.stop()

    def export_trace(self, path: Path) -> Trace | None:
        """Write the trace of the profiled steps to ``path`` and return it; None if no step was profiled."""
        if not self._profiled_steps or self.failure:
            return None
        self._profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
        first_optimizer, *other_optimizers = self.optimizer_names_by_id.values() or [""]
        optimizers_note = (
            f"several optimizers step: only the first, {first_optimizer}, ends a step; "
            f"others are {', '.join(other_optimizers)}"
        )
        return replace(
            trace, notes=(*trace.notes, *filter(None, (self._remark, optimizers_note if other_optimizers else "")))
        )

    def explain_missing_profile(self, function: str | None) -> str:
        """Return one line that says why no step was profiled. ``function``: the function that ends steps; None if the
        optimizer ends them.
        """
        if self.failure:
            return self.failure
        required_steps = self._warmup_steps + 2 * self._steps_to_profile
        if self._ended_step_count:
            return f"the script took {self._ended_step_count} of {required_steps} steps: lower --warmup or --steps"
        if self._claim_file.exists():
            return (
                f"the script forked a training process, which took fewer than {required_steps} steps: "
                "lower --warmup or --steps"
            )
        if function is not None:
            return f"{function} was not called: write __main__:FUNCTION for a function that the script defines"
        return (
            "no torch optimizer stepped in this process: name the function that is a training step, such as "
            "--calls torch:Tensor.backward or --calls __main__:train"
        )


def profile_program(program: Program, profiler: StepProfiler, function: str | None = None) -> int:
    """Run a program while ``profiler`` profiles its steps. Return the program's exit code; 0 if the profiler ended it.

    A training step ends when ``function`` (``module:function``) returns; if ``function`` is None, when the first
    optimizer of the script has stepped. Raises UsageError for an unknown function.
    """
    run_decorated, mamf_process_id = None, os.getpid()
    with program.prepare_interpreter(), _install_hooks_on_steps(profiler, function):
        if function and function.startswith(_MAIN_MODULE_PREFIX):
            run_decorated = program.make_decorated_run(
                function.removeprefix(_MAIN_MODULE_PREFIX), functools.partial(_wrap_with_hooks, after=profiler.end_step)
            )
        code = program.run(run_decorated)
    if os.getpid() != mamf_process_id:  # The script forked this process, but only the parent process reports a profile.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)
    return 0 if profiler.ends_script and profiler.is_complete else code


@contextmanager
def _install_hooks_on_steps(profiler: StepProfiler, function: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, profiler.keep_steps_and_exit)
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        for name in ("backward", "grad"):
            _replace_with_wrapper(stack, torch.autograd, name, after=profiler.end_delayed_step_after_backward)
        _replace_with_wrapper(
            stack,
            torch.autograd.profiler.profile,  # torch.profiler uses this class too.
            "_prepare_trace",
            before=profiler.stop_for_profiler_of_script,
        )
        stack.callback(profiler.finish)
        for watch in profiler.watches:
            # Register the hooks of watches (mamf.profiling.watches) before the hook that ends the step. torch calls
            # hooks in order of registration, and watches must observe the optimizer before the step ends.
            if not isinstance(watch, ModuleRangeWatch):
                stack.callback(register_optimizer_step_post_hook(watch.record_optimizer_step).remove)
        if function is None:
            stack.callback(register_optimizer_step_post_hook(profiler.end_step_if_first_optimizer).remove)
        elif not function.startswith(_MAIN_MODULE_PREFIX):
            owner, name = _find_owner_and_name(function)
            _replace_with_wrapper(stack, owner, name, after=profiler.end_step)
        yield


def _replace_with_wrapper(
    stack: ExitStack, owner: Any, name: str, before: Callable[[], object] = bool, after: Callable[[], object] = bool
) -> None:
    """Until ``stack`` is closed, replace ``owner.name`` with a wrapper that also calls ``before`` and ``after``."""
    original = getattr(owner, name)
    setattr(owner, name, _wrap_with_hooks(original, before, after))
    stack.callback(setattr, owner, name, original)


def _wrap_with_hooks(original: Any, before: Callable[[], object] = bool, after: Callable[[], object] = bool) -> Any:
    @functools.wraps(original)
    def call_with_hooks(*arguments: Any, **keywords: Any) -> Any:
        before()
        result = original(*arguments, **keywords)
        after()
        return result

    return call_with_hooks


def is_in_backward_pass() -> bool:
    """Return whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def _find_owner_and_name(function: str) -> tuple[Any, str]:
    """Return the module or class that contains ``function`` (``module:function``), and the function's name in it.

    Raises UsageError if there is no such function.
    """
    module_name, colon, name = function.partition(":")
    *owners, attribute = name.split(".")
    try:
        if not colon:
            raise ValueError("write the name of a function as module:function")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module_name))
        getattr(owner, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--calls {function}: {get_first_message_line(error)}") from None
    return owner, attribute


def keep_current_device() -> AbstractContextManager[object]:
    """Return a context that restores torch's current device when it ends, because opening a backend changes it."""
    return torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()


def record_device_kernels(launch: Callable[[], object]) -> list[str]:
    """Call ``launch`` and return the names of the kernels that it ran on the device, in order; empty on a CPU."""
    with make_torch_profiler() as profiler:
        mark_end_of_step()
        launch()
        wait_for_device()
        mark_end_of_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = sorted(read_trace(path).events, key=lambda event: event.start_seconds)
    return [event.name for event in events if event.is_on_device]


def make_torch_profiler(**options: Any) -> Any:
    """Make a torch.profiler that records the host and all kinds of devices that torch can profile here."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET_KINETO_LOG_LEVEL)
    # Set acc_events only because some releases of torch warn without it. It has no effect on a single profiling cycle.
    return torch.profiler.profile(activities=torch.profiler.supported_activities(), acc_events=True, **options)


def mark_end_of_step() -> None:
    with torch.profiler.record_function(STEP_MARK):
        pass


def wait_for_device() -> None:
    """Wait until the accelerator has finished all queued work. Return at once if torch has no accelerator."""
    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch 2.5 has no torch.accelerator.
    if accelerator.is_available():
        torch.get_device_module().synchronize()
