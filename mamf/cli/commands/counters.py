"""``mamf counters KERNEL...``: hardware counters of kernels, beside their rates without a profiler."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mamf.cli.planning import AnyOperation
from mamf.cli.session import Session, run_kernels
from mamf.cli.terminal import say
from mamf.engine.strategies.kernels import KernelsSweep
from mamf.errors import UnavailableError, UsageError
from mamf.kinds.kind import Setup
from mamf.logs.recording import Record
from mamf.logs.run_log import RunLog, read_run_log
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
    return run_kernels(options, CountersSession, _operation(options))


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


@dataclass
class CountingSweep(KernelsSweep):
    """Measures kernels in burst, and counts each row after it is written.

    ``session``: knows the rows of the run, also of an interrupted one, and what is counted.
    """

    session: CountersSession | None = None

    @property
    def left_out(self) -> int:
        return super().left_out + len(self._session.uncounted())

    @property
    def _session(self) -> CountersSession:
        assert self.session is not None
        return self.session

    def results(self) -> Iterator[Measurement | Record]:
        for row in self._session.uncounted():
            yield self._session.count(row, self.on_phase)
        for found in super().results():
            yield found
            if isinstance(found, Measurement) and found.ok:
                yield self._session.count(found, self.on_phase)


class CountersSession(Session):
    """Measures kernels in burst, and counts each afterwards."""

    def __init__(self, request: Request, options: argparse.Namespace, *opened: Any) -> None:
        super().__init__(request, options, *opened)
        if reason := self.backend.without_counters():
            raise UnavailableError(str(reason))
        before = counted_in(self.log) if self.log else {}
        self.counted = {step for step, counts in before.items() if counts.ok}
        backend = options.backend or self.backend.name
        self.ncu = Ncu(options.ncu, backend, self.backend.index, options.launches)

    def strategy(self, setup: Setup) -> CountingSweep:
        held, on_phase = setup.answers, setup.on_phase
        return CountingSweep(self.plan, setup.opened, self.backend, held=held, on_phase=on_phase, session=self)

    def count(self, row: Measurement, on_phase: Callable[[str], None]) -> Record:
        """Count a row, by the name that its kernel was requested by."""
        on_phase(f"counting {row.shape} {row.kernel}")
        name = next((name for name, kernel in self.kernels if kernel.name == row.kernel), row.kernel)
        counts = self.ncu.count(name, row)
        if counts.ok:
            self.counted.add(step_of(counts))
        return Record("counters", counts_record(counts))

    def uncounted(self) -> list[Measurement]:
        rows = (row for row in self.driven.rows if row.ok and not row.is_reference)
        return [row for row in rows if step_of(row) not in self.counted]

    def say_plan(self) -> None:
        super().say_plan()
        for _, problem, shape, kernel in self.driven.steps:
            say(f"counted by: {' '.join(self.ncu.command(kernel, problem, shape))}")

    def has_all(self) -> bool:
        return super().has_all() and not self.uncounted()

    def judge(self, code: int) -> int:
        return code or (0 if self.counted else _NOTHING_COUNTED)

    def document(self, log: RunLog) -> Document:
        return counters_document(log)
