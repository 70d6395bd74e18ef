"""Measure kernels for ``mamf counters``, and after each one let NVIDIA's profiler ncu read its hardware counters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mamf.engine.runner import RunSetup
from mamf.engine.strategies.rows import RowsStrategy
from mamf.logs.recording import LogRecord
from mamf.measurement import Measurement
from mamf.profiling.counters.ncu import Ncu, StepKey, encode_counts, make_step_key


class CountingStrategy(RowsStrategy):
    """A strategy that measures each kernel and shape of a plan, and then reads the hardware counters of this kernel.

    ``counted``: the kernels and shapes whose counters an earlier run has already read.
    """

    def __init__(self, setup: RunSetup, counted: set[StepKey], ncu: Ncu) -> None:
        super().__init__(setup)
        self.counted, self.ncu = counted, ncu

    @property
    def skipped_count(self) -> int:
        return super().skipped_count + len(find_uncounted_rows(self.setup.rows, self.counted))

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        for row in find_uncounted_rows(self.setup.rows, self.counted):
            yield self._count_row(row)
        for found in super().yield_results():
            yield found
            if isinstance(found, Measurement) and found.ok:
                yield self._count_row(found)

    def _count_row(self, row: Measurement) -> LogRecord:
        """Let ncu read the counters of the kernel and shape of a row, and return them as a record for the log."""
        self.setup.report_phase(f"counting {row.shape} {row.kernel}")
        named = {kernel.name: name for name, kernel in self.setup.kernels}
        counts = self.ncu.count_kernel(named.get(row.kernel, row.kernel), row)
        if counts.ok:
            self.counted.add(make_step_key(counts))
        return LogRecord("counters", encode_counts(counts))


def find_uncounted_rows(rows: Sequence[Measurement], counted: set[StepKey]) -> list[Measurement]:
    """Return the successful rows whose kernel and shape are not in ``counted``. Leave out rows that mamf measured only
    to compare other rows with them.
    """
    return [row for row in rows if row.ok and not row.is_reference and make_step_key(row) not in counted]
