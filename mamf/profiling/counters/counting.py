"""Measure kernels for ``mamf counters``. After each measurement, read the kernel's hardware counters with ncu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mamf.engine.runner import RunSetup
from mamf.engine.strategies.rows import RowsStrategy
from mamf.logs.recording import LogRecord
from mamf.measurement import Measurement
from mamf.profiling.counters.ncu import CountersKey, Ncu, encode_counters, make_counters_key


class HardwareCounterStrategy(RowsStrategy):
    """A strategy that measures each kernel with each shape of a plan. After each measurement it reads the kernel's
    hardware counters.

    ``keys_with_counters``: the combinations of kernel, problem and shape whose counters have been read, by this run or
    by the earlier run that it resumes.
    """

    def __init__(self, setup: RunSetup, keys_with_counters: set[CountersKey], ncu: Ncu) -> None:
        super().__init__(setup)
        self.keys_with_counters, self.ncu = keys_with_counters, ncu

    @property
    def skipped_step_count(self) -> int:
        return super().skipped_step_count + len(find_rows_without_counters(self.setup.rows, self.keys_with_counters))

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        for row in find_rows_without_counters(self.setup.rows, self.keys_with_counters):
            yield self._read_row_counters(row)
        for result in super().yield_results():
            yield result
            if isinstance(result, Measurement) and result.ok:
                yield self._read_row_counters(result)

    def _read_row_counters(self, row: Measurement) -> LogRecord:
        """Read the counters of a row's kernel and shape with ncu, and return them as a record for the log."""
        self.setup.report_phase(f"counting {row.shape} {row.kernel}")
        requested_names = {kernel.name: name for name, kernel in self.setup.kernels}
        counters = self.ncu.read_kernel_counters(requested_names.get(row.kernel, row.kernel), row)
        if counters.has_counters:
            self.keys_with_counters.add(make_counters_key(counters))
        return LogRecord("counters", encode_counters(counters))


def find_rows_without_counters(rows: Sequence[Measurement], keys_with_counters: set[CountersKey]) -> list[Measurement]:
    """Return the successful measurements whose counters have not been read.

    Leave out reference measurements, which mamf makes only to compare other measurements with them.
    """
    return [row for row in rows if row.ok and not row.is_reference and make_counters_key(row) not in keys_with_counters]
