"""Build the roofs of a device from the ceilings in run logs."""

from __future__ import annotations

from collections.abc import Sequence

from mamf.backend import DeviceInfo
from mamf.ceilings.ceiling import Ceiling, require_known_interval
from mamf.ceilings.roof import MEMORY_LEVEL, READ_PATTERN, Roofs, build_roofs, find_memory_level, make_ceiling_key
from mamf.errors import UsageError
from mamf.logs.run_log import RunLog
from mamf.operations.bandwidth.operation import (
    DEFAULT_CACHE_BYTES,
    MIN_ARRAYS_TO_CACHE_RATIO,
    BandwidthOperation,
    BandwidthProblem,
    BandwidthShape,
)


def find_read_bandwidths(log: RunLog, cache_bytes: int | None) -> dict[tuple[str, str], Ceiling]:
    """Return the read bandwidth of memory for each regime of a log. The keys are pairs of READ_BANDWIDTH_KEY and a
    regime.

    The read bandwidth of a regime is its confirmed ceiling or, if the log has none, the highest rate of a row that
    reads memory. ``cache_bytes``: the size of the device's cache. Rows whose arrays fit in the cache are ignored.
    """
    info = DeviceInfo(**log.header["device"])
    rows = [
        Ceiling(
            device=info.name,
            uuid_hash=info.uuid_hash,
            problem=row.problem,
            regime=row.regime,
            kernel=row.kernel,
            shape=row.shape,
            rate=row.best_rate,
            interval=row.rate_interval,
            round_count=1,
            conditions=row.conditions,
            repeatability=row.repeatability,
        )
        for row in log.measurements
        if row.ok and row.operation == BandwidthOperation.name and not row.phase
    ]
    bandwidths_by_key: dict[tuple[str, str], Ceiling] = {}
    for ceiling in sorted(rows, key=lambda each: each.rate) + list(log.other_ceilings.values()):
        problem = ceiling.problem
        if (
            isinstance(problem, BandwidthProblem)
            and problem.pattern == READ_PATTERN
            and find_memory_level(problem, ceiling.shape, cache_bytes) == MEMORY_LEVEL
        ):
            bandwidths_by_key[make_ceiling_key(ceiling)] = ceiling
    return bandwidths_by_key


def build_roofs_from_logs(logs: Sequence[RunLog], anyway: bool = False, needs_known_intervals: bool = False) -> Roofs:
    """Build the roofs of a device, which are its highest compute rates and memory bandwidths, from the ceilings in
    several logs. A log without ceilings may have rows that read memory: their highest rate is the memory bandwidth.

    Raises UsageError for a log that has neither ceilings nor such rows, and IncomparableError for logs of several cards
    unless ``anyway`` is true. Also raises IncomparableError if ``needs_known_intervals`` is true and a log has only
    ceilings whose interval is unknown.
    """
    cache_bytes = next((size for log in logs if (size := log.header["device"]["cache_bytes"])), None)
    ceilings = list[Ceiling]()
    for log in logs:
        confirmed_ceilings = [*log.matmul_ceilings.values(), *log.other_ceilings.values()]
        ceilings_of_log = confirmed_ceilings or list(find_read_bandwidths(log, cache_bytes).values())
        if not ceilings_of_log and any(
            row.ok and row.operation == BandwidthOperation.name and row.problem.pattern == READ_PATTERN
            for row in log.measurements
        ):
            size = BandwidthShape(MIN_ARRAYS_TO_CACHE_RATIO * (cache_bytes or DEFAULT_CACHE_BYTES))
            raise UsageError(
                f"{log.path} has no bandwidth ceiling, because its arrays are so small that a cache may serve them: "
                f"measure with 'mamf bandwidth --pattern read --size {size}'"
            )
        if not ceilings_of_log:
            raise UsageError(
                f"{log.path} has no ceiling: put logs of 'mamf find', 'mamf bandwidth --pattern read' or 'mamf "
                "roofline' after --ceiling, and logs with the rows to compare before --ceiling"
            )
        if needs_known_intervals and not any(ceiling.interval.is_known for ceiling in ceilings_of_log):
            require_known_interval(ceilings_of_log[0])
        ceilings += ceilings_of_log
    return build_roofs(ceilings, cache_bytes, anyway)
