"""Implement the command ``mamf counters KERNEL...``: measure the rate of each kernel, and then read its hardware
counters in separate launches under NVIDIA's profiler ncu.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mamf.cli.parser import CommandParser
from mamf.cli.planning import add_launch_options
from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import add_device_options, add_run_options, add_shared_options, print_lines
from mamf.cli.watching import FAILURE_EXIT_CODE
from mamf.errors import UnavailableError, UsageError
from mamf.operation import MeasurementRequest

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup
    from mamf.logs.run_log import RunLog
    from mamf.profiling.counters.counting import HardwareCounterStrategy
    from mamf.report.document import Document

EXAMPLES = """examples:
  mamf counters torch.mm --shape 4096x4096x4096
  mamf counters sdpa-flash sdpa-cudnn --seq-lens 4096 --causal
  mamf counters --resume LOG
"""


def add_options(parser: CommandParser) -> None:
    kernel = parser.add_argument(
        "kernel",
        nargs="*",
        metavar="KERNEL",
        help="kernels whose counters to read; the report shows the cycles of each relative to the first kernel",
    )
    kernel.alternatives = ("--requeue", "--resume")  # type: ignore[attr-defined]
    add_launch_options(parser, "--shapes")
    group = parser.add_argument_group("how to read the counters")
    add_shared_options(group, "--launches", default=5, default_text="5")
    group.add_argument(
        "--ncu",
        metavar="PATH",
        help="path of ncu, the executable of NVIDIA Nsight Compute (default: the first ncu on PATH)",
    )
    add_shared_options(group, "--time-limit")
    add_device_options(parser)
    add_run_options(parser)
    add_shared_options(parser, "--format", "--wide")
    parser.set_defaults(regime=None, precision=None, flush=None)


def run_with_options(options: argparse.Namespace) -> int:
    if options.requested_operation is None:
        raise UsageError(
            "no KERNEL is given"
            + (f", and mamf cannot read a log at {options.resume}" if options.resume else "")
            + ": name at least one ('mamf kernels' lists the names)"
        )
    options.kernel = options.kernel or None
    return run_kernel_session(options, CountersSession, options.requested_operation)


class CountersSession(Session):
    """A run of ``mamf counters``: it measures kernels in short bursts, then reads the hardware counters of each with
    ncu.

    ``combinations_with_counters``: the combinations of kernel, problem and shape whose counters the log already has.
    """

    def __init__(self, request: MeasurementRequest, options: argparse.Namespace, *session_arguments: Any) -> None:
        from mamf.profiling.counters.ncu import Ncu, find_ncu, read_logged_counters

        super().__init__(request, options, *session_arguments)
        if reason := self.backend.explain_missing_counters():
            raise UnavailableError(str(reason))
        logged_counters = read_logged_counters(self.resumed_log) if self.resumed_log else {}
        self.combinations_with_counters = {key for key, counters in logged_counters.items() if counters.has_counters}
        self.ncu = Ncu(
            find_ncu(options.ncu), options.backend or self.backend.name, self.backend.index, options.launches
        )

    def make_strategy(self, setup: RunSetup) -> HardwareCounterStrategy:
        from mamf.profiling.counters.counting import HardwareCounterStrategy

        return HardwareCounterStrategy(setup, self.combinations_with_counters, self.ncu)

    def print_plan(self) -> None:
        super().print_plan()
        for _, problem, shape, kernel in self.measured_run.remaining_row_keys:
            print_lines(f"ncu command: {' '.join(self.ncu.make_command(kernel, problem, shape))}\n")

    def is_run_complete(self) -> bool:
        from mamf.profiling.counters.counting import find_rows_without_counters

        return super().is_run_complete() and not find_rows_without_counters(
            self.measured_run.rows, self.combinations_with_counters
        )

    def choose_exit_code(self, run_exit_code: int) -> int:
        return run_exit_code or (0 if self.combinations_with_counters else FAILURE_EXIT_CODE)

    def make_document(self, log: RunLog) -> Document:
        from mamf.profiling.counters.report import make_counters_document

        return make_counters_document(log)
