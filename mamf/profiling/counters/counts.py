"""Counters of a kernel on a shape: the metrics read, the device kernels of a launch, and their sum. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mamf.statistics import Interval, median_interval

CYCLES = "gpc__cycles_elapsed.max"
NANOSECONDS = "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
UNITS_BUSY = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY_PIPES = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
DRAM_READ, DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_HIT, L1_HIT = "lts__t_sector_hit_rate.pct", "l1tex__t_sector_hit_rate.pct"
REGISTERS, SHARED_MEMORY = "launch__registers_per_thread", "launch__shared_mem_per_block"
BLOCKS, THREADS_OF_BLOCK = "launch__grid_size", "launch__block_size"
WAVES = "launch__waves_per_multiprocessor"
WARPS, MOST_WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active", "sm__maximum_warps_per_active_cycle_pct"
INSTRUCTIONS = "smsp__inst_executed.sum"
#: Blocks of a kernel that a unit has room for, by what they take; the least limits its occupancy.
OCCUPANCY_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
}

#: Metrics that add up over the kernels of a launch.
SUMMED = (CYCLES, NANOSECONDS, DRAM_READ, DRAM_WRITTEN, INSTRUCTIONS)
#: Shares of the elapsed cycles: their mean over the kernels of a launch is weighted by these.
SHARES_OF_CYCLES = (TENSOR, UNITS_BUSY, MEMORY_PIPES, L2, DRAM)
DEFAULT = (
    *SUMMED,
    *SHARES_OF_CYCLES,
    *(L2_HIT, L1_HIT, REGISTERS, SHARED_MEMORY, BLOCKS, THREADS_OF_BLOCK, WAVES, WARPS, MOST_WARPS),
    *OCCUPANCY_LIMITS.values(),
)


#: By ncu's name, in its base units; None if the device has no figure.
Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel of the device. ``grid``, ``block``: as ncu writes them, ``(2, 66, 1)``."""

    name: str
    grid: str
    block: str
    metrics: Metrics

    @property
    def cycles(self) -> float | None:
        return self.metrics.get(CYCLES)

    @property
    def seconds(self) -> float | None:
        nanoseconds = self.metrics.get(NANOSECONDS)
        return None if nanoseconds is None else nanoseconds * 1e-9

    @property
    def dram_bytes(self) -> float | None:
        """Read and written."""
        read, written = self.metrics.get(DRAM_READ), self.metrics.get(DRAM_WRITTEN)
        return None if read is None or written is None else read + written

    @property
    def dram_rate(self) -> float | None:
        """Bytes a second."""
        return self.dram_bytes / self.seconds if self.dram_bytes is not None and self.seconds else None

    @property
    def limiters(self) -> tuple[str, ...]:
        """The resources that limit the number of its blocks on a unit."""
        room = {name: self.metrics.get(metric) for name, metric in OCCUPANCY_LIMITS.items()}
        known = {name: blocks for name, blocks in room.items() if blocks is not None}
        return tuple(name for name, blocks in known.items() if blocks == min(known.values()))


@dataclass(frozen=True)
class Counts:
    """Of a kernel on a shape. ``kernels``: what a launch runs on the device, each metric the median over launches;
    ``cycles``: of each launch, all its kernels in sum. Without kernels there are no counts: ``reason`` says why.
    ``preparing_seconds``: operands, compilation, tuning and first launch of the profiled process;
    ``is_deterministic``: whether further launches gave the same to the last bit, None if that was not requested.
    """

    kernel: str
    problem: Any
    shape: Any
    kernels: tuple[DeviceKernel, ...] = ()
    cycles: tuple[float, ...] = ()
    reason: str = ""
    preparing_seconds: float | None = None
    is_deterministic: bool | None = None

    @property
    def ok(self) -> bool:
        return bool(self.kernels)

    @property
    def median_cycles(self) -> float | None:
        return statistics.median(self.cycles) if self.cycles else None

    @property
    def interval(self) -> Interval | None:
        """Confidence interval of the median of the cycles."""
        return median_interval(self.cycles) if self.cycles else None

    @property
    def total(self) -> DeviceKernel:
        """All kernels of a launch as one; what has no sum, such as a hit rate, is missing."""
        if len(self.kernels) == 1:
            return self.kernels[0]
        summed = {name: _sum(each.metrics.get(name) for each in self.kernels) for name in SUMMED}
        shares = {name: self._share(name) for name in SHARES_OF_CYCLES}
        return DeviceKernel(f"{len(self.kernels)} kernels", "", "", summed | shares)

    @property
    def longest(self) -> DeviceKernel:
        """The kernel that most of the cycles go to."""
        return max(self.kernels, key=lambda each: each.cycles or 0.0)

    def _share(self, name: str) -> float | None:
        """A share of elapsed cycles over all kernels."""
        cycles = _sum(each.cycles for each in self.kernels)
        active = _sum(_product(each.metrics.get(name), each.cycles) for each in self.kernels)
        return active / cycles if active is not None and cycles else None


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _sum(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def launches_of(kernels: Sequence[DeviceKernel], count: int) -> list[Sequence[DeviceKernel]]:
    """Kernels in the order they ran, by launch. Raises ValueError if the launches ran different kernels."""
    each, rest = divmod(len(kernels), count)
    found = [kernels[start : start + each] for start in range(0, len(kernels) - rest, each)] if each else []
    names = {tuple(kernel.name for kernel in launch) for launch in found}
    if rest or len(names) != 1:
        raise ValueError(f"{len(kernels)} kernels of {count} launches are not the same in each of them")
    return found


def median_launch(launches: Sequence[Sequence[DeviceKernel]]) -> tuple[DeviceKernel, ...]:
    """A launch whose metrics are medians over all."""
    return tuple(map(_median_kernel, zip(*launches, strict=True)))


def _median_kernel(same: Sequence[DeviceKernel]) -> DeviceKernel:
    first = same[0]
    values = {name: [each.metrics.get(name) for each in same] for name in first.metrics}
    medians = {
        name: statistics.median(known) if (known := [value for value in found if value is not None]) else None
        for name, found in values.items()
    }
    return DeviceKernel(first.name, first.grid, first.block, medians)
