"""What every measuring command has around its measuring: device, run log, progress, interruption, report."""

from __future__ import annotations

import argparse
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mamf.backend import Advice, Backend
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options.values import ALL
from mamf.cli.printing import note_stream, print_document
from mamf.cli.progress import Progress
from mamf.cli.resuming import Resumed, asks_for_plan, reopened, require_kind, require_same_plan, resumed
from mamf.cli.sharing import asked_devices, first_opened, found_devices, opened_pool, require_same_devices
from mamf.cli.terminal import say, warn
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.engine.strategies.shapes import Sweep
from mamf.errors import MamfError, PluginError, RunLogError, RunLogWriteError, UsageError
from mamf.kinds.kind import AnyCeilings, View
from mamf.kinds.registry import kind_of
from mamf.logs.device_speeds import with_device_speeds
from mamf.logs.header import header_of
from mamf.logs.plan_records import plan_record
from mamf.logs.recording import End, host_seconds
from mamf.logs.records import measurement_record, utc_now
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.timer_correction import describe_shift, overhead_after
from mamf.logs.writer import RunLogWriter
from mamf.machine.doctor import as_line, diagnose, warnings
from mamf.machine.environment import command_line, tool_version
from mamf.measurement import Measurement
from mamf.node.pool import DevicePool
from mamf.node.sharing import SharedSweep
from mamf.plans import Plan
from mamf.plugins.discovery import open_backend
from mamf.report.document import Document

Shareable = TypeVar("Shareable", bound=Sweep | KernelsSweep)
_NOTHING_MEASURED = 1


def interruptible(options: argparse.Namespace, work: Callable[[Interruption, Resumed | None], int]) -> int:
    """Run ``work``; Ctrl-C before anything is measured is said in a line."""
    with Interruption() as interruption:
        try:
            with resumed(options) as log:
                return work(interruption, log)
        except KeyboardInterrupt:
            warn("interrupted before the first measurement; nothing is lost")
            return EXIT_CODE


def measure(options: argparse.Namespace, opened: Callable[[Interruption, Resumed | None], Session]) -> int:
    """Run a session, or with ``--dry-run`` say what it would measure."""

    def work(interruption: Interruption, resumed: Resumed | None) -> int:
        session = opened(interruption, resumed)
        return session.dry_run() if options.dry_run else session.run()

    return interruptible(options, work)


class RunEnd(NamedTuple):
    """How a run ended: the summary's status, why if early, and the exit code."""

    status: str
    reason: str
    exit_code: int


class Session(ABC):
    """A run with everything around it. Derived commands say what is measured and how it is reported."""

    #: The command's name, for the log's default name.
    command: str
    #: The kind of its runs, and their operation.
    kind: str
    operation: str
    #: What is measured: that asked for, or the resumed log's.
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
        #: What the run lacks though it went on: devices that shared it and failed, ceilings that were not confirmed.
        self.failures: list[str] = []
        asked = asked_devices(options, self.log)
        self.backend = first_opened(self._opened, asked) if asked else self._opened(ALL)
        #: Those that share the run; none where one measures alone.
        self.devices = found_devices(self.backend, asked, self.log)
        self.pool: DevicePool | None = None

    def _opened(self, index: int) -> Backend:
        """The device of an index; where that is of all devices, the one that measures alone or begins."""
        options = self.options
        if self.log:
            return reopened(self.log, options, None if index == ALL else index)
        return open_backend(options.backend or "auto", (options.device or 0) if index == ALL else index)

    def planned(self) -> Plan:
        """The plan asked for, or the log's with the budget of this run. Raises LogMismatchError where they differ."""
        if self.before is None:
            return self.new_plan()
        if asks_for_plan(self.options):
            require_same_plan(self.options, self.before, self.plan_to_compare(self.before))
        return self.before

    @abstractmethod
    def new_plan(self) -> Plan:
        """The plan that the options ask for."""

    def plan_to_compare(self, before: Plan) -> Plan:
        """The plan asked for, to be compared with the log's; what the device had to be measured for is the log's."""
        return self.new_plan()

    @abstractmethod
    def dry_run(self) -> int:
        """Say what would be measured and how long; returns the exit code."""

    @abstractmethod
    def kernel_name(self) -> str:
        """What the header names as kernel."""

    @abstractmethod
    def label(self) -> str:
        """What the default name of the log says of the plan."""

    def counts(self, row: Measurement) -> bool:
        """Whether a row is what the run is for, and not measured beside it."""
        return not row.is_reference

    def has_all(self) -> bool:
        """Whether a resumed log that is complete lacks nothing: what failed is tried again, where that can be."""
        return not self.count_due()

    def count_due(self) -> int | None:
        """Measurements to come; None where that is not known before."""
        return None

    @abstractmethod
    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        """Measure. Rows that a resumed log holds already are not yielded."""

    @abstractmethod
    def left_out(self) -> bool:
        """Whether the budget ended before everything was measured."""

    def summary(self, end: End) -> dict[str, Any]:
        """The last record of the log."""
        return kind_of(self.plan).summary(self.plan, self.rows, self.ceilings_found(), end)

    def ceilings_found(self) -> AnyCeilings:
        """What the rows confirm by problem and regime, or are shares of by dtype and regime."""
        return {}

    def count_left(self) -> int:
        """Steps of the plan that no row answers yet."""
        return 0

    def document(self, log: RunLog) -> Document:
        """The report of the log."""
        return kind_of(log.plan).document(log, self.view())

    def view(self) -> View:
        return View(self.options.top)

    def before_measuring(self, writer: RunLogWriter) -> None:
        """Told where records go, before the first measurement."""

    def after_measuring(self, writer: RunLogWriter) -> None:
        """Records between the last measurement and the summary."""

    def run(self) -> int:
        # A log without its summary, of a run that was killed after its last row, is resumed to write it.
        if self.log and self.log.tier == "complete" and self.has_all():
            return self._report(self.log)
        self.findings = diagnose(self.backend)
        with ExitStack() as opened:
            self.pool = opened.enter_context(opened_pool(self.options, self.backend, self.devices, self._failed))
            require_same_devices(self.log, self.pool)
            header = self.log.header if self.log else self._header()
            with self.interruption.shielded():
                writer = opened.enter_context(self._open_log(header))
            for finding in warnings(self.findings):
                warn(as_line(finding))
            self.before_measuring(writer)
            begun = host_seconds(self.backend)
            end = self._collect(writer)
            with self.interruption.shielded():
                return self._finish(header, writer, end, max(0.0, host_seconds(self.backend) - begun))

    def _failed(self, told: str, are_others: bool) -> None:
        self.failures.append(told)
        warn(f"{told}; the others do its part" if are_others else told)

    def shared(self, strategy: Shareable, kernel: str = "") -> Shareable | SharedSweep:
        """A strategy, or where several devices share the run the same on all of them. ``kernel``: of products, as it is
        asked for.
        """
        if self.pool is None:
            return strategy
        self.backend.release_memory()  # it is another process that measures on this device
        ceilings = getattr(strategy, "ceilings", {})
        named = getattr(self.options, "ceiling_kernel", ())
        return SharedSweep(strategy.plan, self.pool, kernel, ceilings, strategy.held, strategy.on_phase, named)

    def _header(self) -> dict[str, Any]:
        findings = [as_line(finding).strip() for finding in self.findings]
        plan, notes = plan_record(self.plan), self.options.notes
        devices = sorted(self.pool.infos.values(), key=lambda info: info.index) if self.pool else ()
        return header_of(self.backend, command_line(), self.kernel_name(), plan, findings, notes, devices)

    def _open_log(self, header: dict[str, Any]) -> RunLogWriter:
        if self.resumed is None:
            return self._new_log(header)
        log, writer = self.resumed
        resumption = {"tool": tool_version(), "command": command_line(), "started": utc_now()}
        writer.go_on(log, {**resumption, "notes": self.options.notes})
        return writer

    def _new_log(self, header: dict[str, Any]) -> RunLogWriter:
        if self.options.output:
            writer = RunLogWriter.create(self.options.output, header)
            if getattr(self.options, "begins", False):
                say(f"{self.options.output} did not exist: a new run begins there", sys.stderr)
            return writer
        path, number = self._default_path(), 1
        while True:
            try:
                return RunLogWriter.create(path, header)
            except UsageError:
                if not path.exists():
                    raise
            number += 1  # another run began in the same second
            path = self._default_path(f"-{number}")

    def _default_path(self, number: str = "") -> Path:
        slug = re.sub(r"[^a-z0-9]+", "-", self.backend.info.name.lower()).strip("-")
        moment = datetime.now().strftime("%Y%m%d-%H%M%S")
        return Path(f"mamf-{self.command}-{slug}-{self.label()}-{moment}{number}.jsonl")

    def _collect(self, writer: RunLogWriter) -> RunEnd:
        """Measure and log until done, or until something ends it early."""
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
            return RunEnd("interrupted", str(error), error.exit_code)
        code = 0 if any(row.ok and self.counts(row) for row in self.rows) else _NOTHING_MEASURED
        if self.left_out():
            return RunEnd("interrupted", "; ".join(("the budget ended", *self.failures)), code)
        return RunEnd("complete", "; ".join(self.failures), code)

    def _finish(self, header: dict[str, Any], writer: RunLogWriter, end: RunEnd, elapsed: float) -> int:
        """Close the log with a summary and print the report; returns the exit code."""
        code = end.exit_code
        self.rows = with_device_speeds(self.rows)
        # Not of devices that other processes used, nor of one that failed or was interrupted: it may never answer.
        is_idle = not self.pool and end.exit_code in (0, _NOTHING_MEASURED)
        summary = self.summary(End(end.status, end.reason, elapsed, self.count_left()))
        summary |= overhead_after(self.backend, self.rows) if is_idle else {}
        if shift := describe_shift(summary, self.rows):
            warn(shift)
        try:
            self.after_measuring(writer)
            writer.write("summary", {**summary, "time": utc_now()})
            log = read_run_log(writer.path)
        except (RunLogError, RunLogWriteError) as error:
            warn(str(error))
            code = error.exit_code
            log = RunLog(writer.path, header, self.rows, summary=summary)
        reported = self._report(log)
        return code or reported

    def _report(self, log: RunLog) -> int:
        """Print what the log holds, so that 'mamf show' prints the same."""
        code = 0
        try:
            print_document(self.options, self.document(log))
        except PluginError as error:  # of an operation's own columns: what was measured stands in the log
            warn(str(error))
            code = error.exit_code
        say(f"log: {log.path}", note_stream(self.options))
        return code
