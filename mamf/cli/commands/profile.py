"""``mamf profile SCRIPT [ARGS...]``: where a training or inference script spends the time of its steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mamf.ceilings.ceiling import given_ceiling
from mamf.cli.printing import note_stream, print_document
from mamf.cli.terminal import say, stdout, warn
from mamf.contribution.known_ceilings import measured_peak, opened
from mamf.errors import MamfError, NothingProfiledError, RunLogError, UsageError
from mamf.files import make_folder
from mamf.logs.run_log import read_run_log
from mamf.machine.environment import command_line
from mamf.operations.tracing.events import Trace
from mamf.operations.tracing.traces import read_chrome_trace, read_ranks
from mamf.profiling import kernel_tables, ranks, running, script
from mamf.profiling.breakdown import CeilingOf
from mamf.profiling.log import write_profile
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.profile import MemoryRow, profile_of
from mamf.profiling.ranges import ModuleRanges, in_trace
from mamf.profiling.report import profile_document
from mamf.rate import Rate, find_rate
from mamf.regime_names import SUSTAINED


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return _read(options)
    if not options.script:
        raise UsageError("nothing to profile: name a SCRIPT, or a trace by --from")
    # As typed: options of mamf may be rewritten, those of a script are not.
    name, *arguments = options.typed[-len(options.script) :]
    program = script.Program(name, arguments, options.is_module)
    program.require()
    if options.ranks == "all" and options.output is None:
        raise UsageError("--ranks all needs --output FOLDER")
    if running.rank() and options.ranks == "first" and not options.stop:
        with program.in_place():
            return program.run()
    options.output, options.trace, options.memory = (_place(options, name) for name in ("output", "trace", "memory"))
    folder = Path(tempfile.mkdtemp())  # not a TemporaryDirectory, which a forked child would remove at its exit
    try:
        return _profile(options, program, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(options: argparse.Namespace, option: str) -> Path | None:
    """Where a file of this rank goes: checked before the script runs for hours, and may change its folder."""
    path: Path | None = getattr(options, option)
    if path is not None and option == "output" and options.ranks == "all":
        make_folder(path, "; name another --output")
        path = ranks.rank_log(path, running.rank())
    elif path is None or running.rank():
        return None
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten: name another --{option}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder; name another --{option}")
    return path.absolute()


def _read(options: argparse.Namespace) -> int:
    not_read = ("script", "calls", "trace", "memory", "nvtx", "stop", *(["output"] if options.source.is_dir() else ()))
    for name in not_read:
        if getattr(options, name):
            what = "a SCRIPT" if name == "script" else f"--{name}"
            raise UsageError(f"--from reads an existing trace: leave {what} out")
    if options.source.is_dir():
        name, ceiling_of = options.source.name, _ceilings(options, is_of_device=True)
        found = {trace.rank or 0: (name, profile_of(trace, ceiling_of)) for trace in read_ranks(options.source)}
        print_document(options, ranks.ranks_document(found))
        return 0
    options.output = _place(options, "output")
    read = kernel_tables.read_kernel_table if options.source.suffix == ".csv" else read_chrome_trace
    _keep(options, options.source.name, read(options.source))
    return 0


def _profile(options: argparse.Namespace, program: script.Program, folder: Path) -> int:
    memory = None if options.memory is None else MemoryWatch(options.memory)
    ranges = ModuleRanges(lambda: opened(_device(options))) if options.nvtx else None
    watches = [each for each in (memory, ranges, ModuleRanges(in_trace)) if each is not None]
    profiler = running.StepProfiler(options.steps, options.warmup, watches, stop=options.stop)
    if running.rank() and options.ranks == "first":  # it ends with the first
        return running.profile_program(program, profiler, options.calls)
    if options.ceiling:  # wrong ones are reported before the script runs
        _given(options.ceiling)
    terminal, is_kept = sys.stdout, False  # a script may have its own stdout

    def keep(code: int = 0) -> None:
        nonlocal is_kept
        trace = profiler.read_trace(options.trace or folder / "trace.json")
        if trace is None:
            raise NothingProfiledError(profiler.why_nothing(options.calls), code)
        with running.keeping_device(), contextlib.redirect_stdout(terminal):
            parts = memory.rows if memory else ()
            _keep(options, Path(program.name).name, trace, profiler.unprofiled_step_seconds, parts)
        is_kept = True
        shutil.rmtree(folder, ignore_errors=True)  # a script may end in a way that leaves it

    profiler.profiled_all = keep
    code = running.profile_program(program, profiler, options.calls)
    if not is_kept:
        keep(code)
    for watch in watches:
        if watch.remark:
            warn(watch.remark)
    return code


def _keep(
    options: argparse.Namespace,
    name: str,
    trace: Trace,
    step_seconds: float | None = None,
    parts: Sequence[MemoryRow] = (),
) -> None:
    """Write the log and print the report of the first rank. ``name``: of the script; ``step_seconds``: of a step
    without the profiler.
    """
    profile = profile_of(trace, _ceilings(options, trace.is_of_device), step_seconds)
    profile = replace(profile, memory=tuple(parts))
    if options.output:
        path = write_profile(options.output, command_line(), name, profile)
        if path != options.output:
            warn(f"{options.output} was made by another program meanwhile: the profile is in {path}")
    if not running.rank():
        print_document(options, profile_document(name, profile, options.top))
        if options.ranks == "all":
            say(f"all ranks: mamf show {options.output.parent}", note_stream(options))
        stdout().flush()


def _ceilings(options: argparse.Namespace, is_of_device: bool) -> CeilingOf:
    """The sustained ceilings for MAMFU, because a step is not a burst: the given ones, else for a script those that are
    known for its device.
    """
    if options.ceiling:
        given = _given(options.ceiling)
        return lambda dtype: find_rate(given, dtype, SUSTAINED)
    if options.source:
        return lambda dtype: None
    return functools.partial(known_here, _device(options, is_of_device))


def _given(paths: Sequence[Path]) -> dict[tuple[str, str], Rate]:
    """The sustained ceilings of logs by dtype and regime. Raises RunLogError for a log without any."""
    given: dict[tuple[str, str], Rate] = {}
    for path in paths:
        log = read_run_log(path)
        if SUSTAINED not in log.ceilings:
            known = f"it holds: {', '.join(log.ceilings) or 'none'}"
            raise RunLogError(f"{path} holds no sustained ceiling ({known}); measure one with 'mamf find'")
        given |= {key: given_ceiling(each) for key, each in log.all_ceilings.items()}
    return given


@functools.cache
def known_here(device: str | None, dtype: str) -> Rate | None:
    """The sustained ceiling measured here or contributed; a theoretical peak is not a ceiling."""
    try:
        return measured_peak(device, dtype, SUSTAINED)
    except MamfError:
        return None


def _device(options: argparse.Namespace, is_of_device: bool = True) -> str | None:
    """The device of --backend and --device as ``peak`` names it. Without either: None, or the CPU if none worked."""
    if options.backend is None and options.device is None:
        return None if is_of_device else "cpu"
    return f"{options.backend or 'auto'}:{options.device or 0}"
