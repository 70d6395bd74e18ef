"""Resume a run with the plan of its log.

``--resume LOG`` without other options uses the plan of the log. If other options describe a plan too, the two plans
must be equal. The budget, the notes, the devices and the options of the report may differ, because they do not affect
the measured figures.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mamf.backend import Backend
from mamf.cli import watching
from mamf.cli.terminal import warn
from mamf.cli.watching import INTERRUPTED_EXIT_CODE, SignalHandler
from mamf.errors import LogMismatchError, UsageError
from mamf.measurement import Measurement
from mamf.plans import Plan
from mamf.plugins.discovery import is_class_path, open_backend

if TYPE_CHECKING:
    from mamf.kinds.driver import ResumedLog
    from mamf.logs.run_log import RunLog
    from mamf.logs.writer import RunLogWriter

#: Options that this module does not compare with the resumed log, because other code does. This module does not compare
#: the options in the four sets below either, because they do not change the plan.
_OPTIONS_COMPARED_ELSEWHERE = {
    "backend",
    "ceiling",
    "ceiling_kernel",
    "device",
    "devices",
    "kernel",
    "no_ceiling",
    "operation",
}
_OUTPUT_OPTIONS = {"export", "export_file", "junit", "log", "markdown", "notes", "output", "overwrite", "picture"}
_PRINT_OPTIONS = {"baseline", "bytes", "flop", "format", "strict", "top", "wide"}
_RUN_OPTIONS = {"anyway", "budget", "command", "dry_run", "file", "launches", "led", "ncu", "parser", "patience"}
_RESUME_OPTIONS = {"requeue", "resume", "rows", "share", "update"}
_NOT_PLAN_OPTIONS = _OPTIONS_COMPARED_ELSEWHERE | _OUTPUT_OPTIONS | _PRINT_OPTIONS | _RUN_OPTIONS | _RESUME_OPTIONS
#: The names of the options that set fields of a plan, for fields whose option has a different name.
_OPTION_BY_FIELD = {
    "is_quick": "quick",
    "regimes": "regime",
    "seconds": "time-limit",
    "warmup_launches": "num-warmup-iterations",
    "timed_launches": "num-iterations",
}
#: Fields of a plan that this module does not compare with the options. Some of them may differ in a resumed run, some
#: depend on other fields, and other code compares the rest.
_FIELDS_NOT_COMPARED = {
    "kind",
    "operation",
    "problems",
    "kernels",
    "budget_seconds",
    "flush",
    "searches",
    "layers",
    "options",
}
_MAX_SHOWN_VALUES = 5
_MIN_REMAINING_BUDGET_SECONDS = 1e-9
_COUNTERS_COMMAND = "counters"


def measure_with_signal_handler(
    options: argparse.Namespace, measure: Callable[[SignalHandler, ResumedLog | None], int]
) -> int:
    """Call ``measure`` while the log of ``--resume`` is locked, and return its exit code.

    ``measure`` gets the handler of signals and the resumed log, or None for a new run. If Ctrl-C arrives before the
    first measurement, print one line instead of a traceback. Raises UsageError if another process writes the log.
    """
    from mamf.kinds.driver import ResumedLog
    from mamf.logs.writer import RunLogWriter

    if options.resume and options.output and not options.crashed_run:
        raise UsageError(
            "--resume cannot be combined with --output, because --resume appends to the log that it continues"
        )
    with SignalHandler() as signal_handler:
        try:
            if options.resume is None:
                return measure(signal_handler, None)
            log, writer = RunLogWriter.resume(options.resume)
            with writer:
                try:
                    return measure(signal_handler, ResumedLog(log, writer))
                finally:
                    if writer.is_open:  # append nothing, but let the writer warn if the log was deleted
                        writer.append_line()
        except KeyboardInterrupt:
            warn("the run was interrupted before the first measurement; no row is lost")
            return INTERRUPTED_EXIT_CODE


def compute_remaining_budget(options: argparse.Namespace) -> float | None:
    """Return --budget in seconds, minus the seconds that crashed processes of this run have used. Return None without
    a budget.
    """
    spent_seconds = options.crashed_run.spent_seconds if options.crashed_run else 0.0
    return options.budget and max(options.budget - spent_seconds, _MIN_REMAINING_BUDGET_SECONDS)  # type: ignore[no-any-return]


def report_run_to_watcher(
    options: argparse.Namespace, backend: Backend, writer: RunLogWriter, logged_rows: Iterable[Measurement]
) -> None:
    """Tell the watching process where the log is. Before each launch, also tell it which row to append to the log if
    the launch crashes this process.

    ``logged_rows``: the rows that the log already has. If an earlier process crashed while it measured one of them,
    mamf does not launch this row again.
    """
    from mamf.engine.runner import get_crash_record

    crash_state, crashes = watching.CRASH_STATE, get_crash_record(backend)
    crashes.fatal_rows = [row for row in logged_rows if row.is_fatal]
    if crash_state:
        log_opened_at = time.monotonic() - (options.crashed_run.spent_seconds if options.crashed_run else 0.0)
        # Pass the path with each row, because the run switches to a new log if another program changes this one.
        crashes.set_pending_row = lambda row: crash_state.store_state(
            writer.path, log_opened_at, options.finished_exit_codes, *_make_log_line_and_label(row) if row else ()
        )
        crashes.set_pending_row(None)


def exit_if_watched(backend: Backend, row: Measurement) -> None:
    """If another process watches this one, end this process. The watching process then logs ``row`` and starts a new
    process for the remaining rows. Call this function after the device was lost during the measurement of ``row``.
    """
    from mamf.engine.runner import get_crash_record

    if watching.CRASH_STATE:
        get_crash_record(backend).set_pending_row(row)
        os._exit(1)


def _make_log_line_and_label(row: Measurement) -> tuple[str, str]:
    from mamf.logs.records import make_measurement_record
    from mamf.logs.writer import encode_record

    return encode_record("measurement", make_measurement_record(row)).decode().rstrip(), f"{row.kernel} at {row.shape}"


def require_plan_of_kind(log: RunLog, kind: str, operation: str, command: str) -> Plan:
    """Return the plan of the log to resume. Raises LogMismatchError, which names the right command, if another command
    wrote the log.

    ``kind``, ``operation``: the kind of run and the operation that the plan must have.
    """
    from mamf.kinds.registry import get_kind, make_run_title

    plan, has_counters = log.plan, bool(log.counter_records)
    if (plan.kind, plan.operation) == (kind, operation) and (command == _COUNTERS_COMMAND or not has_counters):
        return plan
    advice = (
        f"resume it with 'mamf {get_resume_command(log)} --resume {shlex.quote(str(log.path))}'"
        if get_kind(plan).left_noun
        else f"mamf cannot resume this old log; repeat the run with 'mamf {plan.kind}'"
    )
    raise LogMismatchError(f"{log.path} is the log of {make_run_title(plan)}: {advice}")


def get_resume_command(log: RunLog) -> str:
    """Return the command, such as ``sweep``, that resumes a log."""
    from mamf.kinds.registry import get_kind

    if log.counter_records:
        return _COUNTERS_COMMAND
    return " ".join(map(shlex.quote, get_kind(log.plan).format_command(log.plan).split()))


def has_plan_options(options: argparse.Namespace) -> bool:
    """Return whether the command line has an option that describes a plan. Such options must agree with the resumed
    log.
    """
    return bool(options.given_names - _NOT_PLAN_OPTIONS)


def require_same_plan(options: argparse.Namespace, logged_plan: Plan, requested_plan: Plan) -> None:
    """Raise LogMismatchError if an option has different values in two plans. If several options differ, name one that
    the user typed, if there is one. Ignore the order of the values of an option.
    """
    if logged_plan.is_shared:
        requested_plan = requested_plan.make_plan_for_rank(logged_plan.options.rank, logged_plan.options.ranks)
    logged_values, requested_values = map(_collect_option_values, (logged_plan, requested_plan))
    # Only options that are not compared by themselves, such as --m or --preset, can change the shapes.
    compared_names = {prefix + name.replace("-", "_") for name in logged_values for prefix in ("", "field_")}
    may_set_shapes = bool(options.given_names - (compared_names - {"shapes"}) - _NOT_PLAN_OPTIONS)
    for name in sorted(logged_values, key=lambda each: not _may_have_been_typed(options, each)):
        if logged_values[name] != requested_values[name] and (name != "shapes" or may_set_shapes):
            raise make_contradiction_error(
                options, name, logged_values[name], requested_values[name], _may_have_been_typed(options, name)
            )


def _may_have_been_typed(options: argparse.Namespace, option: str) -> bool:
    """Return whether the user may have typed an option. Return True for shapes, because several options set them."""
    names = {prefix + option.replace("-", "_") for prefix in ("", "field_")} & vars(options).keys()
    return option == "shapes" or not names or bool(names & options.given_names)


def _collect_option_values(plan: Plan) -> dict[str, object]:
    """Return the values of a plan that the command line can set, by the name of the option."""
    from mamf.operations.unknown import get_operation

    values_by_option: dict[str, object] = {}
    for name in sorted(vars(plan).keys() - _FIELDS_NOT_COMPARED):
        value = getattr(plan, name)
        values_by_option[_OPTION_BY_FIELD.get(name, name)] = frozenset(value) if isinstance(value, tuple) else value
    records = [get_operation(plan.operation).make_problem_record(problem) for problem in plan.problems]
    for name in records[0]:
        values = {tuple(each[name]) if isinstance(each[name], list) else each[name] for each in records}
        values_by_option[name] = frozenset(values) if len(values) > 1 else values.pop()
    kind_options = vars(plan.options).items() if plan.options else ()
    return {
        **values_by_option,
        "no-flush": not plan.flush,
        **{_OPTION_BY_FIELD.get(name, name): each for name, each in kind_options},
    }


def make_contradiction_error(
    options: argparse.Namespace, option: str, logged_value: object, requested_value: object, is_typed: bool = True
) -> LogMismatchError:
    """Make the error for an option whose requested value differs from the value in the log of --resume. ``is_typed``:
    whether the user typed the option.
    """
    value = "" if requested_value is None or requested_value is True else f" {format_option_value(requested_value)}"
    typed_text = f"{'no ' if requested_value is None else ''}{format_option_name(option)}{value}"
    logged_text = format_option_value(logged_value)
    if not is_typed:
        typed_text, logged_text = "this command", f"{format_option_name(option)} {logged_text}"
    return LogMismatchError(
        f"{typed_text} contradicts {options.resume}, which was measured with {logged_text}: "
        "repeat the options of that run, give only --resume, or start a new log"
    )


def format_option_name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def format_option_value(value: object) -> str:
    """Format the value of an option as a user would type it. Shorten a long list."""
    if value is None:
        return "the default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return format_option_value(
            sorted(value, key=lambda each: (len(format_option_value(each)), format_option_value(each)))
        )
    if not isinstance(value, (list, tuple)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    texts = [format_option_value(each) for each in value]
    if len(texts) > _MAX_SHOWN_VALUES:
        texts[_MAX_SHOWN_VALUES - 2 : -1] = ["..."]
    return " ".join(texts)


def require_same_kernels(
    options: argparse.Namespace, logged_names: Sequence[str], requested_names: Iterable[str]
) -> None:
    """Raise LogMismatchError if the requested kernels differ from the kernels of the log. Their order is ignored."""
    logged_kernels, requested_kernels = frozenset(logged_names), frozenset(requested_names)
    if logged_kernels != requested_kernels:
        raise make_contradiction_error(options, "kernel", logged_kernels, requested_kernels)


def reopen_device(log: RunLog, options: argparse.Namespace) -> Backend:
    """Open the device that a log was measured on. Raises LogMismatchError if the options name another device, or if the
    device has changed.
    """
    from mamf.logs.compare import require_logged_device

    require_trusted_names(log, options)
    if log.devices:
        raise LogMismatchError(
            f"{log.path} has rows of several devices, which this version cannot resume: start a new run"
        )
    logged_device = log.get_device(None)
    backend = open_backend(
        options.backend or logged_device.backend, logged_device.index if options.device is None else options.device
    )
    # Identify the card by its UUID, because its index may have changed since the log was written.
    is_same_card = logged_device.uuid_hash is not None and backend.info.uuid_hash == logged_device.uuid_hash
    if backend.info.backend != logged_device.backend:
        raise make_contradiction_error(options, "backend", logged_device.backend, backend.info.backend)
    if not is_same_card and options.device not in (None, logged_device.index):
        raise make_contradiction_error(options, "device", logged_device.index, options.device)
    require_logged_device(log, logged_device, backend.info)
    return backend


def require_trusted_names(log: RunLog, options: argparse.Namespace) -> None:
    """Raise LogMismatchError if the log names a ``package.module:Class`` that the command line does not name.

    mamf never imports a class just because a log names this class, because a stranger may have written the log.
    """
    plan = log.plan
    names_by_option: Mapping[str, Sequence[str]] = {
        "backend": (log.header["device"]["backend"],),
        "kernel": plan.kernels,
    }
    for option, names in names_by_option.items():
        option_value = getattr(options, option)
        trusted = [option_value] if isinstance(option_value, str) else option_value or ()
        if untrusted_names := [name for name in names if is_class_path(name) and name not in trusted]:
            raise LogMismatchError(
                f"{log.path} uses {option} {' '.join(untrusted_names)}, which is not an installed plugin: if you trust "
                f"its code, add {format_option_name(option)} {' '.join(names)}"
            )
    for search in plan.searches:
        for name in filter(is_class_path, search.kernels):
            raise LogMismatchError(
                f"a search in {log.path} used kernel {name}, which is not installed: install its package, or "
                "start a new log"
            )
