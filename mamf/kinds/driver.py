"""Carry out a run for the command line and the Python API: open its log, measure, write the records, and finally write
how the run ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import CheckResult
from mamf.engine.runner import RunSetup, Strategy
from mamf.engine.search.grid import check_search_time
from mamf.errors import DeviceLostError, get_first_message_line
from mamf.kinds.kind import AnyCeilings
from mamf.kinds.registry import get_kind
from mamf.logs.recording import (
    PYTHON_COMMAND,
    LogRecord,
    RunEnd,
    check_device_after_run,
    make_header,
    make_plan_record,
)
from mamf.logs.records import get_utc_time, make_ceiling_record, make_measurement_record
from mamf.logs.run_log import RunLog, add_device_speeds, add_findings_to_header, add_record, add_sharing_to_header
from mamf.logs.writer import RunLogWriter
from mamf.machine.environment import (
    CpuUse,
    check_load_during_run,
    describe_mamf_version,
    format_check_result,
    run_machine_checks,
)
from mamf.measurement import Measurement
from mamf.plans import ALGORITHM_PHASE


class ResumedLog(NamedTuple):
    """A log that a run continues. mamf locked the file against other writers before it read the log.

    - ``log``: the log as mamf read it. ``writer``: the open, locked writer of its file.
    """

    log: RunLog
    writer: RunLogWriter


@dataclass
class Run(RunSetup):
    """A run that measures a plan (the kernels and shapes to measure) on an open device, and writes a log.

    - ``make_run_strategy``: a function that makes the strategy, which chooses what to measure next; None: the run uses
      the strategy of its kind.
    - ``log_path``: the path of the new log; None: the run writes no log.
    - ``may_add_number_to_name``: whether to add a number to the name of the log if a file of that name exists.
    - ``resumed_log``: the log that the run continues, instead of starting a new one.
    - ``known_ceilings``: ceilings that are known before the run. The report of the run compares rows with them.
    - ``command``, ``notes``: texts that are written to the header of the log.
    - ``check_results``: the results of the checks that mamf made while it opened the device.
    - ``skipped_checks``: the names of machine checks whose results do not matter for this run.
    - ``shield_from_signals``: a function that makes a context manager. While it is active, no signal, such as Ctrl-C,
      raises an exception. By default, a signal may end the run at any line of code, as usual in Python.
    - ``check_signals``: a function that raises KeyboardInterrupt if a signal has arrived since the run started.
    - ``on_device_lost``: a function that mamf calls with the row of a failed launch if the launch made the device
      unusable.
    """

    make_run_strategy: Callable[[RunSetup], Strategy] | None = None
    log_path: Path | None = None
    may_add_number_to_name: bool = False
    resumed_log: ResumedLog | None = None
    known_ceilings: AnyCeilings = field(default_factory=dict)
    command: str = PYTHON_COMMAND
    notes: str = ""
    check_results: Sequence[CheckResult] = ()
    skipped_checks: Collection[str] = ()
    shield_from_signals: Callable[[], AbstractContextManager[None]] = nullcontext
    check_signals: Callable[[], object] = lambda: None
    on_device_lost: Callable[[Measurement], None] = lambda row: None

    def __post_init__(self) -> None:
        self.kind = get_kind(self.plan)
        #: Problems of the machine that ``mamf doctor`` reports. The list is empty until the log is open.
        self.findings: list[CheckResult] = []
        #: The reasons for failures that did not end the run.
        self.failures: list[str] = []
        self.header: dict[str, Any] = self.resumed_log.log.header if self.resumed_log else {}
        self.summary: dict[str, Any] = {}
        #: True once the summary, which is the last record of the log, has been written.
        self.is_summary_written = False
        self._rows_before_resume = list(self.rows)
        self._other_records: list[LogRecord] = []
        self._cpu_use_at_start: CpuUse | None = None

    def is_result(self, row: Measurement) -> bool:
        """Return whether a row is a result of the run. Two kinds of rows are not: measurements of the reference matmul,
        which show whether the speed of the device drifts, and measurements that only serve to choose an algorithm.
        """
        return not row.is_reference and row.phase != ALGORITHM_PHASE and row.operation in self.plan.operations

    def yield_measurements(self) -> Generator[Measurement, None, None]:
        """Measure the plan, and yield each row after it is written to the log.

        Create the log at once, before the caller requests the first row, and write its summary when the iterator ends
        or is closed. Raises UsageError if the log cannot be created.
        """
        strategy = (self.make_run_strategy or self.kind.make_strategy)(self)
        if self.log_path is None and self.resumed_log is None:
            return self._measure_without_log(strategy)
        measurements = self._measure_with_log(strategy)
        next(measurements)  # Open the log now, so that closing the iterator before the first row also closes the log.
        return measurements

    def _measure_without_log(self, strategy: Strategy) -> Generator[Measurement, None, None]:
        for record in strategy.yield_results():
            if isinstance(record, Measurement):
                self.rows.append(record)
                yield record

    def _measure_with_log(self, strategy: Strategy) -> Generator[Any, None, None]:
        """Open the log and yield None. Then measure, write and yield each row, and finally write the summary."""
        with ExitStack() as open_contexts:
            with self.shield_from_signals():
                self.writer = open_contexts.enter_context(self._open_log())
            yield None
            start_time, seconds, is_idle = self.backend.now(), 0.0, False
            self._cpu_use_at_start = CpuUse.read()
            status, reason = "interrupted", "by the caller"
            try:
                for record in strategy.yield_results():
                    with self.shield_from_signals():
                        self._write_record(record)
                    if isinstance(record, Measurement):
                        yield record
                    self.check_signals()
                status, reason, is_idle = "complete", "; ".join(self.failures), True
                if self.kind.is_run_cut_short(self, strategy.skipped_step_count):
                    # Rows are skipped before the budget is over if they would exceed it.
                    is_early = self.backend.now() - start_time < 0.9 * (self.plan.budget_seconds or 0.0)
                    why = " early: the other rows would exceed it" if is_early and strategy.skipped_step_count else ""
                    status, reason = "interrupted", "; ".join([f"the budget ended{why}", *self.failures])
            except KeyboardInterrupt:
                reason = "by the user"
                raise
            except Exception as error:
                reason = get_first_message_line(error)
                if isinstance(error, DeviceLostError):
                    self.on_device_lost(error.row)
                    self._write_record(error.row)
                raise
            finally:
                with self.shield_from_signals():
                    with suppress(Exception):  # If the device failed, its clock may fail too.
                        seconds = self.backend.now() - start_time
                    self._finish_log(RunEnd(status, reason, seconds, self.kind.count_remaining_steps(self)), is_idle)

    def _open_log(self) -> RunLogWriter:
        findings = [
            *run_machine_checks(self.backend),
            *check_search_time(
                self.backend,
                self.plan,
                spent_seconds=((self.resumed_log and self.resumed_log.log.summary) or {}).get("elapsed_seconds", 0.0),
            ),
            *self.check_results,
        ]
        self.findings = [finding for finding in findings if finding.check_name not in self.skipped_checks]
        if self.resumed_log is not None:
            finding_lines = self._format_findings()
            add_findings_to_header(self.header, finding_lines)
            self.resumed_log.writer.write_resume_record(
                self.resumed_log.log,
                {
                    "tool": describe_mamf_version(),
                    "command": self.command,
                    "started": get_utc_time(),
                    "findings": finding_lines,
                    "notes": self.notes,
                },
            )
            return self.resumed_log.writer
        assert self.log_path is not None, "a run without a path has no log to open"
        self.header = self.build_header()
        return RunLogWriter.create(self.log_path, self.header, self.may_add_number_to_name)

    def build_header(self) -> dict[str, Any]:
        kernel = self.plan_kernels[0].name if self.plan.is_search else " ".join(self.plan.kernels)
        return make_header(
            self.backend, self.command, kernel, make_plan_record(self.plan), self._format_findings(), self.notes
        )

    def _format_findings(self) -> list[str]:
        return [format_check_result(finding).strip() for finding in self.findings]

    def _write_record(self, record: Measurement | LogRecord) -> None:
        if isinstance(record, Measurement):
            self.writer.write("measurement", make_measurement_record(record))
            self.rows.append(record)
        else:
            self._other_records.append(record)
            self.writer.write(*record)

    def _finish_log(self, end: RunEnd, is_idle: bool) -> None:
        """Write the confirmed ceilings and the summary to the log.

        ``is_idle``: whether the device has finished its work. If not, for example after a failure or an interruption,
        the device may never answer. Then skip the final checks of its timer and of other processes on the card.
        """
        self.rows[:] = add_device_speeds(self.rows)
        ceilings = self.confirmed_ceilings if self.kind.has_ceilings else {}
        self.summary = self.kind.make_summary(self.plan, self.rows, ceilings or self.known_ceilings, end)
        if self.resumed_log is not None:
            earlier_summary = self.kind.make_summary(self.plan, self._rows_before_resume, {}, end)
            self.summary["measured_before_resume"] = earlier_summary["measured"]
        if is_idle:
            self.summary |= check_device_after_run(self.backend, self.rows)
        if load_warnings := check_load_during_run(self.backend, self._cpu_use_at_start, CpuUse.read()):
            self.summary["findings"] = list(map(format_check_result, load_warnings))
            add_findings_to_header(self.header, self.summary["findings"])
        for ceiling in ceilings.values():
            self._write_record(LogRecord("ceiling", make_ceiling_record(ceiling)))
        self._write_record(LogRecord("summary", {**self.summary, "time": get_utc_time()}))
        self.writer.append_line()
        self.is_summary_written = True

    def build_log(self) -> RunLog:
        """Return the log of this run. It is equal to the RunLog that mamf would read from the log file."""
        log = RunLog(
            self.writer.path, add_sharing_to_header(self.header, self.summary), self.rows, summary=self.summary or None
        )
        if old_log := self.resumed_log and self.resumed_log.log:
            log.matmul_ceilings, log.other_ceilings = dict(old_log.matmul_ceilings), dict(old_log.other_ceilings)
            log.known_ceilings, log.counter_records = dict(old_log.known_ceilings), list(old_log.counter_records)
        for record in self._other_records:
            add_record(log, {"record": record.kind, **record.fields})
        return log
