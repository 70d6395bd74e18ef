"""The operation ``bandwidth``: memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mamf.backend import MIB, Backend, DeviceInfo
from mamf.measurement import TERA, Measurement
from mamf.operation import Operation
from mamf.operations.bandwidth.shapes import (
    MAX_ARRAYS,
    UNTOLD_CACHE_BYTES,
    BandwidthKernel,
    BandwidthProblem,
    BandwidthShape,
)
from mamf.peaks import find_bandwidth

# The allowed excess over the datasheet's bandwidth is small: by default no board raises its memory clock.
_HEADROOM = 1.02
# If all arrays together are this many times as large as the cache, memory serves at least half of their bytes.
_CACHES = 2
# The memory of a device that does not report it.
_MEMORY_BYTES = 8 * 1024 * MIB


class Bandwidth(Operation[BandwidthProblem, BandwidthShape]):
    name = "bandwidth"
    kernel_group = "mamf.bandwidth_kernels"
    kernel_type = BandwidthKernel
    shape_type = BandwidthShape
    problem_type = BandwidthProblem
    shape_example = "256MiB"
    own_command = "bandwidth"

    def default_shapes(self, backend: Backend) -> Sequence[BandwidthShape]:
        """Return powers of two: from a size at which all arrays of any pattern fit in the cache, to half the memory."""
        info = backend.info
        memory = min(info.memory_bytes or _MEMORY_BYTES, backend.free_memory() or _MEMORY_BYTES)
        first = power_of_two((info.cache_bytes or UNTOLD_CACHE_BYTES) // MAX_ARRAYS)
        last = power_of_two(memory // 2 // MAX_ARRAYS)
        sizes = [first << step for step in range(max(last // first, 1).bit_length())]
        return [BandwidthShape(size) for size in sizes]

    def problem_for(self, backend: Backend, asked: Mapping[str, Any]) -> BandwidthProblem:
        """Return the problem, as in Operation. The dtype defaults to float32, which every device supports."""
        return super().problem_for(backend, {**asked, "dtype": asked.get("dtype") or "float32"})

    def fastest_possible(
        self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape | None = None
    ) -> float | None:
        """Return the datasheet's bytes per second if memory must serve most bytes of a launch, or else None.

        The limit allows for operands that are in the cache when the launch begins and writes that are still in it when
        the launch ends, because these bytes need not be moved within the launch.
        """
        return None if shape is None or problem.warm > 1 else fastest_memory(info, problem.work(shape).nbytes)

    def peak(self, info: DeviceInfo, problem: BandwidthProblem) -> float | None:
        """Return the datasheet's bytes per second, reads plus writes."""
        return find_bandwidth(info.name, info.compute_units)

    def may_be_ceiling(self, info: DeviceInfo, problem: BandwidthProblem, shape: BandwidthShape) -> bool:
        """Return whether memory serves a single pass. Several passes measure a cache, so any shape may be a ceiling."""
        return problem.warm > 1 or problem.is_of_memory(shape, info.cache_bytes)

    def columns(self, row: Measurement, info: DeviceInfo | None = None) -> Mapping[str, object]:
        """Return the number of passes if there are several, and the share of the datasheet's bandwidth."""
        columns: dict[str, object] = {"passes": row.problem.warm} if row.problem.warm > 1 else {}
        peak = None if info is None else self.peak(info, row.problem)
        if peak and row.ok:
            columns["of theoretical"] = f"{row.best_rate * TERA / peak:.1%}"
        return columns

    def axis(self, shape: BandwidthShape) -> float:
        """Bytes of each array."""
        return float(shape.nbytes)


def fastest_memory(info: DeviceInfo, nbytes: int) -> float | None:
    """The highest rate of a launch that moves so many bytes, from the datasheet; None if a cache may serve most."""
    peak = find_bandwidth(info.name, info.compute_units, is_verified_only=True)
    if peak is None or not info.cache_bytes or nbytes < _CACHES * info.cache_bytes:
        return None
    return _HEADROOM * peak * nbytes / (nbytes - info.cache_bytes)


def power_of_two(limit: int) -> int:
    """Return the largest power of two up to ``limit``, but at least 1 KiB."""
    return 1 << max(limit.bit_length() - 1, 10)
