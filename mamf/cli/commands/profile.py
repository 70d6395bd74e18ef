"""``mamf profile SCRIPT [ARGS...]``: where a training or inference script spends the time of its steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mamf.cli.printing import print_document
from mamf.cli.profile_ceilings import (
    ceiling_in,
    given_logs,
    known_here,
    measure_products,
    of_device,
    rates_of,
    with_rates,
)
from mamf.cli.terminal import stdout, warn
from mamf.contribution.known_ceilings import opened
from mamf.errors import NothingProfiledError, UsageError
from mamf.files import make_folder
from mamf.logs.writer import RunLogWriter
from mamf.machine.environment import command_line
from mamf.operations.tracing.events import Trace
from mamf.operations.tracing.traces import read_chrome_trace
from mamf.profiling.advice import gains
from mamf.profiling.kernel_tables import read_kernel_table
from mamf.profiling.log import create_profile_log, write_profile
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.profile import Profile, profile_of
from mamf.profiling.program import Program
from mamf.profiling.ranges import InTrace, ModuleRanges
from mamf.profiling.ranks import rank_log, ranks_document, wait_for_ranks
from mamf.profiling.report import profile_document
from mamf.profiling.running import StepProfiler, keeping_device, profile_program, rank
from mamf.regime_names import BURST, SUSTAINED

_RANKS_WAIT_SECONDS = 60.0


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return _read(options)
    if not options.script:
        raise UsageError("nothing to profile: name a SCRIPT, or a trace by --from")
    # As typed: options of mamf may be rewritten, those of a script are not.
    name, *arguments = options.typed[-len(options.script) :]
    program = Program(name, arguments, options.is_module)
    program.require()
    if options.ranks == "all" and (options.output is None or options.measure_products):
        raise UsageError("--ranks all needs --output FOLDER, and cannot --measure-products")
    if rank() and options.ranks == "first" and not options.stop:
        with program.in_place():
            return program.run()
    for each in ("trace", "memory"):
        setattr(options, each, _place(options, each))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _profile(options, program, Path(folder))


def _place(options: argparse.Namespace, option: str) -> Path | None:
    """Where a file of this rank goes, checked before the script runs for hours, and may change its folder."""
    path: Path | None = getattr(options, option)
    if path is None or (rank() and options.ranks == "first"):
        return None
    if options.ranks == "all":
        path = rank_log(path, rank()) if option == "output" else path.with_name(f"rank-{rank()}-{path.name}")
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten: name another --{option}")
    if options.ranks == "all":
        make_folder(path.parent, f"; name another --{option}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder; name another --{option}")
    return path.absolute()


def _read(options: argparse.Namespace) -> int:
    for given, name in (
        (options.script, "a SCRIPT"),
        (options.calls, "--calls"),
        (options.trace, "--trace"),
        (options.memory, "--memory"),
        (options.nvtx, "--nvtx"),
        (options.stop, "--stop"),
        (options.ranks == "all", "--ranks"),
    ):
        if given:
            raise UsageError(f"--from reads an existing trace: leave {name} out")
    read = read_kernel_table if options.source.suffix == ".csv" else read_chrome_trace
    with _reporting(options, options.source.name) as report:
        report.keep(read(options.source))
    return 0


def _profile(options: argparse.Namespace, program: Program, folder: Path) -> int:
    memory = None if options.memory is None else MemoryWatch(options.memory)
    ranges = ModuleRanges(lambda: opened(_device(options))) if options.nvtx else None
    watches = [each for each in (memory, ranges, ModuleRanges(InTrace)) if each is not None]
    profiler = StepProfiler(options.steps, options.warmup, folder, watches, stop=options.stop, say=warn)
    if rank() and options.ranks == "first":  # it ends with the first
        return profile_program(program, profiler, options.calls)
    with _reporting(options, Path(program.name).name) as report:

        def read(code: int = 0) -> None:
            trace = profiler.read_trace(options.trace)
            if trace is None:
                raise NothingProfiledError(profiler.why_nothing(options.calls), code)
            with keeping_device():
                report.keep(trace, profiler.unprofiled_step_seconds, memory)
            shutil.rmtree(folder, ignore_errors=True)  # a script may end in a way that leaves it

        profiler.profiled_all = read
        code = profile_program(program, profiler, options.calls)
        if report.profile is None:
            read(code)
    for watch in watches:
        if watch.remark:
            warn(watch.remark)
    return code


class _Report:
    """Keeps a profile in the log as soon as there is one, and prints it: at once, unless products are yet to be
    measured. ``script``: its name.
    """

    def __init__(self, options: argparse.Namespace, script: str) -> None:
        self.profile: Profile | None = None
        self.log: RunLogWriter | None = None
        self._options, self._script = options, script
        self._given, self._stdout = given_logs(options.ceiling), sys.stdout

    def keep(self, trace: Trace, step_seconds: float | None = None, memory: MemoryWatch | None = None) -> None:
        """``step_seconds``: of a step without the profiler. MAMFU uses sustained ceilings, because a training step is
        not a burst: the given ones, else those known for the device of the script.
        """
        options, device = self._options, _device(self._options)
        logs = of_device(self._given, trace.device, lambda: None if options.source else opened(device).info.uuid_hash)
        is_known = options.source is None and not options.ceiling
        known = functools.partial(known_here, device) if is_known else functools.partial(ceiling_in, logs)
        sustained, burst = (functools.partial(known, regime) for regime in (SUSTAINED, BURST))
        profile = profile_of(trace, sustained, burst, step_seconds)
        products = with_rates(profile.products, rates_of(row for log in logs for row in log.measurements))
        self.profile = replace(profile, products=products, memory=memory.rows if memory else ())
        if self.log is not None:
            write_profile(self.log, self.profile)
        if not options.measure_products:
            with contextlib.redirect_stdout(self._stdout):  # a script may have its own
                self._print(self.profile)

    def finish(self) -> None:
        """Measure products if that is asked for, and print the profile then."""
        if self.profile is None or not self._options.measure_products:
            return
        rates = measure_products(self.profile, opened(_device(self._options)))
        self.profile = replace(self.profile, products=with_rates(self.profile.products, rates))
        if self.log is not None:
            write_profile(self.log, self.profile)
        self._print(self.profile)

    def _print(self, profile: Profile) -> None:
        options = self._options
        if options.ranks != "all":
            print_document(
                options, profile_document(self._script, profile, options.top, gains(profile) if options.advise else ())
            )
        elif rank() == 0:
            count = int(os.environ.get("WORLD_SIZE", "1"))
            print_document(options, ranks_document(wait_for_ranks(options.output, count, _RANKS_WAIT_SECONDS), count))
        stdout().flush()


@contextlib.contextmanager
def _reporting(options: argparse.Namespace, script: str) -> Iterator[_Report]:
    """With the log of --output, which is removed if there is no profile."""
    path, report = _place(options, "output"), _Report(options, script)
    with create_profile_log(path, command_line(), script) if path else contextlib.nullcontext() as report.log:
        try:
            yield report
            report.finish()
        except BaseException:
            if report.log is not None and report.profile is None:
                report.log.discard()
            raise


def _device(options: argparse.Namespace) -> str | None:
    """The device of --backend and --device as ``peak`` names it; None without either."""
    if options.backend is None and options.device is None:
        return None
    return f"{options.backend or 'auto'}:{options.device or 0}"
