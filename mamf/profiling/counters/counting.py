"""Measure kernels for ``mamf counters``. After each measurement, read the kernel's hardware counters with ncu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mamf.engine.runner import RunSetup
from mamf.engine.strategies.rows import RowsStrategy
from mamf.logs.recording import LogRecord
from mamf.measurement import Measurement
from mamf.profiling.counters.ncu import CountsKey, Ncu, encode_counts, make_counts_key


class HardwareCounterStrategy(RowsStrategy):
    """A strategy that measures each kernel with each shape of a plan, and reads its hardware counters right after.

    ``counted_keys``: the keys of all kernels, problems and shapes whose counters have been read. If an earlier run is
    resumed, the counters that it read are included.
    """

    def __init__(self, setup: RunSetup, counted_keys: set[CountsKey], ncu: Ncu) -> None:
        super().__init__(setup)
        self.counted_keys, self.ncu = counted_keys, ncu

    @property
    def skipped_count(self) -> int:
        return super().skipped_count + len(find_rows_without_counters(self.setup.rows, self.counted_keys))

    def yield_results(self) -> Iterator[Measurement | LogRecord]:
        for row in find_rows_without_counters(self.setup.rows, self.counted_keys):
            yield self._read_row_counters(row)
        for result in super().yield_results():
            yield result
            if isinstance(result, Measurement) and result.ok:
                yield self._read_row_counters(result)

    def _read_row_counters(self, row: Measurement) -> LogRecord:
        """Read the counters of a row's kernel and shape with ncu, and return them as a record for the log."""
        self.setup.report_phase(f"counting {row.shape} {row.kernel}")
        requested_names = {kernel.name: name for name, kernel in self.setup.kernels}
        counts = self.ncu.read_kernel_counters(requested_names.get(row.kernel, row.kernel), row)
        if counts.has_counters:
            self.counted_keys.add(make_counts_key(counts))
        return LogRecord("counters", encode_counts(counts))


def find_rows_without_counters(rows: Sequence[Measurement], counted_keys: set[CountsKey]) -> list[Measurement]:
    """Return the successful rows whose counters have not been read. Leave out reference rows, which mamf measures only
    to compare other rows with them.
    """
    return [row for row in rows if row.ok and not row.is_reference and make_counts_key(row) not in counted_keys]
