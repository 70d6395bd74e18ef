"""Implement the command ``mamf guard FILE.toml``: measure kernels, and exit with code 3 if one is slower than before.

The command is for the CI of a project that develops kernels. The TOML file names the kernels, their shapes, and the
baseline: a log of an earlier run, with which mamf compares the rates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mamf.cli.session import NOTHING_MEASURED_EXIT_CODE, Session, run_kernel_session
from mamf.cli.terminal import (
    add_device_options,
    add_output_options,
    add_run_options,
    choose_note_stream,
    is_report_for_people,
    parse_duration,
    print_line,
    warn,
)
from mamf.engine.runner import Setup
from mamf.engine.strategies.studies import GuardStrategy
from mamf.errors import IncomparableError, UsageError, parse_share, require_known, require_values, require_whole_number
from mamf.files import write_file_atomically
from mamf.logs.judging import (
    COMPARE_CYCLES,
    COMPARED_FIGURES,
    GuardKeys,
    GuardResult,
    find_noisy_rows,
    judge_guard,
    list_guarded_rows,
)
from mamf.logs.run_log import RunLog
from mamf.operation import Request
from mamf.plans import COMMON_REGIMES, GUARD, MAX_GUARD_ROUNDS, GuardOptions, Plan
from mamf.report.comparison import describe_guard_verdict, format_junit_xml, format_share, make_guard_document
from mamf.report.document import Document

EXAMPLES = """examples:
  mamf guard kernels.toml --update                      measure the baseline of the file
  mamf guard kernels.toml                               exit code 3 if a kernel is slower, 0 if not
  mamf guard kernels.toml --strict                      exit code 3, not 1, if a row is undecided
  mamf guard kernels.toml --junit guard.xml --markdown guard.md
docs/guard.md describes the file and has a workflow.
"""
_REGRESSION_EXIT_CODE = 3
_MAX_GUARD_FILE_BYTES = 1 << 20


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
        help="run log with this device's baseline (default: the one that FILE names)",
    )
    parser.add_argument("--update", action="store_true", help="measure a new baseline and replace the old one")
    parser.add_argument(
        "--strict", action="store_true", help="exit with code 3 instead of 1 if it is undecided whether a row is slower"
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
    add_run_options(parser, budget_default="none; an unfinished run exits with 1, or with 3 if a row is slower")
    add_output_options(parser)


class GuardFile(NamedTuple):
    """The checked content of a guard file, the TOML file that ``mamf guard`` takes.

    ``baseline_path``: path of the run log to compare with.
    ``tolerance``: the slowdown against the baseline that is still accepted, as a share of the baseline's rate.
    ``round_count``: how often mamf at most repeats the measurement of a row whose result is in doubt; for a new
    baseline, how often it repeats every row.
    ``compared_figure``: what mamf compares with the baseline: ``rate``, or ``cycles`` for the share of cycles used.
    ``sweep_options``: values of the options of ``mamf sweep --operation`` that measure the rows of the guard file.
    """

    baseline_path: Path
    tolerance: float
    round_count: int
    compared_figure: str
    sweep_options: Mapping[str, Any]


def read_guard_file(path: Path) -> GuardFile:
    """Read and check the guard file at ``path``. If its path of the baseline is relative, resolve it from the file's
    folder.

    Raises UsageError, with the path of the guard file in the message, if the file cannot be read or is invalid.
    """
    from mamf.logs.records import read_record

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_GUARD_FILE_BYTES + 1)
        if len(content) > _MAX_GUARD_FILE_BYTES:
            raise ValueError(f"it is larger than {_MAX_GUARD_FILE_BYTES >> 10} KiB")
        values_by_key = tomllib.loads(content.decode())
        require_known(*(("key", name, GuardKeys.__struct_fields__) for name in values_by_key))
        guard_keys = read_record(values_by_key, GuardKeys)
        require_values("shapes", guard_keys.shapes, str)
        require_known(
            *(("regime", name, COMMON_REGIMES) for name in guard_keys.regimes), ("by", guard_keys.by, COMPARED_FIGURES)
        )
        tolerance = parse_share(str(guard_keys.tolerance))
        rounds = require_whole_number("rounds", guard_keys.rounds, 3, MAX_GUARD_ROUNDS)
        options = _make_sweep_options(guard_keys)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{path}: its values are nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return GuardFile(path.parent / guard_keys.baseline, tolerance, rounds, guard_keys.by, options)


def _make_sweep_options(guard_keys: GuardKeys) -> dict[str, Any]:
    fields = {
        name: [str(value) for value in (values if isinstance(values, list) else [values])]
        for name, values in guard_keys.problem.items()
    }
    return {
        "operation": guard_keys.operation,
        "kernel": guard_keys.kernels,
        "shapes": guard_keys.shapes,
        "dtype": fields.pop("dtype", None),
        "set": [f"{name}={','.join(values)}" for name, values in fields.items()] or None,
        "regime": guard_keys.regimes,
        "precision": None if guard_keys.precision is None else parse_share(str(guard_keys.precision)),
        "seconds": None if guard_keys.time_limit is None else parse_duration(str(guard_keys.time_limit)),
        "flush": None if guard_keys.flush else False,
    }


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.cli.reading import read_log

    options.guard_file = file = read_guard_file(options.file)
    vars(options).update(file.sweep_options)
    options.given.add("problem")  # Make --resume check that the log fits the guard file.
    options.baseline = options.baseline or file.baseline_path
    if options.update and (options.junit or options.markdown):
        raise UsageError("--update cannot be combined with --junit or --markdown, because it compares nothing")
    for path in filter(None, (options.junit, options.markdown)):
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    # Read the baseline before mamf opens a device, so that mamf reports an unreadable baseline at once.
    path = options.baseline
    if not options.update and not path.exists():
        raise UsageError(f"there is no baseline {path}: measure one with 'mamf guard FILE --update', on a quiet device")
    options.baseline_log = None if options.update else read_log(path)
    return run_kernel_session(options, _GuardSession)


class _GuardSession(Session):
    """A run of ``mamf guard``: it compares kernels of one operation with a baseline, or measures a new baseline.

    ``baseline_log``: the run log to compare with, or None if mamf measures a new baseline.
    ``result``: the outcome of the comparison, or None until mamf has compared.
    ``update_exit_code``: not 0 if mamf refused to write the new baseline.
    """

    kind = GUARD

    def __init__(self, request: Request, options: argparse.Namespace, *interruption_and_log: Any) -> None:
        self.guard_file: GuardFile = options.guard_file
        self.baseline_log: RunLog | None = options.baseline_log
        self.result: GuardResult | None = None
        self.update_exit_code = 0
        super().__init__(request, options, *interruption_and_log)
        if self.baseline_log:
            self._require_comparable_baseline(self.baseline_log)

    def make_new_plan(self) -> Plan:
        return replace(super().make_new_plan(), kind=GUARD, options=GuardOptions(self.guard_file.round_count))

    def make_strategy(self, setup: Setup) -> GuardStrategy:
        baseline_rows = (
            [] if self.baseline_log is None else list_guarded_rows(self.baseline_log, self.guard_file.compared_figure)
        )
        baseline = None if self.baseline_log is None else {entry.key: entry for entry in baseline_rows}
        return GuardStrategy(setup, baseline, self.guard_file.tolerance)

    def _require_comparable_baseline(self, baseline: RunLog) -> None:
        """Raise IncomparableError if ``baseline`` is from another card or has no row that this run measures too."""
        from mamf.logs.compare import find_blocking_differences
        from mamf.logs.compared_rows import make_pairing_fields

        header = self.resumed_log.header if self.resumed_log else self.measured_run.build_header()
        obstacles = find_blocking_differences(baseline.header, header)
        if self.guard_file.compared_figure == COMPARE_CYCLES:
            obstacles = [each for each in obstacles if not each.is_of_card]
        if obstacles:
            raise IncomparableError(
                f"{baseline.path} is not comparable: {', '.join(map(str, obstacles))}; measure a baseline with --update"
            )
        kernel_names = {name: each.name for name, each in self.kernels}
        wanted_fields = [
            make_pairing_fields(step._replace(kernel=kernel_names[step.kernel])) for step in self.plan.steps()
        ]
        if not any(
            entry.fields in wanted_fields
            for entry in list_guarded_rows(baseline, self.guard_file.compared_figure)
            if entry.tflops is not None
        ):
            raise IncomparableError(f"{baseline.path} has none of these rows: measure a baseline with --update")

    def choose_exit_code(self, code: int) -> int:
        if self.options.update or code not in (0, NOTHING_MEASURED_EXIT_CODE):
            return code or self.update_exit_code
        if self.result is None:
            return NOTHING_MEASURED_EXIT_CODE
        is_failed = self.result.has_failed or (self.options.strict and self.result.count_outcomes()["undecided"])
        return _REGRESSION_EXIT_CODE if is_failed else 0 if self.result.is_finished else NOTHING_MEASURED_EXIT_CODE

    def make_document(self, log: RunLog) -> Document:
        return super().make_document(log) if self.result is None else make_guard_document(self.result)

    def print_report(self, log: RunLog) -> int:
        if self.baseline_log:
            self.result = judge_guard(
                self.baseline_log, log, self.guard_file.tolerance, self.guard_file.compared_figure
            )
            self._write_junit_and_markdown(self.result, log.summary)
        code = super().print_report(log)
        if self.result and not is_report_for_people(self.options):
            print_line(describe_guard_verdict(self.result), sys.stderr)
        if self.options.update:
            self._write_baseline(log)
        return code

    def _write_junit_and_markdown(self, result: GuardResult, summary: dict[str, Any] | None) -> None:
        from mamf.report.formats import format_markdown

        seconds = float(summary["elapsed_seconds"]) if summary else 0.0
        if self.options.junit:
            write_file_atomically(self.options.junit, format_junit_xml(result, f"mamf.{self.operation.name}", seconds))
        if self.options.markdown:
            write_file_atomically(self.options.markdown, format_markdown(make_guard_document(result)))

    def _write_baseline(self, log: RunLog) -> None:
        baseline = self.options.baseline
        if log.tier != "complete":
            warn(f"the run is not complete, so no baseline was written: continue it with --update --resume {log.path}")
        elif noisy_rows := find_noisy_rows(log, self.guard_file.tolerance):
            self.update_exit_code, (half_width, row) = NOTHING_MEASURED_EXIT_CODE, noisy_rows[0]
            warn(
                f"no baseline was written: {len(noisy_rows)} of {len(self.plan.steps())} rows vary by more than the "
                f"tolerance of {format_share(self.guard_file.tolerance)}, above all {row.kernel} {row.shape} "
                f"(+-{format_share(round(half_width, 4))}); measure on a quiet machine, or raise tolerance"
            )
        else:
            write_file_atomically(baseline, log.path.read_bytes())
            print_line(f"baseline: {baseline}", choose_note_stream(self.options))
