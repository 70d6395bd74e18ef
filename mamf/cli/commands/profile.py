"""``mamf profile SCRIPT [ARGS...]``: where a training or inference script spends the time of its steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mamf.cli.printing import print_document
from mamf.cli.profile_ceilings import (
    Rates,
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
from mamf.operations.tracing.traces import read_chrome_trace, read_ranks
from mamf.profiling import advice, kernel_tables, ranks, running, script
from mamf.profiling.log import create_profile_log, write_profile
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.profile import MemoryRow, Profile, profile_of
from mamf.profiling.ranges import ModuleRanges, in_trace
from mamf.profiling.report import profile_document
from mamf.regime_names import BURST, SUSTAINED


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return _read(options)
    if not options.script:
        raise UsageError("nothing to profile: name a SCRIPT, or a trace by --from")
    # As typed: options of mamf may be rewritten, those of a script are not.
    name, *arguments = options.typed[-len(options.script) :]
    program = script.Program(name, arguments, options.is_module)
    program.require()
    options.output = options.output and options.output.absolute()
    if options.ranks == "all" and (options.output is None or options.measure_products):
        raise UsageError("--ranks all needs --output FOLDER, and cannot --measure-products")
    if running.rank() and options.ranks == "first" and not options.stop:
        with program.in_place():
            return program.run()
    options.trace, options.memory = _place(options, "trace"), _place(options, "memory")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _profile(options, program, Path(folder))


# Where a file of this rank goes, checked before the script runs for hours, and may change its folder.
def _place(options: argparse.Namespace, option: str) -> Path | None:
    path: Path | None = getattr(options, option)
    if path is None or (running.rank() and options.ranks == "first"):
        return None
    if options.ranks == "all":
        number = running.rank()
        path = ranks.rank_log(path, number) if option == "output" else path.with_name(f"rank-{number}-{path.name}")
        make_folder(path.parent, f"; name another --{option}")
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten: name another --{option}")
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
        (options.measure_products, "--measure-products"),
        (options.ranks == "all", "--ranks"),
    ):
        if given:
            raise UsageError(f"--from reads an existing trace: leave {name} out")
    if options.source.is_dir():
        return _read_ranks(options)
    read = kernel_tables.read_kernel_table if options.source.suffix == ".csv" else read_chrome_trace
    with _reporting(options, options.source.name) as report:
        report.keep(read(options.source))
    return 0


def _read_ranks(options: argparse.Namespace) -> int:
    if options.output:
        raise UsageError("--from a folder reads one trace per rank: leave --output out")
    given, found = given_logs(options.ceiling), {}
    for trace in read_ranks(options.source):
        known = functools.partial(ceiling_in, of_device(given, trace.device, lambda: None))
        profile = profile_of(trace, functools.partial(known, SUSTAINED), functools.partial(known, BURST))
        found[trace.rank or 0] = options.source.name, profile
    print_document(options, ranks.ranks_document(found))
    return 0


def _profile(options: argparse.Namespace, program: script.Program, folder: Path) -> int:
    memory = None if options.memory is None else MemoryWatch(options.memory)
    ranges = ModuleRanges(lambda: opened(_device(options))) if options.nvtx else None
    watches = [each for each in (memory, ranges, ModuleRanges(in_trace)) if each is not None]
    say = str if running.rank() else warn  # a line, not one per rank
    profiler = running.StepProfiler(options.steps, options.warmup, folder, watches, stop=options.stop, say=say)
    if running.rank() and options.ranks == "first":  # it ends with the first
        return running.profile_program(program, profiler, options.calls)
    with _reporting(options, Path(program.name).name) as report:

        def read(code: int = 0) -> None:
            trace = profiler.read_trace(options.trace)
            if trace is None:
                raise NothingProfiledError(profiler.why_nothing(options.calls), code)
            with running.keeping_device():
                report.keep(trace, profiler.unprofiled_step_seconds, memory.rows if memory else ())
            shutil.rmtree(folder, ignore_errors=True)  # a script may end in a way that leaves it

        profiler.profiled_all = read
        code = running.profile_program(program, profiler, options.calls)
        if report.profile is None:
            read(code)
    for watch in watches:
        if watch.remark:
            warn(watch.remark)
    return code


class _Report:
    """Keeps a profile in the log as soon as there is one, and prints it: at once, unless products are yet to be
    measured. ``name``: of the script.
    """

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.profile: Profile | None = None
        self.log: RunLogWriter | None = None
        self._options, self._name = options, name
        self._given, self._stdout = given_logs(options.ceiling), sys.stdout

    # ``step_seconds``: of a step without the profiler. MAMFU uses sustained ceilings, because a training step is not a
    # burst: the given ones, else those known for the device of the script.
    def keep(self, trace: Trace, step_seconds: float | None = None, parts: Sequence[MemoryRow] = ()) -> None:
        options, device = self._options, _device(self._options, trace.is_of_device)
        logs = of_device(self._given, trace.device, lambda: None if options.source else opened(device).info.uuid_hash)
        is_given = options.source or options.ceiling
        known = functools.partial(ceiling_in, logs) if is_given else functools.partial(known_here, device)
        sustained, burst = (functools.partial(known, regime) for regime in (SUSTAINED, BURST))
        profile = replace(profile_of(trace, sustained, burst, step_seconds), memory=tuple(parts))
        self._add(profile, rates_of(row for log in logs for row in log.measurements), not options.measure_products)

    def measure(self) -> None:
        if self.profile is not None and self._options.measure_products:
            rates = measure_products(self.profile, opened(_device(self._options, self.profile.is_of_device)))
            self._add(self.profile, rates, is_last=True)

    def _add(self, profile: Profile, rates: Rates, is_last: bool) -> None:
        self.profile = profile = replace(profile, products=with_rates(profile.products, rates))
        if self.log is not None:
            write_profile(self.log, profile)
        options, is_of_all = self._options, self._options.ranks == "all"
        if not is_last or (is_of_all and running.rank()):
            return
        if is_of_all:
            count = int(os.environ.get("WORLD_SIZE", "1"))
            document = ranks.ranks_document(ranks.wait_for_ranks(options.output, count), count)
        else:
            document = profile_document(
                self._name, profile, options.top, advice.gains(profile) if options.advise else ()
            )
        with contextlib.redirect_stdout(self._stdout):  # a script may have its own
            print_document(options, document)
            stdout().flush()


# With the log of --output, which is removed if there is no profile.
@contextlib.contextmanager
def _reporting(options: argparse.Namespace, name: str) -> Iterator[_Report]:
    path, report = _place(options, "output"), _Report(options, name)
    with create_profile_log(path, command_line(), name) if path else contextlib.nullcontext() as report.log:
        try:
            yield report
            report.measure()
        except BaseException:
            if report.log is not None and report.profile is None:
                report.log.discard()
            raise


# The device of --backend and --device as ``peak`` names it. Without either: None, or the CPU if no device worked.
def _device(options: argparse.Namespace, is_of_device: bool = True) -> str | None:
    if options.backend is None and options.device is None:
        return None if is_of_device else "cpu"
    return f"{options.backend or 'auto'}:{options.device or 0}"
