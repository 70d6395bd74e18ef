"""``mamf profile SCRIPT [ARGS...]``: where a training or inference script spends the time of its steps."""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mamf.api.reading import load_ceiling
from mamf.ceilings.share import KnownCeiling, given_ceiling
from mamf.cli.printing import print_document
from mamf.cli.terminal import warn
from mamf.contribution.known_ceilings import measured_peak, opened
from mamf.errors import MamfError, UsageError
from mamf.logs.run_log import read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.machine.environment import command_line
from mamf.operations.tracing.traces import read_chrome_trace
from mamf.profiling.kernel_tables import read_kernel_table
from mamf.profiling.log import create_profile_log, write_profile
from mamf.profiling.memory import MemoryWatch
from mamf.profiling.profile import CeilingOf, Profile, profile_of
from mamf.profiling.ranges import ModuleRanges
from mamf.profiling.report import profile_document
from mamf.profiling.running import StepProfiler, is_reporting_rank, profile_script, run_script
from mamf.regime_names import BURST, SUSTAINED


def run(options: argparse.Namespace) -> int:
    # MAMFU uses sustained ceilings, because a training step is not a burst.
    ceilings = _ceilings(options, SUSTAINED), _ceilings(options, BURST)
    if options.source is not None:
        return _read(options, ceilings)
    if not options.script:
        raise UsageError("nothing to profile: name a SCRIPT, or a trace by --from")
    # As typed: options of mamf may be rewritten, those of a script are not.
    name, *arguments = options.typed[-len(options.script) :]
    script = Path(name)
    if not script.is_file():
        raise UsageError(f"cannot run {script}: there is no such file")
    if not is_reporting_rank():
        return run_script(script, arguments)
    _require_place(options.trace, "--trace")
    _require_place(options.memory, "--memory")
    return _profile(options, script, arguments, ceilings)


def _read(options: argparse.Namespace, ceilings: tuple[CeilingOf, CeilingOf]) -> int:
    for given, name in (
        (options.script, "a SCRIPT"),
        (options.calls, "--calls"),
        (options.trace, "--trace"),
        (options.memory, "--memory"),
        (options.nvtx, "--nvtx"),
    ):
        if given:
            raise UsageError(f"--from reads an existing trace: leave {name} out")
    read = read_kernel_table if options.source.suffix == ".csv" else read_chrome_trace
    profile = profile_of(read(options.source), *ceilings)
    with _log(options, options.source) as log:
        _print_profile(options, options.source, profile, log)
    return 0


def _profile(
    options: argparse.Namespace, script: Path, arguments: Sequence[str], ceilings: tuple[CeilingOf, CeilingOf]
) -> int:
    memory = None if options.memory is None else MemoryWatch(options.memory)
    ranges = ModuleRanges(lambda: opened(_device(options))) if options.nvtx else None
    profiler = StepProfiler(options.steps, options.warmup, memory, ranges)
    with tempfile.TemporaryDirectory() as folder, _log(options, script) as log:
        code = profile_script(script, arguments, profiler, options.calls)
        trace = options.trace or Path(folder, "trace.json")
        profiler.write_trace(trace)
        profile = profile_of(read_chrome_trace(trace), *ceilings, profiler.unprofiled_step_seconds)
        if memory is not None:
            profile = replace(profile, memory=memory.rows)
        _print_profile(options, script, profile, log)
    for watch in (memory, ranges):
        if watch is not None and watch.remark:
            warn(watch.remark)
    return code


def _require_place(path: Path | None, option: str) -> None:
    """Check a file before the script runs for hours."""
    if path is not None and path.exists():
        raise UsageError(f"{path} exists and is not overwritten: name another {option}")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no such folder; name another {option}")


@contextmanager
def _log(options: argparse.Namespace, of: Path) -> Iterator[RunLogWriter | None]:
    """The log of --output, which is removed if there is no profile."""
    if options.output is None:
        yield None
        return
    _require_place(options.output, "--output")
    with create_profile_log(options.output, command_line(), of.name) as log:
        try:
            yield log
        except BaseException:
            log.discard()
            raise


def _print_profile(options: argparse.Namespace, of: Path, profile: Profile, log: RunLogWriter | None) -> None:
    if log is not None:
        write_profile(log, profile)
    print_document(options, profile_document(of.name, profile, options.top))


def _ceilings(options: argparse.Namespace, regime: str) -> CeilingOf:
    """The given ceilings, else those known for the device of the script."""
    if options.source is None and not options.ceiling:
        return functools.partial(_known_here, _device(options), regime)
    found = [
        load_ceiling(path, regime)
        for path in options.ceiling
        if regime == SUSTAINED or regime in read_run_log(path).ceilings
    ]
    return {ceiling.problem.dtype: given_ceiling(ceiling) for ceiling in found}.get


def _device(options: argparse.Namespace) -> str | None:
    """The device of --backend and --device as ``peak`` names it; None without either."""
    if options.backend is None and options.device is None:
        return None
    return f"{options.backend or 'auto'}:{options.device or 0}"


@functools.cache
def _known_here(device: str | None, regime: str, dtype: str) -> KnownCeiling | None:
    """The ceiling measured here or contributed; a theoretical peak is not a ceiling."""
    try:
        known = measured_peak(device, dtype, regime)
    except MamfError:
        return None
    return KnownCeiling(dtype, regime, known.tflops, known.source, known.description)
