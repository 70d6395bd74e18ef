"""Memory bandwidth as an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.operation import Operation
from mamf.operations.bandwidth.kernel import BandwidthKernel
from mamf.operations.bandwidth.shapes import MOST_ARRAYS, UNTOLD_CACHE_BYTES, BandwidthProblem, BandwidthShape
from mamf.peaks import find_bandwidth

# Memory runs at its own clock, which no board raises above its datasheet unasked.
_HEADROOM = 1.02
# Arrays together that are this many caches leave at least half of their bytes to the memory.
_CACHES = 2
# Where the device does not tell.
_MEMORY_BYTES = 8 * 1024 * MIB


class Bandwidth(Operation[BandwidthProblem, BandwidthShape]):
    name = "bandwidth"
    kernel_group = "mamf.bandwidth_kernels"
    kernel_type = BandwidthKernel
    shape_type = BandwidthShape
    problem_type = BandwidthProblem
    shape_example = "256MiB"

    def default_shapes(self, backend: Backend) -> Sequence[BandwidthShape]:
        """Powers of two from where all arrays of any pattern fit in the cache to where they fill half the memory."""
        info = backend.info
        memory = min(info.memory_bytes or _MEMORY_BYTES, backend.free_memory() or _MEMORY_BYTES)
        first = power_of_two((info.cache_bytes or UNTOLD_CACHE_BYTES) // MOST_ARRAYS)
        last = power_of_two(memory // 2 // MOST_ARRAYS)
        sizes = [first << step for step in range(max(last // first, 1).bit_length())]
        return [BandwidthShape(size) for size in sizes]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> BandwidthProblem:
        """In float32 where nothing else is asked for: bytes are bytes, and every device has it."""
        return super().problem_for(backend, {**asked, "dtype": asked.get("dtype") or "float32"})

    def fastest_possible(
        self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape | None = None
    ) -> float | None:
        """Bytes a second of the datasheet's, where a launch must go to memory for most of its bytes; else None.

        What the cache holds of a launch's last writes when it ends, or of its operands when it begins, need not be
        moved within it.
        """
        peak = find_bandwidth(info.name, info.compute_units, is_verified_only=True)
        if peak is None or shape is None or problem.warm > 1 or not info.cache_bytes:
            return None
        nbytes = problem.work(shape).nbytes
        if nbytes < _CACHES * info.cache_bytes:
            return None
        return _HEADROOM * peak * nbytes / (nbytes - info.cache_bytes)

    def peak(self, info: DeviceInfo, problem: BandwidthProblem) -> float | None:
        """The datasheet's bytes a second, read and written together."""
        return find_bandwidth(info.name, info.compute_units)

    def may_be_ceiling(self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape) -> bool:
        """Of one pass only where the memory answers for it; of many, which show a cache, wherever it is fastest."""
        return problem.warm > 1 or problem.is_of_memory(shape, info.cache_bytes)

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Passes if there are several; the share of the datasheet's bandwidth."""
        columns: dict[str, object] = {"passes": row.problem.warm} if row.problem.warm > 1 else {}
        peak = None if info is None else self.peak(info, row.problem)
        if peak and row.ok:
            columns["of theoretical"] = f"{row.best_rate * TERA / peak:.1%}"
        return columns

    def axis(self, shape: BandwidthShape) -> float:
        """Bytes of an array."""
        return float(shape.nbytes)


def power_of_two(limit: int) -> int:
    """The largest that is at most ``limit``, and at least 1 KiB."""
    return 1 << max(limit.bit_length() - 1, 10)
