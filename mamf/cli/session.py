"""Run a command that measures: open the device, make the plan, show progress and print the report of the log."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamf.backend import SIBLING_CHECK, Backend, CheckResult, format_sharing_warning
from mamf.cli.planning import make_measurement_request, make_plan
from mamf.cli.resuming import (
    compute_remaining_budget,
    exit_if_watched,
    has_plan_options,
    measure_with_signal_handler,
    reopen_device,
    report_run_to_watcher,
    require_plan_of_kind,
    require_same_kernels,
    require_same_plan,
)
from mamf.cli.terminal import choose_note_stream, print_document, print_line, warn
from mamf.cli.watching import FAILURE_EXIT_CODE, INTERRUPTED_EXIT_CODE, SignalHandler
from mamf.errors import MamfError, RunLogError, UsageError
from mamf.operation import MeasurementRequest, Operation
from mamf.plans import BURST, CEILING_REGIMES, CLASSIC, FIND, GUARD, ROOFLINE, SWEEP, VERIFY, Plan, RowKey
from mamf.plugins.discovery import choose_kernels, make_kernel, make_operation, open_backend

if TYPE_CHECKING:
    from mamf.ceilings.roof import Roofs
    from mamf.engine.runner import NamedKernel, RunSetup, Strategy
    from mamf.kinds.driver import ResumedLog
    from mamf.logs.run_log import RunLog
    from mamf.report.document import Document


def run_session(options: argparse.Namespace, make_session: Callable[..., Session], *arguments: Any) -> int:
    """Run a session, or print its plan with ``--dry-run``, and return the exit code.

    ``make_session``: a function that takes ``arguments``, then the options, the handler of signals and the resumed log,
    and returns the session.
    """
    return measure_with_signal_handler(
        options, lambda signals, resumed: make_session(*arguments, options, signals, resumed).run()
    )


def run_kernel_session(
    options: argparse.Namespace, make_session: Callable[..., Session], operation: Operation[Any, Any] | None = None
) -> int:
    """Measure kernels of an operation and return the exit code. By default, use the operation of --operation or,
    without this option, the operation with the name of the command.

    This opens the device only after it has checked the options. Raises UsageError if an option has no effect.
    """
    option_and_regime_by_dest = {
        "flush": ("--no-flush", BURST),
        "timed_launches": ("--num-iterations", CLASSIC),
        "warmup_launches": ("--num-warmup-iterations", CLASSIC),
    }
    for name in () if options.resume else sorted(option_and_regime_by_dest.keys() & options.given_names):
        option, regime = option_and_regime_by_dest[name]
        if regime not in (options.regime or CEILING_REGIMES):
            raise UsageError(f"{option} has an effect in {regime} only: add --regime {regime}, or leave {option} out")
    if not options.resume and getattr(options, "reference_every", None) and not options.reference:
        raise UsageError("--reference-every needs --reference: add it, or leave --reference-every out")
    operation = operation or make_operation(getattr(options, "operation", None) or options.command)
    return run_session(options, make_session, make_measurement_request(operation, options))


class Session:
    """One run of a command: its device, kernels, plan and report. This class measures kernels of one operation, as
    ``mamf sweep`` does. Subclasses override what other commands do differently.

    - ``resumed_log``, ``resumed_plan``: the log to resume and its plan, or None for a new run.
    - ``roofs``: the highest rates that the device's ceilings allow. The report shows each rate as a share of them. None
      if the ceilings are unknown.
    - ``baseline_kernel``: the kernel that the report compares the other kernels with, or None.
    - ``measured_run``: the object that measures the plan and writes the log.
    """

    kind = SWEEP
    roofs: Roofs | None = None
    baseline_kernel: str | None = None

    def __init__(
        self,
        request: MeasurementRequest,
        options: argparse.Namespace,
        signal_handler: SignalHandler,
        resumed: ResumedLog | None,
    ) -> None:
        from mamf.engine.isolation import get_isolated_checker
        from mamf.engine.traits import replace_assumed_traits
        from mamf.kinds.driver import Run
        from mamf.logs.recording import apply_logged_traits
        from mamf.machine.environment import quote_command_line

        self.request, self.operation, self.command = request, request.operation, str(options.command)
        self.options, self.signal_handler = options, signal_handler
        self.resumed_log: RunLog | None = resumed and resumed.log
        self.resumed_plan = (
            require_plan_of_kind(self.resumed_log, self.kind, self.operation.name, self.command)
            if self.resumed_log
            else None
        )
        if self.resumed_log:
            self.backend = reopen_device(self.resumed_log, options)
        else:
            self.backend = open_backend(options.backend or "auto", options.device or 0)
        get_isolated_checker(self.backend).checks_all_kernels = options.isolate
        check_results: Sequence[CheckResult] = ()
        if self.resumed_log:
            apply_logged_traits(self.backend, self.resumed_log.header.get("traits", {}))
        elif not options.dry_run:
            check_results = replace_assumed_traits(self.backend, warn)
        if self.operation.uses_shared_links and getattr(options, "share", None):
            raise UsageError(
                f"--devices cannot measure {self.operation.name}: all devices share their links and would slow each "
                "other down; use --device with one index, or 'mamf node'"
            )
        self.kernels: Sequence[NamedKernel] = self.open_kernels()
        self.plan = self.make_plan()
        device_slug = re.sub(r"[^a-z0-9]+", "-", self.backend.info.name.lower()).strip("-")
        default_path = Path(
            f"mamf-{self.command}-{device_slug}-{self.make_log_name_part()}-{datetime.now():%Y%m%d-%H%M%S}.jsonl"
        )
        self.measured_run = Run(
            self.plan,
            self.backend,
            self.kernels,
            list(self.resumed_log.rows_kept_on_resume) if self.resumed_log else [],
            make_run_strategy=self.make_strategy,
            log_path=options.output or default_path,
            may_add_number_to_name=not options.output,  # another run may start in the same second
            resumed_log=resumed,
            command=quote_command_line(),
            notes=options.notes,
            check_results=check_results,
            skipped_checks=[SIBLING_CHECK] if getattr(options, "share", None) else [],
            shield_from_signals=signal_handler.shield_from_signals,
            check_signals=signal_handler.raise_if_interrupted,
            on_device_lost=partial(exit_if_watched, self.backend),
        )
        # If a signal has arrived, raise its exception again, because a library may have caught the exception during an
        # import.
        signal_handler.raise_if_interrupted()

    def make_plan(self) -> Plan:
        """Make the plan that the options describe, or take the plan of the resumed log. Raises LogMismatchError if the
        two plans differ.
        """
        logged_plan = self.resumed_plan
        if logged_plan is None:
            share = getattr(self.options, "share", None)
            return self.make_new_plan().make_plan_for_rank(*share) if share else self.make_new_plan()
        if has_plan_options(self.options):
            require_same_plan(self.options, logged_plan, self.make_plan_to_compare(logged_plan))
        # If the user gives no new budget, use the budget in the log for these kinds of runs. Ceilings of FIND and
        # ROOFLINE depend on the budget, and VERIFY ends only when the budget is used up.
        logged_budget_seconds = logged_plan.budget_seconds if logged_plan.kind in (FIND, ROOFLINE, VERIFY) else None
        return replace(
            logged_plan,
            kernels=tuple(name for name, _ in self.kernels),
            budget_seconds=compute_remaining_budget(self.options) or logged_budget_seconds,
        )

    # -- methods that subclasses override -----------------------------------------------------------------------------

    def open_kernels(self) -> Sequence[NamedKernel]:
        """Open the kernels that the run measures, and return each with the name by which the user requested it."""
        if self.resumed_plan is None:
            return choose_kernels(self.operation, self.backend, self.list_requested_kernels())
        if self.options.kernel:
            require_same_kernels(
                self.options,
                [make_kernel(self.operation, name).name for name in self.resumed_plan.kernels],
                [make_kernel(self.operation, name).name for name in self.options.kernel],
            )
        return choose_kernels(self.operation, self.backend, self.resumed_plan.kernels)

    def list_requested_kernels(self) -> Sequence[str] | None:
        """List the kernels of --kernel or, without this option, the available kernels of the preset. Return None if
        neither names kernels, which means all kernels.

        If only some kernels of the preset are available, print a warning for each that is not.
        """
        preset_kernels = self.request.preset.kernels
        if self.options.kernel or not preset_kernels:
            return self.options.kernel  # type: ignore[no-any-return]
        reasons = {
            name: make_kernel(self.operation, name).explain_unavailability(self.backend) for name in preset_kernels
        }
        available_kernels = [name for name, reason in reasons.items() if reason is None]
        for name, reason in reasons.items():
            if available_kernels and reason:
                warn(f"leaving out kernel {name}: {reason}")
        return available_kernels or preset_kernels

    def make_new_plan(self) -> Plan:
        """Make the plan that the options describe, without regard to a resumed log."""
        return make_plan(self.request, self.options, self.backend, [name for name, _ in self.kernels])

    def make_plan_to_compare(self, logged_plan: Plan) -> Plan:
        """Make the plan that the options describe, to compare it with the plan of the log. Copy fields that depend on
        measurements from ``logged_plan``.
        """
        return self.make_new_plan()

    def make_strategy(self, setup: RunSetup) -> Strategy:
        """Make the strategy that chooses what to measure next. ``measured_run`` calls this when the run begins."""
        from mamf.kinds.registry import get_kind

        return get_kind(self.plan).make_strategy(setup)

    def print_plan(self) -> None:
        """Print what the run would measure and how long that would take, for --dry-run."""
        print_plan(self.plan, self.kernels, self.measured_run.remaining_row_keys, self.backend)

    def make_log_name_part(self) -> str:
        """Return the part of the log's default file name that describes the plan, such as ``model-bfloat16-burst``."""
        return "-".join(
            [
                *(
                    [self.operation.name]
                    if self.command != self.operation.name and self.operation.compares_kernels
                    else []
                ),
                *dict.fromkeys(problem.dtype for problem in self.plan.problems),
                *self.plan.regimes,
            ]
        )

    def count_remaining_measurements(self) -> int | None:
        """Return how many rows remain to be measured, or None if the number is unknown until the run ends."""
        return None if self.kind in (FIND, VERIFY) else self.measured_run.kind.count_remaining_steps(self.measured_run)

    def is_run_complete(self) -> bool:
        """Return whether the resumed log has all rows, so that nothing remains to be measured."""
        return not self.count_remaining_measurements()

    def make_document(self, log: RunLog) -> Document:
        """Make the report of a log, ready to be printed in any format."""
        from mamf.kinds.kind import ReportOptions
        from mamf.kinds.registry import get_kind

        return get_kind(log.plan).make_document(log, ReportOptions(self.options.top, self.roofs, self.baseline_kernel))

    def choose_exit_code(self, run_exit_code: int) -> int:
        """Choose the exit code of the command. ``run_exit_code``: 0 if the run measured at least one row and printed
        its report, otherwise the exit code of the failure.
        """
        return run_exit_code

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Measure, print the report, and return the exit code of the command."""
        from mamf.logs.recording import describe_timer_shift
        from mamf.logs.run_log import read_run_log

        if self.options.dry_run:
            self.print_plan()
            return 0
        # If the resumed log is complete, only print the report. If a run was killed after its last row, its log has all
        # rows but no summary. In this case continue, so that the code below writes the summary.
        if self.resumed_log and self.resumed_log.tier == "complete" and self.is_run_complete():
            print_line(
                f"{self.resumed_log.path} is complete, so this run measures nothing; to measure again, use another "
                "file or folder",
                sys.stderr,
            )
            return self.choose_exit_code(self.print_report(self.resumed_log))
        exit_code, run = self._measure_rows(), self.measured_run
        with self.signal_handler.shield_from_signals():
            try:
                log = read_run_log(run.writer.path) if run.is_summary_written else run.build_log()
            except RunLogError as error:
                warn(str(error))
                exit_code, log = error.exit_code, run.build_log()
            for warning in (
                describe_timer_shift(run.summary, run.rows),
                format_sharing_warning(log.header["device"]["name"]),
            ):
                if warning:
                    warn(warning)
            report_exit_code = self.print_report(log)
        return self.choose_exit_code(exit_code or report_exit_code)

    def _measure_rows(self) -> int:
        """Measure rows until the run is finished or ends early. Return 0 if at least one row was measured, otherwise
        the exit code of the failure.
        """
        from mamf.cli.progress import ProgressBar
        from mamf.machine.environment import format_check_result, select_warnings

        run = self.measured_run
        run.report_phase = lambda text: progress.show_phase(text)
        run.report_step = lambda step, is_prepared: progress.show_step(step, is_prepared)
        rows = run.yield_measurements()
        if self.options.new_log_reason:
            print_line(f"{self.options.output} {self.options.new_log_reason}: starting a new run", sys.stderr)
        report_run_to_watcher(
            self.options, self.backend, run.writer, self.resumed_log.measurements if self.resumed_log else ()
        )
        for finding in select_warnings(run.findings):
            warn(format_check_result(finding))
        try:
            with ProgressBar(
                self.count_remaining_measurements(),
                logged_rows=filter(run.is_result, run.rows),
                shows_best_rows=self.kind != VERIFY,
                budget_seconds=self.plan.budget_seconds,
                is_steady=len(self.plan.regimes) == 1,
            ) as progress:
                try:
                    for row in rows:
                        if run.is_result(row):
                            progress.add_row(row)
                except KeyboardInterrupt as interrupt:
                    rows.throw(interrupt)  # let the run complete its log if the signal came between rows
        except KeyboardInterrupt:
            return INTERRUPTED_EXIT_CODE
        except MamfError as error:
            if not run.is_summary_written:
                warn(str(error))
            return error.exit_code
        return 0 if any(row.ok and run.is_result(row) for row in run.rows) else FAILURE_EXIT_CODE

    def print_report(self, log: RunLog) -> int:
        """Print the report that ``mamf show`` prints for this log. Return the exit code, which is 0 if the report was
        printed.
        """
        from mamf.report.document import add_logged_warnings

        exit_code = 0
        try:
            print_document(self.options, add_logged_warnings(self.make_document(log), log))
        except MamfError as error:  # a plugin's column failed or jinja2 is missing, but the log is complete
            warn(str(error))
            exit_code = error.exit_code
        if log.path.exists():
            print_line(f"log: {log.path}", choose_note_stream(self.options))
        return exit_code

    def record_failure(self, message: str) -> None:
        """Print a warning about a failure that does not end the run, and record the failure for the log's summary."""
        self.measured_run.failures.append(message)
        warn(message)


def print_plan(
    plan: Plan,
    kernels: Sequence[NamedKernel],
    remaining_row_keys: Sequence[RowKey],
    backend: Backend,
    remaining_searches: Sequence[Plan] = (),
) -> None:
    """Print the plan of a run for --dry-run: the device, the kernels, the number of rows and the time.

    - ``kernels``: the kernels of the plan, each with its name in the plan.
    - ``remaining_row_keys``, ``remaining_searches``: the rows and the searches for ceilings that are not in the log
      yet.
    """
    from mamf.engine.estimate import compute_max_sampling_seconds
    from mamf.report.document import format_count

    print_line(f"device: {backend.info.name} ({backend.name}:{backend.index})")
    print_line(f"kernels: {', '.join(plan.kernels)}")
    for name, kernel in kernels:
        # A kernel without a list of dtypes, such as that of 'mamf overlap', runs other kernels.
        if kernel.dtypes and (dtypes := {each.dtype for each in plan.problems}.difference(kernel.dtypes)):
            print_line(f"kernel {name} does not support {', '.join(sorted(dtypes))}, so these rows will have no result")
    print_line(
        f"shapes: {len(plan.shapes)}, {format_count(len(remaining_row_keys), 'row')} in {', '.join(plan.regimes)}"
    )
    for search in remaining_searches:
        print_line(
            f"ceilings: first the search for {search.operation}, {search.problem.dtype} "
            f"{' and '.join(search.regimes)}, at most {search.budget_seconds:.0f} s"
        )
    seconds = compute_max_sampling_seconds(plan, remaining_row_keys, backend) + sum(
        search.budget_seconds or 0.0 for search in remaining_searches
    )
    if plan.budget_seconds is not None and (plan.confirms_best_rows or seconds >= plan.budget_seconds):
        print_line(f"time: at most {plan.budget_seconds:.0f} s, which is the budget")
    else:
        preparing = "" if backend.is_accelerator else ", which on a CPU can take minutes for a large row"
        print_line(
            # Most rows of mamf guard need no repetition.
            f"time: {'at most' if plan.kind == GUARD else 'about'} {seconds:.1f} s for the timed launches, plus the "
            f"time to prepare and verify the rows{preparing}"
        )
