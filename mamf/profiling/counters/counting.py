"""Measures kernels, and has ncu count each row after it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mamf.engine.strategies.kernels import KernelsSweep
from mamf.logs.recording import Record
from mamf.measurement import Measurement
from mamf.profiling.counters.counts import Step, counts_record, step_of
from mamf.profiling.counters.ncu import Ncu


@dataclass
class CountingSweep(KernelsSweep):
    """One run of a plan. ``rows``: of the run so far, also of an interrupted one; it grows as rows are written.
    ``counted``: steps that have counts.
    """

    rows: Sequence[Measurement] = ()
    counted: set[Step] = field(default_factory=set)
    ncu: Ncu = field(kw_only=True)

    @property
    def left_out(self) -> int:
        return super().left_out + len(uncounted(self.rows, self.counted))

    def results(self) -> Iterator[Measurement | Record]:
        for row in uncounted(self.rows, self.counted):
            yield self._count(row)
        for found in super().results():
            yield found
            if isinstance(found, Measurement) and found.ok:
                yield self._count(found)

    def _count(self, row: Measurement) -> Record:
        """Count a row, by the name that its kernel was requested by."""
        self.on_phase(f"counting {row.shape} {row.kernel}")
        named = zip(self.plan.kernels, self.kernels, strict=True)
        counts = self.ncu.count(next((name for name, kernel in named if kernel.name == row.kernel), row.kernel), row)
        if counts.ok:
            self.counted.add(step_of(counts))
        return Record("counters", counts_record(counts))


def uncounted(rows: Sequence[Measurement], counted: set[Step]) -> list[Measurement]:
    """The rows with a figure that have no counts."""
    return [row for row in rows if row.ok and not row.is_reference and step_of(row) not in counted]
