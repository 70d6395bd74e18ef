"""Implement the command ``mamf guard FILE.toml``: measure kernels, and exit with code 3 if one is slower than before.

The command is for the CI of a project that develops kernels. The TOML file names the kernels, their shapes, and the
baseline: a log of an earlier run. mamf compares the new rates with the rates in this log.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamf.cli.session import Session, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_run_options,
    add_shared_options,
    choose_note_stream,
    parse_duration,
    print_line,
    warn,
)
from mamf.cli.watching import FAILURE_EXIT_CODE, REGRESSION_EXIT_CODE
from mamf.errors import (
    IncomparableError,
    UsageError,
    parse_share,
    require_known_names,
    require_nonempty_list,
    require_whole_number,
)
from mamf.files import make_folder, write_file_atomically
from mamf.operation import MeasurementRequest
from mamf.plans import COMMON_REGIMES, GUARD, MAX_GUARD_ROUNDS, GuardOptions, Plan

if TYPE_CHECKING:
    from mamf.engine.runner import RunSetup
    from mamf.engine.strategies.studies import GuardStrategy
    from mamf.logs.judging import GuardResult
    from mamf.logs.run_log import RunLog
    from mamf.report.document import Document

EXAMPLES = """examples:
  mamf guard kernels.toml --update                      measure the baseline that the file names
  mamf guard kernels.toml                               exit code 3 if a kernel is slower, 0 if not
  mamf guard kernels.toml --strict                      exit code 3, not 1, if a row is undecided
  mamf guard kernels.toml --junit guard.xml --markdown guard.md
docs/guard.md describes the file and shows a CI workflow.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="TOML file that lists the kernels and names their baseline; docs/guard.md describes it",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="LOG",
        help="run log to compare this device's rows with (default: the baseline that FILE names)",
    )
    parser.add_argument(
        "--update", action="store_true", help="measure a new baseline, and replace the log of the old one"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit with code 3, not 1, if mamf cannot decide whether a row is slower",
    )
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="JUnit XML report to write, with one test per row (default: none)"
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="markdown report to write, for a pull request comment (default: none)",
    )
    add_device_options(parser)
    add_run_options(
        parser,
        budget_default="none; if time runs out, the exit code is 3 if a row is slower, otherwise 1",
    )
    add_shared_options(parser, "--format", "--top", "--wide")


def read_guard_file(path: Path) -> dict[str, Any]:
    """Read and check the TOML file of ``mamf guard``. Return its values as if they were command-line options, by the
    names under which argparse stores options.

    The result has the options of ``mamf sweep --operation`` that say what to measure, and these values:

    ``baseline``: path of the run log to compare with; None if the file names none. A relative path is resolved from
    the folder of the TOML file.
    ``tolerance``: the largest accepted slowdown, as a share of the baseline's rate.
    ``rounds``: the maximum number of measurements of a row. mamf measures a row again while the comparison with the
    baseline is undecided. For a new baseline, mamf measures every row this many times.
    ``compared_figure``: the figure to compare with the baseline, ``rate`` or ``cycles``. ``cycles`` is the FLOP per
    clock cycle that a kernel reaches, as a share of the device's theoretical maximum.

    Raises UsageError, with the path of the TOML file in the message, if the file cannot be read or is invalid.
    """
    from mamf.logs.judging import COMPARED_FIGURES, GuardFileKeys
    from mamf.logs.records import read_record

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values_by_key = tomllib.loads(path.read_text(encoding="utf-8"))
        require_known_names(*(("key", name, GuardFileKeys.__struct_fields__) for name in values_by_key))
        keys = read_record(values_by_key, GuardFileKeys)
        require_nonempty_list("shapes", keys.shapes, str)
        require_known_names(
            *(("regime", name, COMMON_REGIMES) for name in keys.regimes), ("by", keys.by, COMPARED_FIGURES)
        )
        fields = {
            name: [str(value) for value in (values if isinstance(values, list) else [values])]
            for name, values in keys.problem.items()
        }
        return {
            "baseline": path.parent / keys.baseline if keys.baseline else None,
            "tolerance": parse_share(str(keys.tolerance)),
            "rounds": require_whole_number("rounds", keys.rounds, 3, MAX_GUARD_ROUNDS),
            "compared_figure": keys.by,
            "operation": keys.operation,
            "kernel": keys.kernels,
            "shapes": keys.shapes,
            "dtype": fields.pop("dtype", None),
            "set": [f"{name}={','.join(values)}" for name, values in fields.items()] or None,
            "regime": keys.regimes,
            "precision": None if keys.precision is None else parse_share(str(keys.precision)),
            "seconds": None if keys.time_limit is None else parse_duration(str(keys.time_limit)),
            "flush": None if keys.flush else False,
        }
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"the values in {path} are nested too deeply: write only the keys in docs/guard.md") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a valid guard file: {error}") from None


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.cli.reading import read_log

    given_baseline = options.baseline
    vars(options).update(read_guard_file(options.file))
    options.given_names.add("problem")  # otherwise --resume would not compare the log with the guard file
    options.baseline = baseline_path = given_baseline or options.baseline
    if baseline_path is None:
        raise UsageError(f"{options.file} names no baseline: add the key baseline to it, or give --baseline LOG")
    if options.update and (options.junit or options.markdown):
        raise UsageError(
            "--update cannot be combined with --junit or --markdown, because --update makes no comparison to report"
        )
    if options.update:
        make_folder(baseline_path.parent)
    for path in filter(None, (options.junit, options.markdown)):
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    # Read the baseline before mamf opens a device, so that mamf reports an unreadable baseline at once.
    if not options.update and not baseline_path.exists():
        raise UsageError(
            f"there is no baseline {baseline_path}: measure one with 'mamf guard {options.file} --update', while "
            "nothing else uses the device"
        )
    options.baseline_log = None if options.update else read_log(baseline_path)
    return run_kernel_session(options, _GuardSession)


class _GuardSession(Session):
    """A run of ``mamf guard``: it compares kernels of one operation with a baseline, or measures a new baseline.

    ``baseline_log``: the run log to compare with, or None if mamf measures a new baseline.
    ``guard_result``: the result of the comparison, or None before the comparison.
    ``update_exit_code``: the exit code with --update. It is not 0 if mamf refused to write the new baseline.
    """

    kind = GUARD

    def __init__(self, request: MeasurementRequest, options: argparse.Namespace, *session_arguments: Any) -> None:
        self.baseline_log: RunLog | None = options.baseline_log
        self.guard_result: GuardResult | None = None
        self.update_exit_code = 0
        super().__init__(request, options, *session_arguments)
        if self.baseline_log:
            self._require_comparable_baseline(self.baseline_log)

    def make_new_plan(self) -> Plan:
        return replace(super().make_new_plan(), kind=GUARD, options=GuardOptions(self.options.rounds))

    def make_strategy(self, setup: RunSetup) -> GuardStrategy:
        from mamf.engine.strategies.studies import GuardStrategy
        from mamf.logs.judging import list_guarded_rows

        log, figure = self.baseline_log, self.options.compared_figure
        baseline = None if log is None else {entry.pairing_key: entry for entry in list_guarded_rows(log, figure)}
        return GuardStrategy(setup, baseline, self.options.tolerance)

    def _require_comparable_baseline(self, baseline: RunLog) -> None:
        """Raise IncomparableError if ``baseline`` is from another card, or if this run measures none of its rows."""
        from mamf.logs.compare import find_blocking_differences
        from mamf.logs.compared_rows import make_pairing_fields
        from mamf.logs.judging import COMPARE_CYCLES, list_guarded_rows

        header = self.resumed_log.header if self.resumed_log else self.measured_run.build_header()
        differences = find_blocking_differences(baseline.header, header)
        if self.options.compared_figure == COMPARE_CYCLES:
            differences = [difference for difference in differences if not difference.is_card_difference]
        if differences:
            raise IncomparableError(
                f"{baseline.path} is not comparable with this run: {', '.join(map(str, differences))}; measure a new "
                "baseline with --update"
            )
        kernel_names = {name: kernel.name for name, kernel in self.kernels}
        planned_fields = [
            make_pairing_fields(key._replace(kernel=kernel_names[key.kernel])) for key in self.plan.list_row_keys()
        ]
        if not any(
            entry.pairing_fields in planned_fields
            for entry in list_guarded_rows(baseline, self.options.compared_figure)
            if entry.rate is not None
        ):
            raise IncomparableError(
                f"{baseline.path} has none of the rows that {self.options.file} lists: measure a new baseline with "
                "--update"
            )

    def choose_exit_code(self, run_exit_code: int) -> int:
        if self.options.update or run_exit_code not in (0, FAILURE_EXIT_CODE):
            return run_exit_code or self.update_exit_code
        if self.guard_result is None:
            return FAILURE_EXIT_CODE
        has_failed = self.guard_result.has_failed or (
            self.options.strict and self.guard_result.count_outcomes()["undecided"]
        )
        return REGRESSION_EXIT_CODE if has_failed else 0 if self.guard_result.is_finished else FAILURE_EXIT_CODE

    def make_document(self, log: RunLog) -> Document:
        from mamf.report.comparison import make_guard_document

        return (
            super().make_document(log)
            if self.guard_result is None
            else make_guard_document(self.guard_result, self.options.top)
        )

    def print_report(self, log: RunLog) -> int:
        from mamf.logs.judging import judge_guard_log
        from mamf.report.comparison import describe_guard_verdict, format_junit_xml
        from mamf.report.formats import TERMINAL_FORMATS, format_markdown

        if self.baseline_log:
            self.guard_result = judge_guard_log(
                self.baseline_log, log, self.options.tolerance, self.options.compared_figure
            )
            seconds = float(log.summary["elapsed_seconds"]) if log.summary else 0.0
            if self.options.junit:
                write_file_atomically(
                    self.options.junit, format_junit_xml(self.guard_result, f"mamf.{self.operation.name}", seconds)
                )
            if self.options.markdown:
                write_file_atomically(self.options.markdown, format_markdown(self.make_document(log)))
        exit_code = super().print_report(log)
        if self.guard_result and self.options.format not in TERMINAL_FORMATS:
            print_line(describe_guard_verdict(self.guard_result), sys.stderr)
        if self.options.update:
            self._write_baseline(log)
        return exit_code

    def _write_baseline(self, log: RunLog) -> None:
        from mamf.logs.judging import list_half_widths_and_rows
        from mamf.machine.environment import was_cpu_device_busy
        from mamf.report.comparison import describe_compared_row, format_as_percent
        from mamf.report.document import format_count

        baseline, pairs = self.options.baseline, list_half_widths_and_rows(log)
        is_cpu_busy = was_cpu_device_busy(log.header)
        if log.tier != "complete" or is_cpu_busy or not pairs:
            self._refuse_baseline(
                f"the run is not complete: continue it with --update --resume {log.path}"
                if log.tier != "complete"
                else "other work used the CPU: repeat the command while nothing else runs on the machine"
                if is_cpu_busy
                else "no row has a rate"
            )
            return
        widest, row = pairs[0]
        noisy_count = sum(half_width > self.options.tolerance for half_width, _ in pairs)
        if math.isinf(widest):
            self._refuse_baseline(
                f"the rounds of {describe_compared_row(row)} differ so much that the interval of their combined rate "
                "is unknown; measure while nothing else runs on the machine"
            )
        elif noisy_count:
            self._refuse_baseline(
                f"{noisy_count} of {len(self.plan.list_row_keys())} rows vary by more than the tolerance of "
                f"{format_as_percent(self.options.tolerance)}, most of all {describe_compared_row(row)} "
                f"(+-{format_as_percent(round(widest, 4))} for all rounds together); "
                "measure while nothing else runs on the machine, or raise the tolerance and repeat the command "
                f"with --resume {log.path}"
            )
        else:
            write_file_atomically(baseline, log.path.read_bytes())
            print_line(
                f"baseline: {baseline} has {format_count(len(pairs), 'row')}: each rate combines up to "
                f"{self.options.rounds} rounds (the table shows the median one), and the widest interval is "
                f"+-{format_as_percent(round(widest, 4))}",
                choose_note_stream(self.options),
            )

    def _refuse_baseline(self, reason: str) -> None:
        self.update_exit_code = FAILURE_EXIT_CODE
        warn(f"no baseline was written: {reason}")
