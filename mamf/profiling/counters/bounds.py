"""What bounds a kernel, from its counters and the measured roofs; each verdict comes with its figures. Pure.

Above ``BUSY`` of its peak a part of the device is what the kernel waits for: the share below which NVIDIA's own rules
(Nsight Compute, Speed Of Light) call neither computing nor memory well used. Memory is held to the measured ceiling of
bandwidth, which no kernel exceeds, if it is known, else to ncu's peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.profiling.counters.counts import (
    BLOCKS,
    DRAM,
    L2,
    MEMORY_PIPES,
    MOST_WARPS,
    TENSOR,
    UNITS_BUSY,
    WARPS,
    WAVES,
    Counts,
    DeviceKernel,
)
from mamf.profiling.counters.roofs import Roof

#: Percent.
BUSY = 60.0
# A device takes about as long to start and end a kernel: what is shorter waits for that.
_SHORT_SECONDS = 5e-6
# Waves of blocks: below, that share of the device has nothing to do.
_FEW_WAVES = 0.5
# Of a launch's time in burst, the share that its kernels are at work: below, the device waits between them.
_GAPS = 0.7
_WHOLE = 100.0
# Of a launch's cycles, what its longest kernel must take for its bound to be reported without naming the others.
_ALL = 0.98
# Characters of a kernel's name.
_LONGEST_NAME = 48

TENSOR_PIPE, OTHER_PIPES, MEMORY, L2_CACHE, ON_CHIP = "tensor pipe", "other pipes", "memory", "L2", "L1 and shared"
LATENCY, LAUNCH, UNKNOWN = "latency", "launch", "unknown"


@dataclass(frozen=True)
class Bound:
    """``by``: one of the names above; ``why``: its figures, in a line."""

    by: str
    why: str


def bound(counts: Counts, bandwidth: Roof | None = None, burst_seconds: float | None = None) -> Bound:
    """What bounds a launch: the gaps between its kernels, else what bounds the longest of them. ``burst_seconds``: of a
    launch without the profiler.
    """
    total, longest = counts.total, counts.longest
    if burst_seconds and total.seconds and total.seconds < _GAPS * burst_seconds:
        busy, kernels = total.seconds / burst_seconds, len(counts.kernels)
        what = "its kernel is" if kernels == 1 else f"its {kernels} kernels are"
        return Bound(LAUNCH, f"{what} at work for {busy:.0%} of the {burst_seconds * 1e6:.4g} us that a launch takes")
    found = bound_of_kernel(longest, bandwidth)
    share = longest.cycles / total.cycles if longest.cycles and total.cycles else 1.0
    if share >= _ALL:
        return found
    return Bound(found.by, f"{found.why}; this is {short_name(longest.name)}, {share:.0%} of the launch's cycles")


def bound_of_kernel(kernel: DeviceKernel, bandwidth: Roof | None = None) -> Bound:
    """What bounds one kernel of the device."""
    known = {name: percent for name, percent in busy_parts(kernel, bandwidth).items() if percent is not None}
    if not known:
        return Bound(UNKNOWN, "no counter of its pipes and memory has a figure")
    most = max(known, key=lambda name: known[name])
    if known[most] >= BUSY:
        return Bound(most, f"{known[most]:.3g} % of {_peak(most, bandwidth)}")
    busiest = f"no part is busy, the most {most} {known[most]:.3g} %"
    return _too_little(kernel, busiest) or Bound(LATENCY, f"{busiest}{_occupancy(kernel)}")


def busy_parts(kernel: DeviceKernel, bandwidth: Roof | None) -> dict[str, float | None]:
    """Percent of the peak of each part of the device. Work in several counters is listed once, where most specific."""
    metrics = kernel.metrics
    tensor, units = metrics.get(TENSOR), metrics.get(UNITS_BUSY)
    dram, l2, pipes = metrics.get(DRAM), metrics.get(L2), metrics.get(MEMORY_PIPES)
    if bandwidth is not None and kernel.dram_rate is not None:
        dram = 100 * kernel.dram_rate / bandwidth.rate
    # Traffic that fills the memory also fills the L2.
    is_of_memory = dram is not None and dram >= BUSY
    is_of_others = {each for each in (tensor, metrics.get(DRAM), l2) if each is not None}
    return {
        TENSOR_PIPE: tensor,
        OTHER_PIPES: None if units in is_of_others else units,
        MEMORY: dram,
        L2_CACHE: None if is_of_memory else l2,
        ON_CHIP: None if is_of_memory or pipes in is_of_others else pipes,
    }


def _peak(part: str, bandwidth: Roof | None) -> str:
    if part == MEMORY and bandwidth is not None:
        return f"{bandwidth.rate / 1e12:.4g} TB/s ({bandwidth.source})"
    return "its peak"


def _too_little(kernel: DeviceKernel, busiest: str) -> Bound | None:
    """The bound of a kernel that is too small for the device, else None."""
    waves, blocks, seconds = kernel.metrics.get(WAVES), kernel.metrics.get(BLOCKS), kernel.seconds
    if waves is not None and waves < _FEW_WAVES:
        size = "" if blocks is None else f", {blocks:.0f} blocks"
        return Bound(LAUNCH, f"too little to do: {waves:.2g} waves{size}; {busiest}")
    if seconds is not None and seconds < _SHORT_SECONDS:
        return Bound(LAUNCH, f"too little to do: {seconds * 1e6:.3g} us, about what starting it takes; {busiest}")
    return None


def _occupancy(kernel: DeviceKernel) -> str:
    active, most = kernel.metrics.get(WARPS), kernel.metrics.get(MOST_WARPS)
    if active is None:
        return ""
    possible = "" if most is None else f" of {most:.3g} % possible"
    by = f" by its {' and '.join(kernel.limiters)}" if most is not None and most < _WHOLE else ""
    return f"; warps {active:.3g} %{possible}{by}"


def short_name(name: str) -> str:
    """The beginning of a kernel's name without template arguments, parameters and namespaces: some have a thousand
    characters.
    """
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("<")[0].partition("(")[0]
    return (bare.rpartition("::")[2] or name)[:_LONGEST_NAME]
