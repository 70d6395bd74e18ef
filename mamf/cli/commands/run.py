"""Implement the command ``mamf run KERNEL``: launch one kernel on one shape and verify its result, so that the user can
inspect the launch with a profiler, sanitizer or debugger.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mamf.cli.parser import CommandParser
from mamf.cli.planning import add_launch_options, make_measurement_request
from mamf.cli.terminal import add_device_options, add_shared_options, print_line
from mamf.cli.watching import exit_on_ctrl_c
from mamf.errors import UsageError
from mamf.kernel import Work
from mamf.measurement import TERA

if TYPE_CHECKING:
    from mamf.engine.launching import ProfiledLaunches

EXAMPLES = """examples:
  mamf run torch.mm --shape 256x256x256                             launch once and verify; works with any kernel
  mamf run sdpa-flash --seq-lens 4096 --causal --direction bwd
  mamf run eager --seq-lens 4096 --parts --launches 20              scores, softmax and values
  ncu --clock-control none --profile-from-start off mamf run torch.mm --shape 4096x4096x4096
  nsys profile --capture-range=cudaProfilerApi mamf run flash-attn-4 --seq-lens 8192
  rocprofv3 --selected-regions --kernel-trace -- mamf run torch.mm --shape 4096x4096x4096
  compute-sanitizer --tool memcheck mamf run my.module:MyKernel --shape 256x256x256
"""
#: The number of additional launches that --determinism makes, to compare their results bit by bit.
_DETERMINISM_LAUNCHES = 10
_DETERMINISM_RESULT_TEXTS = {
    True: f"{_DETERMINISM_LAUNCHES} more launches gave bitwise equal results",
    False: f"{_DETERMINISM_LAUNCHES} more launches did not all give bitwise equal results",
    None: "determinism is unknown, because the kernel returns no result to compare",
}


def add_options(parser: CommandParser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help="kernel name from 'mamf kernels', or package.module:Class")
    add_launch_options(parser, "--shape")
    add_shared_options(parser, "--launches", default=1, default_text="1")
    parser.add_argument("--no-verify", action="store_true", help="do not check the kernel's result (default: check it)")
    parser.add_argument(
        "--kernel-names",
        action="store_true",
        help="print the names of the GPU kernels of a launch; torch.profiler records them in an additional launch",
    )
    parser.add_argument(
        "--determinism",
        action="store_true",
        help="launch 10 more times and report whether all results are bit-identical",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="for the kernel eager only: time scores, softmax and values separately (median of --launches)",
    )
    add_device_options(parser)


def run_with_options(options: argparse.Namespace) -> int:
    with exit_on_ctrl_c():
        from mamf.engine.launching import launch_in_profiler_window, time_kernel_parts
        from mamf.plugins.discovery import choose_kernels, find_operation_of_kernel, make_operation, open_backend

        operation = make_operation(options.operation) if options.operation else find_operation_of_kernel(options.kernel)
        request = make_measurement_request(operation, options)
        backend = open_backend(options.backend or "auto", options.device or 0)
        ((_, kernel),) = choose_kernels(operation, backend, [options.kernel])
    shape = _get_single_value(
        "shape", tuple(request.make_labeled_shapes(backend)), f"--shape {operation.shape_example}"
    )
    problem = _get_single_value("problem", request.make_problems(backend), "one value per option")
    if options.parts:
        for line in _yield_part_table_lines(time_kernel_parts(kernel, problem, shape, backend, options.launches)):
            print_line(line)
        return 0
    watch_kernels = None
    if options.kernel_names:
        from mamf.profiling.running import record_device_kernels

        watch_kernels = record_device_kernels
    launches = launch_in_profiler_window(
        *(kernel, problem, shape, backend, options.launches),
        not options.no_verify,
        watch_kernels,
        _DETERMINISM_LAUNCHES if options.determinism else 0,
    )
    problem_words = ", ".join([f"{operation.name} {problem.dtype}", *operation.list_identifying_fields(problem)])
    report_lines = [
        f"{kernel.name} {shape} on {backend.info.name} ({backend.name}:{backend.index}): {problem_words}",
        *_yield_launch_lines(launches, problem.compute_work(shape)),
        *([_DETERMINISM_RESULT_TEXTS[launches.is_deterministic]] if options.determinism else []),
    ]
    for line in report_lines:
        print_line(line)
    return 0


def _get_single_value(value_name: str, values: tuple[Any, ...], example: str) -> Any:
    """Return the only element of ``values``. Raises UsageError if ``values`` has several elements or none.

    ``value_name``: the name of the value in the error message, such as ``shape``. ``example``: an example of a single
    value for the error message, such as ``--shape 4096x4096x4096``.
    """
    if len(values) != 1:
        raise UsageError(f"'mamf run' takes one {value_name}, not {len(values)}: give {example}")
    return values[0]


def _yield_part_table_lines(parts: Mapping[str, tuple[int, float]]) -> Iterator[str]:
    """Yield the lines of a table of the parts of an attention kernel, such as softmax. ``parts``: the FLOP and the
    seconds of each part.
    """
    from mamf.report.document import format_four_digits

    total_flop, total_seconds = (sum(each) for each in zip(*parts.values(), strict=True))
    yield "part            ms  of the time      TFLOP  of the FLOP    TFLOPS  time / FLOP"
    for name, (flop, seconds) in parts.items():
        time_share, flop_share = seconds / total_seconds, flop / total_flop
        flop_cells = f"{flop / TERA:10.4g} {flop_share:12.1%} {flop / seconds / TERA:9.4g}"
        yield (
            f"{name:8} {format_four_digits(seconds * 1e3):>9} {time_share:12.1%} {flop_cells} "
            f"{time_share / flop_share:12.2f}"
        )
    yield "softmax: includes scale and mask, 5 FLOP per score; time / FLOP: share of time divided by share of FLOP"


def _yield_launch_lines(launches: ProfiledLaunches, work: Work) -> Iterator[str]:
    from mamf.report.document import format_four_digits, format_rate

    if launches.worst_verdict is None:
        yield "the result was not verified"
    else:
        verdict = launches.worst_verdict
        yield f"verified: relative error {verdict.error:.2g}, tolerance {verdict.tolerance:.2g}"
    yield f"prepared in {launches.preparation_seconds:.2f} s: operands, compilation, tuning and first launch"
    median_seconds = statistics.median(launches.launch_seconds)
    rate = (
        f"{format_four_digits(median_seconds * 1e3)} ms, {format_rate(work.amount / median_seconds / TERA, work.unit)}"
    )
    if len(launches.launch_seconds) == 1:
        yield f"launched once: {rate}; a single launch is not a measurement"
    else:
        yield (
            f"launched {len(launches.launch_seconds)} times: {rate} (median), without rests between the launches, so "
            "this is not a measurement"
        )
    if launches.device_kernel_names is not None:
        yield (
            "GPU kernels of a launch: "
            f"{', '.join(dict.fromkeys(launches.device_kernel_names)) or 'none that torch.profiler sees'}"
        )
