"""``mamf guard FILE.toml``: fails if kernels are slower than their baseline, for the CI of a kernel project. The file
names kernels, shapes and the baseline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, field

from mamf.cli.commands.kernels_sweep import AnyOperation, KernelsSession, run_session
from mamf.cli.interruption import Interruption
from mamf.cli.options.values import duration, share
from mamf.cli.printing import is_for_people, note_stream
from mamf.cli.reading import read_log
from mamf.cli.resuming import Resumed
from mamf.cli.terminal import say, warn
from mamf.engine.strategies.guard import GuardSweep
from mamf.errors import IncomparableError, UsageError
from mamf.files import write_whole
from mamf.limits import require_known, require_some, whole_number
from mamf.logs.compare import blocking_differences
from mamf.logs.entries import entries, fields_of
from mamf.logs.judging import DEFAULT_ROUNDS, DEFAULT_TOLERANCE, Guarded, judge_guard, too_wide_for_a_baseline
from mamf.logs.records import Fields, read_record
from mamf.logs.run_log import RunLog
from mamf.plans import GUARD, KERNEL_REGIMES, MOST_ROUNDS, GuardOptions, Plan
from mamf.report.comparison import guard_document, junit, percent_of, verdict_line
from mamf.report.document import Document
from mamf.report.formats import markdown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_REGRESSION, _UNFINISHED = 3, 1


class _Keys(Struct, kw_only=True):
    """The keys of a guard file."""

    operation: str
    kernels: list[str]
    shapes: list[str]
    baseline: str
    regimes: tuple[str, ...] = KERNEL_REGIMES[:1]
    tolerance: Any = DEFAULT_TOLERANCE
    rounds: int = DEFAULT_ROUNDS
    precision: Any = None
    time_limit: Any = None
    flush: bool = True
    problem: Fields = field(default_factory=dict)


class GuardFile(NamedTuple):
    """``options``: those of ``mamf sweep --operation`` that measure the same rows."""

    baseline: Path
    tolerance: float
    rounds: int
    options: Mapping[str, Any]


def read_guard_file(path: Path) -> GuardFile:
    """Raises UsageError with the file and the error. ``baseline`` is relative to the file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        require_known(*(("key", name, _Keys.__struct_fields__) for name in found))
        given = read_record(found, _Keys)
        require_some("shapes", given.shapes, str)
        require_known(*(("regime", name, KERNEL_REGIMES) for name in given.regimes))
        tolerance = share(str(given.tolerance))
        rounds = whole_number("rounds", given.rounds, 3, MOST_ROUNDS)
        options = _sweep_options(given)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (UsageError, ValueError, argparse.ArgumentTypeError) as error:
        raise UsageError(f"{path}: {error}") from None
    return GuardFile(path.parent / given.baseline, tolerance, rounds, options)


def _sweep_options(given: _Keys) -> dict[str, Any]:
    fields = {
        name: [str(value) for value in (values if isinstance(values, list) else [values])]
        for name, values in given.problem.items()
    }
    return {
        "operation": given.operation,
        "kernel": given.kernels,
        "shapes": given.shapes,
        "dtype": fields.pop("dtype", None),
        "set": [f"{name}={','.join(values)}" for name, values in fields.items()] or None,
        "regime": given.regimes,
        "precision": None if given.precision is None else share(str(given.precision)),
        "time_limit": None if given.time_limit is None else duration(str(given.time_limit)),
        "no_flush": None if given.flush else True,
    }


def run(options: argparse.Namespace) -> int:
    options.guarded = file = read_guard_file(options.file)
    vars(options).update(file.options)
    options.given.add("problem")  # the file names a whole plan
    options.baseline = options.baseline or file.baseline
    if options.update and (options.junit or options.markdown):
        raise UsageError("--update measures a baseline and compares nothing: leave --junit and --markdown out")
    for path in filter(None, (options.junit, options.markdown)):
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    # Read before a device is opened, so that errors come first.
    path = options.baseline
    if not options.update and not path.exists():
        raise UsageError(f"there is no baseline {path}: measure one with 'mamf guard FILE --update', on a quiet card")
    options.before = None if options.update else read_log(path)
    return run_session(options, _GuardSession)


class _GuardSession(KernelsSession):
    """Compares kernels of one operation with a baseline, or measures a baseline."""

    kind = GUARD

    def __init__(
        self, of: AnyOperation, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None
    ) -> None:
        self.guarded: GuardFile = options.guarded
        self.baseline: RunLog | None = options.before
        self.found: Guarded | None = None
        self.refused = 0
        super().__init__(of, options, interruption, resumed)
        if self.baseline:
            self._require_comparable(self.baseline)

    def new_plan(self) -> Plan:
        return replace(super().new_plan(), kind=GUARD, options=GuardOptions(self.guarded.rounds))

    def strategy(self) -> GuardSweep:
        kernels = [each for _, each in self.kernels]
        return GuardSweep(
            self.plan,
            kernels,
            self.backend,
            held=self.held,
            baseline=None if self.baseline is None else {entry.key: entry for entry in entries(self.baseline)},
            tolerance=self.guarded.tolerance,
            rows=list(self.rows),
        )

    def _require_comparable(self, baseline: RunLog) -> None:
        """Raises IncomparableError for a baseline of another card or without any of these rows."""
        if found := blocking_differences(baseline.header, self.log.header if self.log else self._header()):
            raise IncomparableError(
                f"{baseline.path} is no baseline for this: {', '.join(map(str, found))}; make one with --update"
            )
        names = {name: each.name for name, each in self.kernels}
        wanted = [fields_of((*step[:3], names[step[3]])) for step in self.plan.steps()]
        if not any(entry.fields in wanted for entry in entries(baseline) if entry.tflops is not None):
            raise IncomparableError(f"{baseline.path} has no figure for these rows: make a baseline with --update")

    def run(self) -> int:
        code = super().run()
        if self.options.update or code not in (0, _UNFINISHED):
            return code or self.refused
        if self.found is None:
            return _UNFINISHED
        is_failed = self.found.is_failed or (self.options.strict and self.found.counts()["undecided"])
        return _REGRESSION if is_failed else 0 if self.found.is_finished else _UNFINISHED

    def document(self, log: RunLog) -> Document:
        return super().document(log) if self.found is None else guard_document(self.found)

    def _report(self, log: RunLog) -> int:
        if self.baseline:
            self.found = judge_guard(self.baseline, log, self.guarded.tolerance)
            self._write_files(self.found, log.summary)
        code = super()._report(log)
        if self.found and not is_for_people(self.options):
            say(verdict_line(self.found), sys.stderr)
        if self.options.update:
            self._keep_as_baseline(log)
        return code

    def _write_files(self, found: Guarded, summary: dict[str, Any] | None) -> None:
        seconds = float(summary["elapsed_seconds"]) if summary else 0.0
        if self.options.junit:
            write_whole(self.options.junit, junit(found, f"mamf.{self.of.name}", seconds))
        if self.options.markdown:
            write_whole(self.options.markdown, markdown.render(guard_document(found)))

    def _keep_as_baseline(self, log: RunLog) -> None:
        baseline = self.options.baseline
        if log.tier != "complete":
            warn(f"the run is not complete, so it is no baseline: continue with --update --resume {log.path}")
        elif wide := too_wide_for_a_baseline(log, self.guarded.tolerance):
            self.refused, (half_width, row) = _UNFINISHED, wide[0]
            warn(
                f"no baseline was written: {len(wide)} of {len(self.plan.steps())} rows vary by more than the "
                f"tolerance of {percent_of(self.guarded.tolerance)}, most {row.kernel} {row.shape} "
                f"(+-{percent_of(round(half_width, 4))}); measure on a quiet machine, or raise tolerance"
            )
        else:
            write_whole(baseline, log.path.read_bytes())
            say(f"baseline: {baseline}", note_stream(self.options))
