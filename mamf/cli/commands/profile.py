"""Implement the command ``mamf profile SCRIPT [ARGS...]``: run a training or inference script under torch's profiler,
and report how much time its steps spend in each class of kernels and in the gaps between kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.cli.terminal import (
    add_device_options,
    add_shared_options,
    choose_note_stream,
    get_report_stream,
    print_document,
    print_line,
    warn,
)
from mamf.cli.watching import INTERRUPTED_EXIT_CODE
from mamf.errors import MamfError, NothingProfiledError, RunLogError, UsageError, parse_size
from mamf.files import make_folder
from mamf.measurement import Rate, find_rate
from mamf.plans import SUSTAINED

if TYPE_CHECKING:
    from mamf.ceilings.ceiling import Ceiling
    from mamf.profiling.profile import CeilingLookup, Profile
    from mamf.profiling.running import Program

EXAMPLES = """examples:
  mamf profile train.py --lr 3e-4                       options after SCRIPT belong to the script
  mamf profile --steps 5 --ceiling find.jsonl --output step.jsonl train.py
  mamf profile --calls __main__:generate serve.py       a script without an optimizer: count each call as a step
  mamf profile --stop -m package.train --lr 3e-4        profile a module, and end it after the last profiled step
  mamf profile --dtypes train.py                        also report the dtypes of outputs, loss and gradients
  mamf profile --from trace.json.gz                     report on an existing Chrome trace
  torchrun --nproc-per-node 8 -m mamf profile train.py  profile the first rank
  torchrun --nproc-per-node 8 -m mamf profile --ranks all --output ranks train.py
The exit code is that of the script, or 1 if the script succeeded but nothing could be profiled.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    script = parser.add_argument(
        "script", nargs=argparse.PARSER, metavar="SCRIPT", help="Python file to run, followed by its arguments"
    )
    script.required = False  # With --from, mamf reads a trace and needs no script.
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as in python -m"
    )
    parser.add_argument(
        "--steps",
        type=parse_size,
        default=3,
        metavar="N",
        help="number of steps to profile; before them, mamf times the same number of steps without the profiler "
        "(default: 3)",
    )
    parser.add_argument(
        "--warmup",
        type=parse_size,
        default=5,
        metavar="N",
        help="number of steps to skip at the start (default: 5)",
    )
    parser.add_argument(
        "--calls",
        metavar="MODULE:FUNCTION",
        help="count each call of this function as a step (default: each optimizer step)",
    )
    parser.add_argument(
        "--stop",
        action="store_true",
        help="end the script with exit code 0 after the last profiled step (default: let the script finish)",
    )
    parser.add_argument(
        "--ranks",
        choices=("first", "all"),
        default="first",
        help="processes (ranks) to profile under torchrun; with all, mamf writes one log per rank to the folder "
        "--output (default: first)",
    )
    # Let users repeat --ceiling to give several logs: an option with several values would take SCRIPT as a value too.
    add_shared_options(
        parser,
        "--ceiling",
        nargs=None,
        action="append",
        default=[],
        help="log of 'mamf find' or 'mamf roofline' that contains ceilings (the highest rates of the device); may be "
        "repeated (default: the ceilings that 'mamf peak' prints; with --from none)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="file for a Chrome trace of the profiled steps, which Perfetto can show (default: none)",
    )
    add_shared_options(parser, "--memory", "--dtypes", "--nvtx")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="report on an existing Chrome trace (.json, .json.gz) or list of kernel launches (.csv) instead of "
        "running SCRIPT",
    )
    parser.add_argument(
        "--title",
        metavar="TEXT",
        help="what the steps train, for the report, such as 'GPT-2, 8 x 1024 tokens' (default: the name of the file)",
    )
    add_shared_options(
        parser, "--output", help="run log to write; with --ranks all, the folder for the logs (default: none)"
    )
    add_device_options(parser)
    add_shared_options(parser, "--format", "--top", "--wide")
    parser.set_defaults(script=None)


def run_with_options(options: argparse.Namespace) -> int:
    import tempfile

    from mamf.machine.environment import check_host_load, format_check_result, quote_command_line, select_warnings
    from mamf.profiling.log import get_rank

    options.command_line = quote_command_line()  # Save the command line now, because the script changes sys.argv.
    if options.source is not None:
        return _report_existing_trace(options)
    if not options.script:
        raise UsageError("no SCRIPT and no --from is given: name a script to profile, or a trace with --from")
    from mamf.profiling.running import Program

    # Take the script's arguments from the words that the user typed, because mamf's parser has replaced underscores in
    # option names.
    name, *arguments = options.typed_words[-len(options.script) :]
    program = Program(name, arguments, options.is_module)
    program.require_runnable_program()
    if options.ranks == "all" and options.output is None:
        raise UsageError("--ranks all needs --output: name a folder for the logs of all ranks")
    if get_rank() and options.ranks == "first" and not options.stop:
        with program.prepare_interpreter():
            return program.run()
    options.output, options.trace, options.memory = (
        _choose_output_path(options, name) for name in ("output", "trace", "memory")
    )
    # Several ranks that start keep the host busy themselves.
    options.load_warnings = (
        [] if "WORLD_SIZE" in os.environ else list(map(format_check_result, select_warnings([check_host_load()])))
    )
    for warning in options.load_warnings:
        warn(warning)
    folder = Path(tempfile.mkdtemp())  # A forked child of the script would remove a TemporaryDirectory.
    try:
        return _profile_script(options, program, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose_output_path(options: argparse.Namespace, option_name: str) -> Path | None:
    """Return the path of the file that this process writes for the option ``option_name`` ("output", "trace" or
    "memory"), or None if it writes no such file. If torchrun started several processes, only rank 0 writes files.
    The exception is the log with --ranks all, which every process writes.

    The path is absolute because the script may change its working folder. Raises UsageError, before the script starts,
    if the file already exists or its folder does not exist.
    """
    from mamf.profiling.log import get_rank, get_rank_log_path

    output_path: Path | None = getattr(options, option_name)
    if output_path is not None and option_name == "output" and options.ranks == "all":
        make_folder(output_path, "; choose another folder for --output")
        output_path = get_rank_log_path(output_path, get_rank())
    elif output_path is None or get_rank():
        return None
    if output_path.exists():
        raise UsageError(f"{output_path} already exists: choose another file for --{option_name}")
    if not output_path.parent.is_dir():
        raise UsageError(f"cannot write {output_path}, because its folder does not exist: create it first")
    return output_path.absolute()


def _report_existing_trace(options: argparse.Namespace) -> int:
    from mamf.profiling.profile import make_profile
    from mamf.profiling.traces import read_trace

    for option_name in ("script", "calls", "trace", "memory", "nvtx", "dtypes", "stop"):
        if getattr(options, option_name):
            typed_option = "a SCRIPT" if option_name == "script" else f"--{option_name}"
            raise UsageError(
                f"--from cannot be combined with {typed_option}, because --from reads an existing trace: leave "
                f"{typed_option} out"
            )
    options.output = _choose_output_path(options, "output")
    trace = read_trace(options.source)
    _write_and_print_profile(
        options, options.source.name, make_profile(trace, _make_ceiling_lookup(options, trace.has_device_events))
    )
    return 0


def _profile_script(options: argparse.Namespace, program: Program, temporary_folder: Path) -> int:
    from mamf.contribution.known_ceilings import open_backend_or_default
    from mamf.profiling import running
    from mamf.profiling.log import get_rank
    from mamf.profiling.profile import make_profile
    from mamf.profiling.watches import DtypeWatch, MemoryWatch, ModuleRangeWatch, make_range_provider

    memory_watch = None if options.memory is None else MemoryWatch(options.memory)
    dtype_watch = DtypeWatch() if options.dtypes else None
    nvtx_ranges = (
        ModuleRangeWatch(lambda: open_backend_or_default(_make_device_name(options))) if options.nvtx else None
    )
    module_spans = (
        ModuleRangeWatch(lambda: make_range_provider(memory_watch.record_module_span)) if memory_watch else None
    )
    watches = [
        watch
        for watch in (module_spans, memory_watch, dtype_watch, nvtx_ranges, ModuleRangeWatch(make_range_provider))
        if watch is not None
    ]
    profiler = running.StepProfiler(options.steps, options.warmup, temporary_folder, watches, ends_script=options.stop)
    if get_rank() and options.ranks == "first":  # Count steps only to end together with rank 0.
        return running.profile_program(program, profiler, options.calls)
    _read_given_ceilings(options)  # Report an unusable log of --ceiling before the script starts.
    original_stdout, is_written = sys.stdout, False  # Keep sys.stdout, because the script may replace it.
    process_id, printed_marker = os.getpid(), temporary_folder / "printed"

    def write_profile_once(exit_code: int = 0) -> None:
        nonlocal is_written
        temporary_folder.mkdir(parents=True, exist_ok=True)  # The script may have removed temporary files.
        trace = profiler.export_trace(options.trace or temporary_folder / "trace.json")
        if trace is None and printed_marker.exists():
            return  # A process that the script forked has already printed the profile.
        if trace is None:
            raise NothingProfiledError(profiler.explain_missing_profile(options.calls), exit_code)
        with running.keep_current_device(), contextlib.redirect_stdout(original_stdout):
            profile = make_profile(
                trace, _make_ceiling_lookup(options, trace.has_device_events), profiler.unprofiled_step_seconds
            )
            profile = replace(
                profile,
                notes=(*profile.notes, *(text.partition(";")[0] for text in options.load_warnings)),
                memory=memory_watch.rows if memory_watch else (),
                dtypes=dtype_watch.rows if dtype_watch else (),
            )
            _write_and_print_profile(options, Path(program.name).name, profile)
        is_written = True
        if os.getpid() == process_id:
            # Remove the folder now: the script may call os._exit, which skips any later cleanup.
            shutil.rmtree(temporary_folder, ignore_errors=True)
        else:
            printed_marker.touch()

    profiler.on_profiled = write_profile_once
    exit_code = running.profile_program(program, profiler, options.calls)
    if exit_code == INTERRUPTED_EXIT_CODE:
        warn("the script was interrupted")
    if not is_written:
        write_profile_once(exit_code)
    for watch in watches:
        if watch.remark:
            warn(watch.remark)
    return exit_code


def _write_and_print_profile(options: argparse.Namespace, program_name: str, profile: Profile) -> None:
    """Write the profile to the log of --output, if given. Also print its report, unless torchrun started this
    process as a rank above 0. ``program_name``: what the report calls the steps without --title.
    """
    from mamf.profiling.log import get_rank, make_profile_document, write_profile

    if options.output:
        path = write_profile(options.output, options.command_line, options.title or program_name, profile)
        if path != options.output:
            warn(f"another program created {options.output} meanwhile: the profile is in {path}")
    if not get_rank():
        print_document(options, make_profile_document(options.title or program_name, profile, options.top))
        if options.output:
            print_line(
                f"to show all ranks, run 'mamf show {path.parent}'" if options.ranks == "all" else f"log: {path}",
                choose_note_stream(options),
            )
        get_report_stream().flush()


def _make_ceiling_lookup(options: argparse.Namespace, ran_on_device: bool = True) -> CeilingLookup:
    """Return a function that takes the name of a dtype and returns its sustained ceiling, the highest matmul rate of
    the device under sustained load. The function returns None if the ceiling is unknown.

    The ceilings come from the logs of --ceiling. If these were measured on another device than the one that ran the
    script, warn and treat all ceilings as unknown. Without --ceiling, use the known ceilings of the device that ran the
    script or, if mamf only read a trace, no ceilings.

    ``ran_on_device``: whether the profiled work ran on a device other than the CPU. Raises what
    ``_read_given_ceilings`` raises.
    """
    from mamf.ceilings.ceiling import copy_as_given_ceiling, require_ceiling_of_card
    from mamf.contribution.known_ceilings import open_backend_or_default

    if not options.ceiling and not options.source:
        return functools.partial(find_known_sustained_ceiling, _make_device_name(options, ran_on_device))
    ceilings = _read_given_ceilings(options)
    if not options.source:
        try:
            for ceiling in ceilings.values():
                require_ceiling_of_card(ceiling, open_backend_or_default(_make_device_name(options, ran_on_device)))
        except MamfError as error:
            warn(f"the report has no MAMFU: {error}")
            return lambda dtype: None
    given_ceilings = {key: copy_as_given_ceiling(each) for key, each in ceilings.items()}
    return lambda dtype: find_rate(given_ceilings, dtype, SUSTAINED)


def _read_given_ceilings(options: argparse.Namespace) -> dict[tuple[str, str], Ceiling]:
    """Read the ceilings in the logs of --ceiling, by dtype and regime. Raises RunLogError if a log has no sustained
    ceiling, and IncomparableError if the interval of this ceiling is unknown.
    """
    from mamf.ceilings.ceiling import require_known_interval
    from mamf.logs.run_log import read_run_log

    ceilings: dict[tuple[str, str], Ceiling] = {}
    for path in options.ceiling:
        log = read_run_log(path)
        if SUSTAINED not in log.ceilings:
            raise RunLogError(
                f"{path} has no sustained ceiling (its ceilings: {', '.join(log.ceilings) or 'none'}): measure one "
                "with 'mamf find'"
            )
        require_known_interval(log.ceilings[SUSTAINED])
        ceilings |= log.matmul_ceilings
    return ceilings


@functools.cache
def find_known_sustained_ceiling(device: str | None, dtype: str) -> Rate | None:
    """Return the sustained ceiling of a dtype on ``device``, either measured on this machine, or contributed by other
    users for a device of the same model. Return None if no such ceiling is known. Ignore the peaks of datasheets.
    """
    from mamf.contribution.known_ceilings import find_measured_peak

    try:
        return find_measured_peak(device, dtype, SUSTAINED)
    except MamfError:
        return None


def _make_device_name(options: argparse.Namespace, ran_on_device: bool = True) -> str | None:
    """Return the device that --backend and --device select, in the form that :func:`mamf.peak` takes, such as "auto:0".

    If neither option is given, return "cpu" if the profiled work ran on the CPU (``ran_on_device`` is false), and
    otherwise None, which means the default device.
    """
    if options.backend is None and options.device is None:
        return None if ran_on_device else "cpu"
    return f"{options.backend or 'auto'}:{options.device or 0}"
