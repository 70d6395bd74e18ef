"""Counters in a run log: a record beside the measurement of each kernel and shape, and one for each roof."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mamf.errors import RunLogError
from mamf.logs.records import utc_now
from mamf.logs.run_log import MALFORMED, RunLog, describe_error
from mamf.measurement import Measurement
from mamf.operations.unknown import operation_called
from mamf.profiling.counters.counts import Counts, DeviceKernel
from mamf.profiling.counters.roofs import BANDWIDTH, COMPUTE, Roof

#: A kernel on a shape of a problem.
Step = tuple[str, Any, Any]


@dataclass(frozen=True)
class Counted:
    """What a run counted, the last counts of each step, and what it held them to."""

    counts: tuple[Counts, ...] = ()
    roofs: tuple[Roof, ...] = ()

    @property
    def bandwidth(self) -> Roof | None:
        return next((roof for roof in self.roofs if roof.of == BANDWIDTH), None)

    def mamfu(self, row: Measurement | None) -> float | None:
        """A burst as a share of the measured ceiling of its dtype, or None."""
        if row is None or not row.ok or row.work.unit != "TFLOPS":
            return None
        roof = next((roof for roof in self.roofs if (roof.of, roof.dtype) == (COMPUTE, row.problem.dtype)), None)
        return None if roof is None else row.flop / row.seconds / roof.rate


def step_of(of: Counts | Measurement) -> Step:
    return of.kernel, of.problem, of.shape


def counts_record(counts: Counts) -> dict[str, Any]:
    of, work = operation_called(counts.problem.operation), counts.problem.work(counts.shape)
    return {
        "operation": of.name,
        "shape": of.shape_record(counts.shape),
        "flop": round(work.flop),
        "bytes": work.nbytes,
        "unit": work.unit,
        "problem": of.problem_record(counts.problem),
        "kernel": counts.kernel,
        "kernels": [asdict(each) for each in counts.kernels],
        "cycles": list(counts.cycles),
        "reason": counts.reason,
        "preparing_seconds": counts.preparing_seconds,
        "is_deterministic": counts.is_deterministic,
        "time": utc_now(),
    }


def roof_record(roof: Roof) -> dict[str, Any]:
    return asdict(roof)


def counted_in(log: RunLog) -> Counted:
    """Raises RunLogError for invalid records of counters."""
    try:
        return counted(log.counter_records)
    except MALFORMED as error:
        raise RunLogError(f"{log.path}: its counters: {describe_error(error)}") from None


def counted(records: Iterable[Mapping[str, Any]]) -> Counted:
    """Of the records of a log; raises KeyError or ValueError for what cannot be counters."""
    counts: dict[Step, Counts] = {}
    roofs: dict[tuple[str, str], Roof] = {}
    for record in records:
        if record["record"] == "roof":
            roof = Roof(**{each.name: record[each.name] for each in fields(Roof)})
            if roof.rate <= 0:
                raise ValueError(f"a roof of {roof.of} of {roof.rate:g}")
            roofs[roof.of, roof.dtype] = roof
        else:
            found = _counts(record)
            counts[step_of(found)] = found
    return Counted(tuple(counts.values()), tuple(roofs.values()))


def _counts(record: Mapping[str, Any]) -> Counts:
    of = operation_called(record["operation"], record)
    kernels = tuple(
        DeviceKernel(each["name"], each["grid"], each["block"], each["metrics"]) for each in record["kernels"]
    )
    if any(cycles <= 0 for cycles in record["cycles"]):
        raise ValueError("cycles of a launch that are not a positive number")
    return Counts(
        record["kernel"],
        of.problem_from_record(record["problem"]),
        of.shape_from_record(record["shape"]),
        kernels,
        tuple(map(float, record["cycles"])),
        record["reason"],
        record["preparing_seconds"],
        record["is_deterministic"],
    )
