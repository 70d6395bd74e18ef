"""Implement the command ``mamf find``: find the ceilings of a device, which are its highest rates, in about a minute.

For matmul, mamf searches a grid of shapes for the fastest one, in short bursts and under sustained load. For any other
operation, mamf measures a list of shapes, and then measures the fastest shape of each problem again to confirm its
rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamf.cli.parser import CommandParser
from mamf.cli.planning import add_operation_options, make_measurement_request, make_requested_operation
from mamf.cli.resuming import measure_with_signal_handler, require_same_kernels
from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_multi_device_options,
    add_run_options,
    add_session_options,
    add_shared_options,
    choose_note_stream,
    print_line,
    warn,
)
from mamf.cli.watching import INTERRUPTED_EXIT_CODE, SignalHandler
from mamf.errors import UsageError
from mamf.operation import MeasurementRequest
from mamf.operations.matmul.operation import choose_matmul_kernel, choose_search_kernels
from mamf.plans import CEILING_REGIMES, DEFAULT_BUDGET_SECONDS, FIND, Plan, choose_regimes
from mamf.plugins.discovery import open_backend

if TYPE_CHECKING:
    from mamf.engine.runner import NamedKernel
    from mamf.kinds.driver import ResumedLog
    from mamf.logs.run_log import RunLog

EXAMPLES = """examples:
  mamf find                                     burst and sustained ceilings of the first accelerator
  mamf find --dtype bfloat16 float16 fp8        one dtype after the other, one log each
  mamf find --kernel torch.mm cublaslt          try only these two kernels
  mamf find --quick                             both ceilings in 15 s, on a CPU in 70 s
  mamf find --operation NAME --help             the options for ceilings of another operation
  mamf find --operation bandwidth --set pattern=copy,read,write,triad
"""
_DEFAULT_BUDGET_TEXT = f"{DEFAULT_BUDGET_SECONDS:.0f}s, plus half of that for each problem after the first"


def add_options(parser: CommandParser) -> None:
    operation = make_requested_operation(parser.command_words)
    parser.set_defaults(requested_operation=operation)
    add_operation_options(
        parser,
        operation,
        has_shape_options=not operation.sets_compute_ceiling,
        takes_several_values=not operation.sets_compute_ceiling,
    )
    group = parser.add_argument_group("what to measure")
    add_shared_options(group, "--operation", default_text="matmul; every operation adds its own options")
    if not operation.sets_compute_ceiling:
        add_shared_options(group, "--kernel")
        add_session_options(parser, budget_default=_DEFAULT_BUDGET_TEXT, regimes_default="both")
        return
    add_shared_options(group, "--dtype")
    add_shared_options(group, "--kernel", default_text="all available kernels except those that compile for minutes")
    search_group = parser.add_argument_group("search")
    add_shared_options(search_group, "--regime", default_text="both")
    search_group.add_argument(
        "--quick",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="find both ceilings in 15 s, or in 70 s on a CPU: measure each shape fewer times, and only with the "
        "kernel that is fastest in a short trial; an accelerator runs only smaller shapes",
    )
    add_shared_options(search_group, "--precision")
    add_device_options(parser)
    add_multi_device_options(parser)
    add_run_options(
        parser,
        budget_default=f"{DEFAULT_BUDGET_SECONDS:.0f}s per dtype; on a CPU twice as long",
        resume_help="log of an unfinished search to continue, or the folder with its logs if several devices share the "
        "run; the time budget starts again, so mamf may also measure confirmed shapes more often",
    )
    add_shared_options(parser, "--format", "--top", "--wide")


def run_with_options(options: argparse.Namespace) -> int:
    if options.requested_operation.sets_compute_ceiling:
        return _run_search_per_dtype(options)
    return run_kernel_session(options, _OperationFindSession, options.requested_operation)


def _run_search_per_dtype(options: argparse.Namespace) -> int:
    """Search for the matmul ceilings of each dtype in --dtype, one dtype after another. Return the highest exit code of
    the searches.
    """
    if options.new_log_reason and len(set(options.dtype or ())) > 1:
        raise UsageError(
            "--requeue needs a single --dtype, because each dtype has its own log: name one dtype, or use --output"
        )
    # A resumed run continues one log, which has a single dtype.
    is_resumed = options.resume and not options.crashed_run
    dtypes = [options.dtype] if is_resumed else list(dict.fromkeys(options.dtype or [None]))
    output_path: Path | None = options.output
    if options.budget is not None and not is_resumed:
        options.budget /= len(dtypes)

    def search_remaining_dtypes(signal_handler: SignalHandler, resumed: ResumedLog | None) -> int:
        if len(dtypes) > 1:  # Report an unsupported dtype before mamf measures any dtype.
            backend = open_backend(options.backend or "auto", options.device or 0)
            for problem in make_measurement_request(options.requested_operation, options).make_problems(backend):
                choose_search_kernels(backend, problem, options.kernel)
        for dtype in dtypes[len(options.finished_exit_codes) :]:
            options.dtype = dtype
            if output_path is not None and len(dtypes) > 1:
                options.output = output_path.with_name(f"{output_path.stem}-{dtype}{output_path.suffix}")
            try:
                exit_code = _MatmulSearchSession(
                    MeasurementRequest(options.requested_operation), options, signal_handler, resumed
                ).run()
            except UsageError as error:  # The device may be too slow only in this dtype, so try the others.
                if len(dtypes) == 1:
                    raise
                warn(str(error))
                exit_code = error.exit_code
            options.finished_exit_codes.append(exit_code)
            resumed = options.crashed_run = None
            if exit_code == INTERRUPTED_EXIT_CODE:
                break
        return int(max(options.finished_exit_codes))

    return measure_with_signal_handler(options, search_remaining_dtypes)


class _MatmulSearchSession(Session):
    """A run of ``mamf find`` for matmul: it searches a grid of shapes for the highest rates of one dtype."""

    kind = FIND

    def open_kernels(self) -> Sequence[NamedKernel]:
        from mamf.engine.search.grid import plan_search

        options, logged_plan = self.options, self.resumed_plan
        if logged_plan is None:
            (problem,) = make_measurement_request(self.operation, options).make_problems(self.backend)
            self._search_plan, opened_kernels = plan_search(
                self.backend,
                problem,
                options.kernel,
                regimes=choose_regimes(options.regime, CEILING_REGIMES),
                budget_seconds=options.budget,
                precision=options.precision or Plan.precision,
                is_quick=bool(options.quick),
            )
            return list(zip(self._search_plan.kernels, opened_kernels, strict=True))
        if options.kernel:
            logged_names, requested_names = (
                [choose_matmul_kernel(self.backend, logged_plan.problem, name).name for name in names]
                for names in (logged_plan.kernels, options.kernel)
            )
            require_same_kernels(options, logged_names, requested_names)
        return list(
            zip(
                logged_plan.kernels,
                choose_search_kernels(self.backend, logged_plan.problem, logged_plan.kernels),
                strict=True,
            )
        )

    def make_new_plan(self) -> Plan:
        return self._search_plan

    def make_plan_to_compare(self, logged_plan: Plan) -> Plan:
        """Return the plan that the options describe, but with the grid of shapes from ``logged_plan``, because a new
        grid would depend on a new measurement of the device's speed, and so would differ slightly.
        """
        options = self.options
        return replace(
            logged_plan,
            problems=make_measurement_request(self.operation, options).make_problems(self.backend),
            regimes=choose_regimes(options.regime, CEILING_REGIMES),
            precision=options.precision or Plan.precision,
            options=replace(logged_plan.options, is_quick=bool(options.quick)),
        )

    def print_plan(self) -> None:
        grid, kernel_names = self.plan.options.grid, ", ".join(self.plan.kernels)
        print_line(
            f"device: {self.backend.info.name} ({self.backend.name}:{self.backend.index}), {self.plan.problem.dtype}"
        )
        print_line(f"kernels: {kernel_names}")
        size_limit = f", up to {grid.most_flop / 1e12:.3g} TFLOP each" if grid.most_flop < float("inf") else ""
        print_line(
            f"shapes: {len(grid.list_shapes())}, sizes {grid.m[0]} to {grid.m[-1]} in steps of {grid.m[0]}, K also to "
            f"{grid.k[-1]}{size_limit}; also the fastest shapes of earlier searches, if any"
        )
        print_line(f"ceilings: {', '.join(self.plan.regimes)}; time: at most {self.plan.budget_seconds:.0f} s")

    def print_report(self, log: RunLog) -> int:
        from mamf.contribution.known_ceilings import compare_with_known_ceilings
        from mamf.logs.ceiling_cache import cache_ceilings

        exit_code = super().print_report(log)
        for ceiling in log.matmul_ceilings.values():
            if comparison := compare_with_known_ceilings(ceiling, log.header["device"]):
                print_line(f"{ceiling.regime}, {comparison}", choose_note_stream(self.options))
        cache_ceilings(log.path, warn)
        return exit_code


class _OperationFindSession(Session):
    """A run of ``mamf find --operation NAME``: it finds the highest rate of each problem among a list of shapes."""

    kind = FIND

    def make_new_plan(self) -> Plan:
        plan = super().make_new_plan()
        regimes = choose_regimes(self.options.regime, CEILING_REGIMES)
        return replace(
            plan,
            kind=FIND,
            options=None,
            shapes=self._choose_shapes(plan),
            regimes=regimes,
            budget_seconds=self.options.budget or DEFAULT_BUDGET_SECONDS * (1 + len(plan.problems)) / 2,
        )

    def _choose_shapes(self, plan: Plan) -> tuple[Any, ...]:
        """Return the shapes that the user gave. If the user gave none, return the default shapes whose rate can be
        a ceiling: the rate of arrays that fit in a cache, for example, cannot be a ceiling of memory.

        Raises UsageError if no shape has a rate that can be a ceiling.
        """
        info, is_ceiling = self.backend.info, self.operation.may_be_ceiling
        shapes = [shape for shape in plan.shapes if any(is_ceiling(info, problem, shape) for problem in plan.problems)]
        if not shapes:
            raise UsageError(
                "all shapes fit in a cache, so they cannot measure the memory ceiling: name larger ones with "
                f"--shapes, or measure these with 'mamf sweep --operation {self.operation.name}'"
            )
        return plan.shapes if self.request.shapes or self.request.sizes else tuple(shapes)
