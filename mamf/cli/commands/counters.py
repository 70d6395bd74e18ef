"""``mamf counters KERNEL...``: hardware counters of kernels, beside their rates without a profiler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from mamf.cli.commands.kernels_sweep import KernelsSession, run_session
from mamf.cli.planning import AnyOperation
from mamf.cli.terminal import say
from mamf.errors import UnavailableError, UsageError
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.writer import RunLogWriter
from mamf.measurement import Measurement
from mamf.operation import Request
from mamf.plugins.discovery import operation
from mamf.plugins.selection import find_operation
from mamf.profiling.counters.counts import counted_in, counts_record, step_of
from mamf.profiling.counters.ncu import Ncu, find_ncu
from mamf.profiling.counters.report import counters_document
from mamf.report.document import Document

_NOTHING_COUNTED = 1


def run(options: argparse.Namespace) -> int:
    options.ncu = find_ncu(options.ncu)
    return run_session(options, CountersSession, _operation(options))


def _operation(options: argparse.Namespace) -> AnyOperation:
    options.kernel = options.kernel or None
    if options.operation:
        return operation(options.operation)
    if options.kernel:
        return find_operation(options.kernel[0])
    if options.resume is None:
        missing = f"cannot read {options.output}, which does not exist" if options.begins else "nothing to count"
        raise UsageError(f"{missing}: name a KERNEL of 'mamf kernels'")
    plan = read_run_log(options.resume).plan
    if plan.is_search:
        raise UsageError(f"{options.resume} is not a log of 'mamf counters'")
    return operation(plan.operation)


class CountersSession(KernelsSession):
    """Measures kernels in burst, and counts each afterwards."""

    def __init__(self, request: Request, options: argparse.Namespace, *opened: Any) -> None:
        super().__init__(request, options, *opened)
        if reason := self.backend.without_counters():
            raise UnavailableError(str(reason))
        before = counted_in(self.log) if self.log else {}
        self.counted = {step: counts for step, counts in before.items() if counts.ok}
        backend = options.backend or self.backend.name
        self.ncu = Ncu(options.ncu, backend, self.backend.index, options.launches)

    def run(self) -> int:
        return super().run() or (0 if self.counted else _NOTHING_COUNTED)

    def dry_run(self) -> int:
        super().dry_run()
        for _, problem, shape, kernel in self.plan.steps(self.held):
            say(f"counted by: {' '.join(self.ncu.command(kernel, problem, shape))}")
        return 0

    def before_measuring(self, writer: RunLogWriter) -> None:
        self._writer = writer

    def has_all(self) -> bool:
        return super().has_all() and not self._uncounted()

    def left_out(self) -> bool:
        return super().left_out() or bool(self._uncounted())

    def measurements(self, on_phase: Callable[[str], None]) -> Iterator[Measurement]:
        for row in self._uncounted():
            self._count(row, on_phase)
        for row in super().measurements(on_phase):
            yield row  # written before it is counted
            if row.ok:
                self._count(row, on_phase)

    def _uncounted(self) -> list[Measurement]:
        return [row for row in self.rows if row.ok and not row.is_reference and step_of(row) not in self.counted]

    def _count(self, row: Measurement, on_phase: Callable[[str], None]) -> None:
        on_phase(f"counting {row.shape} {row.kernel}")
        counts = self.ncu.count(self.step_of(row)[-1], row)
        with self.interruption.shielded():
            self._writer.write("counters", counts_record(counts))
            if counts.ok:
                self.counted[step_of(counts)] = counts

    def document(self, log: RunLog) -> Document:
        return counters_document(log)
