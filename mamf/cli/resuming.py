"""What a resumed run may be asked for: the plan of its log, once more. Anything else begins a new log.

Without options of a plan, ``--resume LOG`` takes the plan of the log. With any, the plan that they make is compared
with it. Free are the budget, the notes, the devices and how a run is shown: these decide no figure.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mamf.backend import Backend
from mamf.errors import LogMismatchError, UsageError
from mamf.kinds.registry import kind_of
from mamf.logs.known import operation_called
from mamf.logs.run_log import RunLog
from mamf.logs.same_device import require_same_device
from mamf.logs.writer import RunLogWriter
from mamf.plans import Plan
from mamf.plugins.discovery import backend_class, is_path, open_backend

#: Options that decide no step of a plan, or are compared with the log where they are used.
_FREE = {
    *(
        "anyway",
        "backend",
        "baseline",
        "budget",
        "ceiling",
        "ceiling_kernel",
        "columns",
        "command",
        "device",
        "devices",
        "dry_run",
    ),
    *("export", "export_file", "file", "format", "junit", "kernel", "led", "log", "markdown", "ncu", "no_ceiling"),
    *("notes", "operation", "output", "overwrite", "parser", "patience", "picture", "report", "resume", "rows", "run"),
    *("session", "strict", "top", "update", "wide"),
}
#: Options by the field of a plan that they are named unlike.
_OPTIONS = {"regimes": "regime", "seconds": "time-limit", "flush": "no-flush"}
#: Fields that are free, that follow from others, or that are compared in a way of their own.
_NOT_COMPARED = {"kind", "operation", "problems", "kernels", "budget_seconds", "searches", "layers", "options"}
_MOST_VALUES = 5
_COUNTERS = "counters"


class Resumed(NamedTuple):
    """A log that is gone on with, locked since before it was read."""

    log: RunLog
    writer: RunLogWriter


@contextmanager
def resumed(options: argparse.Namespace) -> Iterator[Resumed | None]:
    """The log of ``--resume``, locked as long as the run takes; a log that is missing is begun, so that one command
    line can be queued again and again. Raises UsageError where another process writes it.
    """
    if options.resume and options.output:
        raise UsageError("--resume continues its own file: leave --output out")
    if options.resume and not options.resume.exists():
        options.output, options.resume, options.begins = options.resume, None, True
    if options.resume is None:
        yield None
        return
    log, writer = RunLogWriter.resume(options.resume)
    with writer:
        yield Resumed(log, writer)


def require_kind(log: RunLog, kind: str, operation: str, command: str) -> Plan:
    """The plan of a log that a command resumes. Raises LogMismatchError for another's log, naming that command."""
    plan, is_counted = log.plan, bool(log.counter_records)
    if (plan.kind, plan.operation) == (kind, operation) and (command == _COUNTERS or not is_counted):
        return plan
    resumption = f"mamf {command_of(log)} --resume {shlex.quote(str(log.path))}"
    run = f"{kind_of(plan).noun} of {plan.operation}"
    raise LogMismatchError(f"{log.path} is the log of {run}: resume it with '{resumption}'")


def command_of(log: RunLog) -> str:
    """The command that resumes a log."""
    if log.counter_records:
        return _COUNTERS
    return " ".join(map(shlex.quote, kind_of(log.plan).command(log.plan).split()))


def asks_for_plan(options: argparse.Namespace) -> bool:
    """Whether the command line gives any option of a plan."""
    return bool(options.given - _FREE)


def require_same_plan(options: argparse.Namespace, before: Plan, asked: Plan) -> None:
    """Raises LogMismatchError for the first field in which the plan asked for is not that of the log."""
    for name, then, now in differences(before, asked):
        raise contradiction(options, name, then, now)


def differences(before: Plan, asked: Plan) -> Iterator[tuple[str, object, object]]:
    """Each difference as an option, the log's value and the one asked for; lists in any order are equal."""
    of = operation_called(before.operation)
    for name in sorted(vars(before).keys() - _NOT_COMPARED):
        then, now = _comparable(getattr(before, name)), _comparable(getattr(asked, name))
        if then != now:
            option = _OPTIONS.get(name, name)
            yield (option, not then, not now) if option.startswith("no-") else (option, then, now)
    records = [[of.problem_record(problem) for problem in plan.problems] for plan in (before, asked)]
    for name in records[0][0]:
        then, now = (frozenset(_hashable(each[name]) for each in record) for record in records)
        if then != now:
            yield name, _unwrapped(then), _unwrapped(now)
    for name, value in vars(before.options or object()).items() if before.options else ():
        if value != getattr(asked.options, name):
            yield name, value, getattr(asked.options, name)


def _comparable(value: Any) -> object:
    return frozenset(value) if isinstance(value, tuple) else value


def _unwrapped(values: frozenset[Any]) -> object:
    """The value itself where there is one alone."""
    return next(iter(values)) if len(values) == 1 else values


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def contradiction(options: argparse.Namespace, name: str, then: object, now: object) -> LogMismatchError:
    """The error for an option that is not what the log was measured with."""
    asked = flag(name) if now is True else f"{flag(name)} {format_value(now)}"
    return LogMismatchError(
        f"{asked} contradicts {options.resume}, which was measured with {format_value(then)}: "
        "repeat the options of that run, leave all of them out, or start a new log"
    )


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def format_value(value: object) -> str:
    """A value as one would give it, shortened if it is a long list."""
    if value is None:
        return "the default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return format_value(sorted(value, key=lambda each: (len(format_value(each)), format_value(each))))
    if not isinstance(value, (list, tuple)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    texts = [format_value(each) for each in value]
    if len(texts) > _MOST_VALUES:
        texts[_MOST_VALUES - 2 : -1] = ["..."]
    return " ".join(texts)


def require_same_kernels(options: argparse.Namespace, before: Sequence[str], asked: Iterable[str]) -> None:
    """Kernels by their own names. Raises LogMismatchError unless they are those of the log."""
    then, now = frozenset(before), frozenset(asked)
    if then != now:
        raise contradiction(options, "kernel", then, now)


def reopened(log: RunLog, options: argparse.Namespace, index: int | None = None) -> Backend:
    """The device that a log was measured on, of several that of an index. Raises LogMismatchError when another is asked
    for, or is there now.
    """
    require_named(log, options)
    then = log.device(index)
    if options.backend not in (None, "auto") and backend_class(options.backend).name != then.backend:
        raise contradiction(options, "backend", then.backend, options.backend)
    backend = open_backend(options.backend or then.backend, then.index if options.device is None else options.device)
    # A card may have got another number.
    is_same_card = then.uuid_hash is not None and backend.info.uuid_hash == then.uuid_hash
    if backend.info.backend != then.backend:
        raise contradiction(options, "backend", then.backend, backend.info.backend)
    if not is_same_card and options.device not in (None, then.index):
        raise contradiction(options, "device", then.index, options.device)
    require_same_device(log, then, backend.info)
    return backend


def require_named(log: RunLog, options: argparse.Namespace) -> None:
    """Raises LogMismatchError for what a log names by ``package.module:Class`` and the command does not name again.

    A log is a third party's: nothing is imported because it says so.
    """
    plan = log.plan
    named: Mapping[str, Sequence[str]] = {"backend": (log.header["device"]["backend"],), "kernel": plan.kernels}
    for option, names in named.items():
        given = getattr(options, option)
        trusted = [given] if isinstance(given, str) else given or ()
        if foreign := [name for name in names if is_path(name) and name not in trusted]:
            raise LogMismatchError(
                f"{log.path} names {option} {' '.join(foreign)}, which is not installed: "
                f"add {flag(option)} {' '.join(names)} if you trust it"
            )
    for search in plan.searches if not plan.is_search else ():
        for name in filter(is_path, search.kernels):
            raise LogMismatchError(
                f"{log.path} names kernel {name} of a search, which is not installed: install what provides it, or "
                "start a new log"
            )
