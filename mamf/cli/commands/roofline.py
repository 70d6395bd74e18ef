"""Implement the command ``mamf roofline``: compare kernels with the roofline of a device, and say whether compute or
memory bandwidth limits each. The ceilings come from given logs, or from searches that the command runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.backend import MIB, Backend
from mamf.cli import run_command
from mamf.cli.reading import read_log
from mamf.cli.terminal import (
    add_device_options,
    add_shared_options,
    choose_note_stream,
    print_document,
    print_line,
    print_lines,
    redirect_reports,
    warn,
)
from mamf.cli.watching import INTERRUPTED_EXIT_CODE
from mamf.errors import ROOF_EXPORT_FORMATS, RunLogError, UsageError
from mamf.files import create_file_atomically, make_folder, write_file_atomically
from mamf.plans import CEILING_REGIMES, CPU_BUDGET_FACTOR, DEFAULT_BUDGET_SECONDS

if TYPE_CHECKING:
    from mamf.ceilings.roof import RooflinePoint

EXAMPLES = """examples:
  mamf roofline                                             measure the ceilings of compute, memory and cache
  mamf roofline --dtype bfloat16 fp8 --output-folder roofs --picture roofline.png
  mamf roofline attention.jsonl decode.jsonl --ceiling roofs/*.jsonl --picture roofline.svg
  mamf roofline --ceiling find.jsonl bandwidth.jsonl --export tracelens --export-file h200.json
"""
#: To measure the bandwidth of the cache, one launch reads its arrays this many times. The first number is for
#: accelerators, the second for CPUs. Only the first pass reads memory, so on an accelerator 97 % of the bytes come from
#: the cache.
_PASSES_OVER_CACHE, _CPU_PASSES_OVER_CACHE = 32, 8
#: The time budget for measuring the bandwidth of memory, as a share of the budget for one dtype's matmul ceilings.
#: Measuring the bandwidth of the cache gets the same budget.
_BANDWIDTH_SHARE_OF_DTYPE_BUDGET = 0.75
#: The minimum number of seconds for a thorough matmul search. With less time, a thorough search would end before it
#: finds the ceiling under sustained load, so mamf searches with --quick.
_MIN_THOROUGH_SEARCH_SECONDS = 40.0
#: The sizes of the arrays that bandwidth searches read. To find the bandwidth of the cache, mamf reads arrays of 1/4
#: and 1/2 of the size of the cache. To find the bandwidth of memory, mamf reads arrays of 16 and 256 times the size of
#: the cache. On a CPU, mamf skips the largest array, because reading it would take minutes.
_CACHE_SIZE_DIVISORS, _CACHE_SIZE_MULTIPLES, _CPU_CACHE_SIZE_MULTIPLES = (4, 2), (16, 256), (16,)
#: The maximum size of an array is the free memory divided by one of these numbers. CPUs use more of their memory,
#: because their caches are larger in relation to it. For a device that does not report its memory, mamf assumes
#: _DEFAULT_MEMORY_BYTES.
_FREE_MEMORY_DIVISOR, _CPU_FREE_MEMORY_DIVISOR, _DEFAULT_MEMORY_BYTES = 4, 2, 8 * 1024 * MIB


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "rows", type=Path, nargs="*", metavar="LOG", help="run logs whose rows to compare with the roofline"
    )
    add_shared_options(parser, "--ceiling", default_text="none; mamf measures the ceilings")
    add_shared_options(parser, "--anyway")
    group = parser.add_argument_group("how to measure")
    add_shared_options(group, "--dtype")
    add_shared_options(group, "--regime", default_text="both")
    add_shared_options(group, "--budget", default_text="57s per dtype, plus 86s for bandwidth; on a CPU twice as long")
    add_shared_options(group, "--dry-run", "--notes")
    add_shared_options(
        group,
        "--output-folder",
        help="folder to write to; in an existing folder, mamf continues unfinished searches (default: roofline-DATE)",
    )
    add_device_options(parser)
    group = parser.add_argument_group("files")
    add_shared_options(group, "--picture")
    group.add_argument(
        "--export",
        choices=ROOF_EXPORT_FORMATS,
        help="also write the ceilings to a file for another tool; tracelens: an architecture file for TraceLens "
        "(default: none)",
    )
    group.add_argument(
        "--export-file", type=Path, metavar="FILE", help="file that --export writes (default: tracelens.json)"
    )
    add_shared_options(group, "--overwrite")
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.ceilings.roof import Roofs
    from mamf.cli.resuming import format_option_name
    from mamf.logs.compare import require_same_card
    from mamf.logs.roofs import build_roofs_from_logs
    from mamf.plugins.discovery import open_backend
    from mamf.report.charts.picture import check_image_path, draw_figure, make_file_exists_error, save_figure
    from mamf.report.document import describe_machine, list_warnings
    from mamf.report.roofline import (
        make_roofline_chart,
        make_roofline_document,
        select_roofline_points,
    )
    from mamf.report.tracelens import make_tracelens_architecture

    export_path = options.export_file or (Path(f"{options.export}.json") if options.export else None)
    if options.picture:
        check_image_path(options.picture, options.overwrite)
    if export_path and not options.export:
        raise UsageError(
            f"--export-file needs --export: name the format of {export_path}, such as --export {ROOF_EXPORT_FORMATS[0]}"
        )
    if export_path and export_path.exists() and not options.overwrite:
        raise make_file_exists_error(export_path)
    row_logs, exit_code = list(map(read_log, options.rows)), 0
    for option in ("output_folder", "budget", "dtype", "dry_run", "notes") if options.ceiling else ():
        if option in options.given_names:
            raise UsageError(
                f"--ceiling cannot be combined with {format_option_name(option)}, because --ceiling reads logs and "
                "measures nothing"
            )
    if options.ceiling is None:
        backend = open_backend(options.backend or "auto", options.device or 0)
        for log in () if options.anyway else row_logs:  # Refuse logs of another card before mamf measures.
            require_same_card(log, Roofs(backend.info.name, backend.info.uuid_hash))
        options.ceiling, exit_code = _run_ceiling_searches(options, backend)
        if options.dry_run:
            return exit_code
    logs = [read_log(path) for path in options.ceiling]
    roofs = build_roofs_from_logs(logs, options.anyway)
    if options.regime:
        roofs = roofs.select_regimes(options.regime)
    roofline_points: list[RooflinePoint] = []
    for log in row_logs:
        if not options.anyway:
            require_same_card(log, roofs)
        points_of_log = select_roofline_points(log.measurements, roofs, log.matmul_ceilings)
        if not points_of_log:
            warn(
                f"{log.path} has no row to show in the roofline, which has rows of kernels, and not of searches, "
                "verifications or links between devices"
            )
        roofline_points += points_of_log
    header, warnings = logs[0].header, dict.fromkeys(warning for log in logs for warning in list_warnings(log))
    interrupted = (
        f"{log.path}: the run was interrupted, so its ceilings may be too low"
        for log in logs
        if log.tier == "interrupted"
    )
    print_document(
        options,
        make_roofline_document(
            roofs, roofline_points, [describe_machine(header), *warnings, *interrupted], options.top
        ),
    )
    if export_path:
        architecture = make_tracelens_architecture(roofs, header["device"]["memory_bytes"])
        (write_file_atomically if options.overwrite else create_file_atomically)(
            export_path, f"{json.dumps(architecture, indent=4)}\n".encode()
        )
        print_line(f"{options.export}: {export_path}", choose_note_stream(options))
    if options.picture:
        save_figure(
            draw_figure(make_roofline_chart(roofs, roofline_points, header)), options.picture, options.overwrite
        )
        print_line(f"figure: {options.picture}", choose_note_stream(options))
    return exit_code


def _run_ceiling_searches(options: argparse.Namespace, backend: Backend) -> tuple[list[Path], int]:
    """Run the searches for the ceilings, or continue interrupted searches. Each search writes a log into the output
    folder.

    Return the paths of the logs that have a ceiling or a read bandwidth, and the highest exit code of the searches.
    Raises UsageError if there is no such log.
    """
    from mamf.logs.roofs import find_read_bandwidths

    folder: Path = options.output_folder or Path(f"roofline-{datetime.now():%Y%m%d-%H%M%S}")
    if options.crashed_run:
        folder = options.crashed_run.log_path.parent
    exit_code, paths = 0, list[Path]()
    if not options.dry_run:
        make_folder(folder)
    with redirect_reports(sys.stderr):
        print_line(
            f"logs: {folder}; to continue an interrupted search, repeat the command with --output-folder {folder}"
        )
        for name, arguments in _yield_search_arguments(options, backend, folder):
            paths.append(folder / f"{name}.jsonl")
            find_command = [
                "find",
                *arguments,
                *(
                    ["--dry-run"]
                    if options.dry_run
                    else ["--requeue" if paths[-1].exists() else "--output", str(paths[-1])]
                ),
            ]
            print_lines(f"-- mamf {shlex.join(find_command)}\n")
            exit_code = max(exit_code, run_command(find_command))
            if exit_code == INTERRUPTED_EXIT_CODE:
                break
    logs_by_path = {path: read_log(path) for path in paths if path.exists()}
    logs_with_ceiling = [
        path
        for path, log in logs_by_path.items()
        if log.matmul_ceilings or log.other_ceilings or find_read_bandwidths(log, backend.info.cache_bytes)
    ]
    if not options.dry_run and (
        incomplete_paths := [
            path for path in paths if path not in logs_with_ceiling or logs_by_path[path].tier != "complete"
        ]
    ):
        message = (
            f"{' and '.join(map(str, incomplete_paths))}: ceilings are missing; to continue, repeat the command with "
            f"--output-folder {folder}, and with a longer --budget if the time was too short"
        )
        if not logs_with_ceiling:
            raise UsageError(message)
        warn(message)
    return logs_with_ceiling, exit_code


def _yield_search_arguments(
    options: argparse.Namespace, backend: Backend, folder: Path
) -> Iterator[tuple[str, list[str]]]:
    """Yield, for each search, its name and its arguments for ``mamf find``. ``folder``: the folder of the logs.

    There is a search for the matmul ceilings of each dtype, one for the bandwidth of memory (with arrays larger than
    the last-level cache), and one for the bandwidth of this cache (with arrays that fit in it).
    """
    from mamf.operations.bandwidth.operation import DEFAULT_CACHE_BYTES, BandwidthShape, floor_to_power_of_two
    from mamf.operations.matmul.operation import make_problem

    dtypes = list(dict.fromkeys(make_problem(backend, name).dtype for name in options.dtype or [None]))
    dtype_seconds = DEFAULT_BUDGET_SECONDS * (1 if backend.is_accelerator else CPU_BUDGET_FACTOR)
    if options.budget:
        dtype_seconds = options.budget / (len(dtypes) + 2 * _BANDWIDTH_SHARE_OF_DTYPE_BUDGET)
    shared_options = ["--backend", options.backend or "auto", "--device", str(options.device or 0)]
    shared_options += [
        "--regime",
        *(options.regime or CEILING_REGIMES),
        *(["--notes", options.notes] if options.notes else []),
    ]
    for dtype in dtypes:
        quick_options = ["--quick"] if _is_quick_search(folder / f"{dtype}.jsonl", dtype_seconds) else []
        yield dtype, ["--dtype", dtype, "--budget", f"{dtype_seconds:g}s", *quick_options, *shared_options]
    cache_bytes = backend.info.cache_bytes or DEFAULT_CACHE_BYTES
    multiples, cache_passes, divisor = (
        (_CACHE_SIZE_MULTIPLES, _PASSES_OVER_CACHE, _FREE_MEMORY_DIVISOR)
        if backend.is_accelerator
        else (_CPU_CACHE_SIZE_MULTIPLES, _CPU_PASSES_OVER_CACHE, _CPU_FREE_MEMORY_DIVISOR)
    )
    max_bytes = (backend.read_free_memory_bytes() or backend.info.memory_bytes or _DEFAULT_MEMORY_BYTES) // divisor
    memory_sizes = [
        min(2 * floor_to_power_of_two(multiple * cache_bytes - 1), floor_to_power_of_two(max_bytes))
        for multiple in multiples
    ]
    cache_sizes = [floor_to_power_of_two(cache_bytes // each) for each in _CACHE_SIZE_DIVISORS]
    levels = [("memory", 1, list(dict.fromkeys(memory_sizes)))]
    if backend.info.cache_bytes:
        levels.append(("cache", cache_passes, cache_sizes))
    for name, pass_count, sizes in levels:
        arguments = ["--operation", "bandwidth", "--set", "pattern=read", f"warm={pass_count}", "--shapes"]
        yield (
            name,
            [
                *arguments,
                *(str(BandwidthShape(size)) for size in sizes),
                "--budget",
                f"{_BANDWIDTH_SHARE_OF_DTYPE_BUDGET * dtype_seconds:g}s",
                *shared_options,
            ],
        )


def _is_quick_search(log_path: Path, seconds: float) -> bool:
    """Return whether to search with --quick. An existing log decides, because a search that continues cannot change
    this option. Without a log, the search is quick if it has less than _MIN_THOROUGH_SEARCH_SECONDS.
    """
    from mamf.logs.run_log import read_run_log

    is_quick = seconds < _MIN_THOROUGH_SEARCH_SECONDS
    with suppress(RunLogError):  # 'mamf find' reports a log that cannot be read, or starts a new one.
        is_quick = getattr(read_run_log(log_path).plan.options, "is_quick", is_quick)
    return is_quick
