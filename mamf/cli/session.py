"""The frame of every command that measures: device, run log, progress, interruption, report."""

from __future__ import annotations

import argparse
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mamf.backend import Advice, Backend, describe_sharing
from mamf.ceilings.share import KnownCeiling
from mamf.cli import resuming
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options.values import ALL
from mamf.cli.printing import note_stream, print_document
from mamf.cli.progress import Progress
from mamf.cli.resuming import Resumed, asks_for_plan, interruptible, reopen, require_kind, require_same_plan
from mamf.cli.sharing import asked_devices, found_devices, open_first, open_pool, require_same_devices
from mamf.cli.terminal import say, warn
from mamf.engine.isolation import isolation_of
from mamf.engine.runner import crashes_of
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.engine.traits import fit_traits
from mamf.errors import DeviceLostError, MamfError, RunLogError, RunLogWriteError
from mamf.kinds.kind import AnyCeilings, View
from mamf.kinds.registry import kind_of
from mamf.logs.plan_records import plan_record
from mamf.logs.recording import (
    End,
    apply_traits,
    describe_shift,
    header_of,
    host_seconds,
    overhead_after,
    sharing_after,
)
from mamf.logs.records import ceiling_record, measurement_record, utc_now
from mamf.logs.run_log import RunLog, read_run_log, with_device_speeds, with_sharing
from mamf.logs.writer import RunLogWriter
from mamf.machine.doctor import diagnose, format_finding, warnings
from mamf.machine.environment import command_line, tool_version
from mamf.measurement import Measurement
from mamf.node.sharing import DevicePool, SharedSweep
from mamf.plans import Plan
from mamf.plugins.discovery import open_backend
from mamf.report.document import Document

Shareable = TypeVar("Shareable", bound=Sweep | KernelsSweep)
_NOTHING_MEASURED = 1


def measure(options: argparse.Namespace, opened: Callable[[Interruption, Resumed | None], Session]) -> int:
    """Run a session, or with ``--dry-run`` print what it would measure."""

    def work(interruption: Interruption, resumed: Resumed | None) -> int:
        session = opened(interruption, resumed)
        return session.dry_run() if options.dry_run else session.run()

    return interruptible(options, work)


class RunEnd(NamedTuple):
    """How a run ended: the status for the summary, the reason if early, and the exit code."""

    status: str
    reason: str
    exit_code: int


class Session(ABC):
    """A run with its log, progress and report. Subclasses define what is measured and how it is reported."""

    #: The name of the command, for the default name of the log.
    command: str
    #: The kind of its runs, and their operation.
    kind: str
    operation: str
    #: The plan from the options or from the resumed log.
    plan: Plan

    def __init__(self, options: argparse.Namespace, interruption: Interruption, resumed: Resumed | None) -> None:
        self.options = options
        self.interruption = interruption
        self.resumed = resumed
        self.log: RunLog | None = resumed and resumed.log
        #: The plan of the log that is resumed.
        self.before = require_kind(self.log, self.kind, self.operation, self.command) if self.log else None
        self.findings: list[Advice] = []
        self.rows: list[Measurement] = []
        #: What rows are shares of that the run does not measure itself.
        self.known_ceilings: dict[tuple[str, str], KnownCeiling] = {}
        #: Failures that did not end the run: devices that shared it, ceilings that were not confirmed.
        self.failures: list[str] = []
        asked = asked_devices(options, self.log)
        self.backend = open_first(self._open_device, asked) if asked else self._open_device(ALL)
        #: The devices that share the run; empty if one measures alone.
        self.devices = found_devices(self.backend, asked, self.log)
        self.pool: DevicePool | None = None
        isolation_of(self.backend).everything = getattr(options, "isolate", None)
        self.traits: Sequence[Advice] = ()  # what was seen of the device, if they were measured
        if self.log:
            apply_traits(self.backend, self.log.header.get("traits", {}))
        elif not options.dry_run:
            self.traits = fit_traits(self.backend, warn)

    def _open_device(self, index: int) -> Backend:
        """Open a device; ALL opens the one that measures alone or comes first."""
        options = self.options
        if self.log:
            return reopen(self.log, options, None if index == ALL else index)
        return open_backend(options.backend or "auto", (options.device or 0) if index == ALL else index)

    def make_plan(self) -> Plan:
        """The plan from the options, or the log's. Raises LogMismatchError if they differ."""
        if self.before is None:
            return self.new_plan()
        if asks_for_plan(self.options):
            require_same_plan(self.options, self.before, self.plan_to_compare(self.before))
        return self.before

    @abstractmethod
    def new_plan(self) -> Plan:
        """The plan from the options."""

    def plan_to_compare(self, before: Plan) -> Plan:
        """The plan from the options, to compare with the log's; fields that depend on measurements are the log's."""
        return self.new_plan()

    @abstractmethod
    def dry_run(self) -> int:
        """Print what would be measured and how long it takes; returns the exit code."""

    @abstractmethod
    def kernel_name(self) -> str:
        """The kernel that the header names."""

    @abstractmethod
    def label(self) -> str:
        """The part of the log's default name that describes the plan."""

    def counts(self, row: Measurement) -> bool:
        """Whether a row belongs to the plan, unlike references."""
        return not row.is_reference

    def has_all(self) -> bool:
        """Whether a resumed log lacks nothing; failed steps may be tried again."""
        return not self.count_due()

    def count_due(self) -> int | None:
        """The number of measurements to come; None if unknown."""
        return None

    @abstractmethod
    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        """Measure. Rows that the resumed log holds are not yielded."""

    @abstractmethod
    def left_out(self) -> bool:
        """Whether the budget ended before everything was measured."""

    def summary(self, end: End) -> dict[str, Any]:
        """The last record of the log."""
        return kind_of(self.plan).summary(self.plan, self.rows, self.ceilings_found(), end)

    def ceilings_found(self) -> AnyCeilings:
        """Confirmed ceilings by problem and regime, or known ceilings by dtype and regime."""
        return {}

    def count_left(self) -> int:
        """The number of steps of the plan that have no row yet."""
        return 0

    def document(self, log: RunLog) -> Document:
        """The report of the log."""
        return kind_of(log.plan).document(log, self.view())

    def view(self) -> View:
        return View(self.options.top)

    def before_measuring(self, writer: RunLogWriter) -> None:
        """Called before the first measurement, with the writer of records."""

    def run(self) -> int:
        # A run that was killed after its last row is resumed to write its summary.
        if self.log and self.log.tier == "complete" and self.has_all():
            return self._report(self.log)
        self.findings = [*diagnose(self.backend), *self.traits]
        with ExitStack() as opened:
            self.pool = opened.enter_context(open_pool(self.options, self.backend, self.devices, self._record_failure))
            require_same_devices(self.log, self.pool)
            header = self.log.header if self.log else self._header()
            with self.interruption.shielded():
                writer = opened.enter_context(self._open_log(header))
            resuming.note_run(self.options, self.backend, writer, self.log.measurements if self.log else ())
            for finding in warnings(self.findings):
                warn(format_finding(finding))
            self.before_measuring(writer)
            begun = host_seconds(self.backend)
            end = self._collect(writer)
            with self.interruption.shielded():
                return self._finish(header, writer, end, max(0.0, host_seconds(self.backend) - begun))

    def _record_failure(self, message: str) -> None:
        self.failures.append(message)
        warn(message)

    def share(self, strategy: Shareable, kernel: str = "") -> Shareable | SharedSweep:
        """The strategy, or the same on all devices that share the run. ``kernel``: for products, as in the options."""
        if self.pool is None:
            return strategy
        self.backend.release_memory()  # another process measures on this device
        ceilings = getattr(strategy, "ceilings", {})
        named, fatal = getattr(self.options, "ceiling_kernel", ()), list(crashes_of(self.backend).fatal)
        sweep = SharedSweep(strategy.plan, self.pool, kernel, ceilings, strategy.held, strategy.on_phase, named, fatal)
        sweep.isolates = isolation_of(self.backend).everything
        return sweep

    def _header(self) -> dict[str, Any]:
        findings = [format_finding(finding).strip() for finding in self.findings]
        plan, notes = plan_record(self.plan), self.options.notes
        devices = sorted(self.pool.infos.values(), key=lambda info: info.index) if self.pool else ()
        return header_of(self.backend, command_line(), self.kernel_name(), plan, findings, notes, devices)

    def _open_log(self, header: dict[str, Any]) -> RunLogWriter:
        if self.resumed is not None:
            log, writer = self.resumed
            writer.write_resume(
                log,
                {
                    "tool": tool_version(),
                    "command": command_line(),
                    "started": utc_now(),
                    "notes": self.options.notes,
                },
            )
            return writer
        given = self.options.output
        # A default name is numbered: another run may start in the same second.
        writer = RunLogWriter.create(given or self._default_path(), header, not given)
        if self.options.begins:
            say(f"{given} does not exist: a new run starts there", sys.stderr)
        return writer

    def _default_path(self) -> Path:
        slug = re.sub(r"[^a-z0-9]+", "-", self.backend.info.name.lower()).strip("-")
        moment = datetime.now().strftime("%Y%m%d-%H%M%S")
        return Path(f"mamf-{self.command}-{slug}-{self.label()}-{moment}.jsonl")

    def _collect(self, writer: RunLogWriter) -> RunEnd:
        """Measure and log until the run is done or ends early."""
        try:
            with Progress(self.count_due()) as progress:
                for row in self.measurements(progress.phase):
                    with self.interruption.shielded():
                        writer.write("measurement", measurement_record(row))
                        self.rows.append(row)
                    if self.counts(row):
                        progress.add(row)
                    self.interruption.check()
        except KeyboardInterrupt:
            return RunEnd("interrupted", "by the user", EXIT_CODE)
        except MamfError as error:
            if isinstance(error, DeviceLostError):
                resuming.log_lost(error.row, writer, self.backend)
                self.rows.append(error.row)
            return RunEnd("interrupted", str(error), error.exit_code)
        code = 0 if any(row.ok and self.counts(row) for row in self.rows) else _NOTHING_MEASURED
        if self.left_out():
            return RunEnd("interrupted", "; ".join(("the budget ended", *self.failures)), code)
        return RunEnd("complete", "; ".join(self.failures), code)

    def _finish(self, header: dict[str, Any], writer: RunLogWriter, end: RunEnd, elapsed: float) -> int:
        """Write the summary and print the report; returns the exit code."""
        code = end.exit_code
        self.rows = with_device_speeds(self.rows)
        # Devices in other processes are not idle, and a device that failed or was interrupted may never answer.
        is_idle = not self.pool and end.exit_code in (0, _NOTHING_MEASURED)
        summary = self.summary(End(end.status, end.reason, elapsed, self.count_left()))
        summary |= overhead_after(self.backend, self.rows) if is_idle else {}
        if shift := describe_shift(summary, self.rows):
            warn(shift)
        summary |= sharing_after(self.backend) if is_idle else {}
        header = with_sharing(header, summary)
        if shared := describe_sharing(header["device"]["name"]):
            warn(shared)
        try:
            for ceiling in self.ceilings_found().values() if kind_of(self.plan).has_ceilings else ():
                writer.write("ceiling", ceiling_record(ceiling))
            writer.write("summary", {**summary, "time": utc_now()})
            writer.append()
            log = read_run_log(writer.path)
        except (RunLogError, RunLogWriteError) as error:
            warn(str(error))
            code = error.exit_code
            log = self._log_in_memory(writer.path, header, summary)
        reported = self._report(log)
        return code or reported

    def _log_in_memory(self, path: Path, header: dict[str, Any], summary: dict[str, Any]) -> RunLog:
        """The log as it would be read, had it been written whole."""
        log = RunLog(path, header, self.rows, known_ceilings=self.known_ceilings, summary=summary)
        for ceiling in self.ceilings_found().values():
            log.add_ceiling(ceiling)
        return log

    def _report(self, log: RunLog) -> int:
        """Print the report from the log, so that 'mamf show' prints the same."""
        code = 0
        try:
            print_document(self.options, self.document(log))
        except MamfError as error:  # in the columns of an operation, or no jinja2: the measurements are in the log
            warn(str(error))
            code = error.exit_code
        for finding in warnings(self.findings):  # once more, beside the figures that it costs
            warn(format_finding(finding).strip().partition(";")[0])
        if log.path.exists():
            say(f"log: {log.path}", note_stream(self.options))
        return code
