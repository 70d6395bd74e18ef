"""Implement the command ``mamf sweep``: measure every given shape with one matmul kernel, or with the kernels of
another operation, and print the fastest rows.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from mamf.cli.parser import CommandParser
from mamf.cli.planning import add_operation_options, make_plan, make_requested_operation
from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_measuring_options,
    add_multi_device_options,
    add_run_options,
    add_session_options,
    add_shared_options,
    parse_index,
    print_line,
    print_needed_memory,
)
from mamf.errors import UnsupportedError, parse_size
from mamf.kernel import AnyKernel
from mamf.operation import MeasurementRequest
from mamf.operations.matmul.operation import choose_matmul_kernel
from mamf.plans import ORDER_CHOICES, SHUFFLED_ORDER, Plan, SweepOptions
from mamf.plugins.discovery import OPERATION_GROUP, is_class_path, list_builtin_names

EXAMPLES = """examples:
  mamf sweep --m-range 0 20480 256                    79 shapes Mx4096x4096 in the burst regime
  mamf sweep --m 8192 --n 8192 --k 8192 --regime burst sustained
  mamf sweep --m-range 0 20480 256 --regime classic   measure as mamf-finder does
  mamf sweep --preset decode --top all                linear layers of Llama 8B, 1 to 512 tokens
  mamf sweep --preset llama-8b --product grad-weight  the matmuls of a backward pass
  mamf sweep --resume LOG                             continue after Ctrl-C or kill
  mamf sweep --operation NAME --help                  the options for kernels of another operation
  mamf sweep --operation NAME --shapes A B --set FIELD=X,Y
"""


def add_options(parser: CommandParser) -> None:
    operation = make_requested_operation(parser.command_words)
    parser.set_defaults(requested_operation=operation)
    add_operation_options(parser, operation, takes_several_values=operation.compares_kernels)
    parser.operation_name, parser.list_operation_names = operation.name, partial(list_builtin_names, OPERATION_GROUP)
    group = parser.add_argument_group("what to measure")
    add_shared_options(group, "--operation", default_text="matmul; every operation adds its own options")
    if operation.compares_kernels:
        add_shared_options(group, "--kernel")
        add_session_options(parser)
        return
    add_shared_options(
        group, "--kernel", nargs=None, default_text="torch.mm, scaled_mm or int_mm, depending on the dtype"
    )
    group = add_measuring_options(
        parser, "burst; the regime classic times fixed numbers of launches, as mamf-finder does", operation.regimes
    )
    group.add_argument(
        "--num-warmup-iterations",
        dest="warmup_launches",
        type=parse_index,
        metavar="COUNT",
        help="number of untimed warm-up launches, in the regime classic only (default: 50)",
    )
    group.add_argument(
        "--num-iterations",
        dest="timed_launches",
        type=parse_size,
        metavar="COUNT",
        help="number of timed launches, in the regime classic only (default: 100)",
    )
    group.add_argument(
        "--order",
        choices=ORDER_CHOICES,
        help="order in which mamf measures the shapes: as given, or shuffled, so that a drift of the device does not "
        "look like an effect of the shape (default: shuffled)",
    )
    group.add_argument(
        "--reference",
        metavar="MxNxK",
        help="shape to measure repeatedly during the run, to show whether the device's speed drifts (default: none)",
    )
    group.add_argument(
        "--reference-every",
        type=parse_size,
        metavar="COUNT",
        help="number of shapes between two measurements of --reference (default: 100)",
    )
    add_device_options(parser)
    add_multi_device_options(parser)
    add_run_options(parser)
    add_shared_options(parser, "--ceiling", default_text="none; rows then show no share of a ceiling")
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    return run_kernel_session(
        options,
        Session if options.requested_operation.compares_kernels else _OneKernelSession,
        options.requested_operation,
    )


class _OneKernelSession(Session):
    """A run of ``mamf sweep`` with one matmul kernel. ``roofs``: the ceilings from the logs of --ceiling, or None
    without --ceiling. The report shows each rate as a share of them.
    """

    def __init__(self, request: MeasurementRequest, options: argparse.Namespace, *session_arguments: Any) -> None:
        from mamf.ceilings.roof import require_same_device
        from mamf.cli.reading import read_roofs

        self.roofs = read_roofs(options) if options.ceiling else None
        super().__init__(request, options, *session_arguments)
        if self.roofs is not None:
            info = self.backend.info
            require_same_device((self.roofs.device, self.roofs.uuid_hash), (info.name, info.uuid_hash))

    def open_kernels(self) -> list[tuple[str, AnyKernel]]:
        from mamf.cli.resuming import require_same_kernels

        logged_plan, backend = self.resumed_plan, self.backend
        (problem,) = logged_plan.problems if logged_plan else self.request.make_problems(backend)
        name = self.options.kernel or (logged_plan.kernels[0] if logged_plan else "auto")
        kernel = choose_matmul_kernel(backend, problem, name)
        # If the user gave the kernel as package.module:Class, the plan names the kernel in this form, except in older
        # logs. In all other cases, the plan has the kernel's attribute ``name``.
        planned_name = name if is_class_path(logged_plan.kernels[0] if logged_plan else name) else kernel.name
        if logged_plan:
            require_same_kernels(self.options, logged_plan.kernels, [planned_name])
        if reason := kernel.explain_unsupported_problem(backend, problem):
            raise UnsupportedError(reason)
        return [(planned_name, kernel)]

    def make_new_plan(self) -> Plan:
        option_names = ("order", "warmup_launches", "timed_launches", "reference_every")
        given_values = {name: value for name in option_names if (value := getattr(self.options, name)) is not None}
        reference = self.operation.parse_shape(self.options.reference) if self.options.reference else None
        sweep_options = SweepOptions(**{"order": SHUFFLED_ORDER, "reference": reference, **given_values})
        return make_plan(self.request, self.options, self.backend, [name for name, _ in self.kernels], sweep_options)

    def print_plan(self) -> None:
        from mamf.engine.estimate import estimate_run_seconds, measure_matmul_flops
        from mamf.engine.strategies.rows import compute_largest_buffers

        plan, backend, ((_, kernel),) = self.plan, self.backend, self.kernels
        keys = self.measured_run.remaining_row_keys
        flops = measure_matmul_flops(kernel, plan.problem, backend)  # type: ignore[arg-type]
        seconds = estimate_run_seconds(plan, keys, backend, flops)
        print_line(f"device: {backend.info.name} ({backend.name}:{backend.index}), {kernel.name} {plan.problem.dtype}")
        print_line(f"shapes: {len(plan.shapes)}, in {' and '.join(plan.regimes)}; rows left to measure: {len(keys)}")
        print_needed_memory(
            sum(buffer.nbytes for buffer in compute_largest_buffers(plan, backend.info.cache_bytes).values()),
            "the largest shape",
            backend,
        )
        print_line(
            f"time: about {max(seconds, 1.0):.0f} s"
            + (
                f" for all rows (the budget ends the run after {plan.budget_seconds:.0f} s)"
                if plan.budget_seconds and plan.budget_seconds < seconds
                else ""
            )
            + f", estimated from {flops / 1e12:.3g} TFLOPS of a square matmul"
            + ("" if backend.is_accelerator else "; with the checks of the results, a CPU may take twice as long")
        )
