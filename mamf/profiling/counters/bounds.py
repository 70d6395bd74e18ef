"""What bounds a kernel, from its counters; each verdict comes with its figures. Pure.

Above ``BUSY`` of its peak a part of the device is what the kernel waits for: the share below which NVIDIA's own rules
(Nsight Compute, Speed Of Light) call neither computing nor memory well used.
"""

from __future__ import annotations

from dataclasses import dataclass

from mamf.profiling.counters.counts import (
    BLOCKS,
    DRAM,
    L2,
    MAX_WARPS,
    MEMORY_PIPES,
    TENSOR,
    UNITS_BUSY,
    WARPS,
    WAVES,
    Counts,
    DeviceKernel,
)

#: Percent.
BUSY = 60.0
# A device takes about as long to start and end a kernel: what is shorter waits for that.
_SHORT_SECONDS = 5e-6
# Waves of blocks: below, that share of the device has nothing to do.
_FEW_WAVES = 0.5
# Of a launch's time in burst, the share that its kernels are at work: below, the device waits between them.
_GAPS = 0.7
# Of a launch's cycles, what its longest kernel must take for its bound to be reported without naming the others.
_ALL = 0.98
_MAX_NAME_LENGTH = 48

TENSOR_PIPE, OTHER_PIPES, MEMORY, L2_CACHE, ON_CHIP = "tensor pipe", "other pipes", "memory", "L2", "L1 and shared"
LATENCY, LAUNCH, UNKNOWN = "latency", "launch", "unknown"


@dataclass(frozen=True)
class Bound:
    """``by``: one of the names above; ``why``: its figures, in a line."""

    by: str
    why: str


def bound(counts: Counts, burst_seconds: float | None = None) -> Bound:
    """What bounds a launch: the gaps between its kernels, else what bounds the longest of them. ``burst_seconds``: of a
    launch without the profiler.
    """
    total, longest = counts.total, counts.longest
    if burst_seconds and total.seconds and total.seconds < _GAPS * burst_seconds:
        busy, kernels = total.seconds / burst_seconds, len(counts.kernels)
        what = "its kernel is" if kernels == 1 else f"its {kernels} kernels are"
        return Bound(LAUNCH, f"{what} at work for {busy:.0%} of the {burst_seconds * 1e6:.4g} us that a launch takes")
    found = bound_of_kernel(longest)
    share = longest.cycles / total.cycles if longest.cycles and total.cycles else 1.0
    if share >= _ALL:
        return found
    return Bound(found.by, f"{found.why}; this is {short_name(longest.name)}, {share:.0%} of the launch's cycles")


def bound_of_kernel(kernel: DeviceKernel) -> Bound:
    """What bounds one kernel of the device."""
    known = {name: percent for name, percent in busy_parts(kernel).items() if percent is not None}
    if not known:
        return Bound(UNKNOWN, "no counter of its pipes and memory has a figure")
    busiest = max(known, key=lambda name: known[name])
    if known[busiest] >= BUSY:
        return Bound(busiest, f"{known[busiest]:.3g} % of its peak")
    text, metrics = f"no part is busy, the most {busiest} {known[busiest]:.3g} %", kernel.metrics
    waves, blocks, seconds = metrics.get(WAVES), metrics.get(BLOCKS), kernel.seconds
    if waves is not None and waves < _FEW_WAVES:
        size = "" if blocks is None else f", {blocks:.0f} blocks"
        return Bound(LAUNCH, f"too little to do: {waves:.2g} waves{size}; {text}")
    if seconds is not None and seconds < _SHORT_SECONDS:
        return Bound(LAUNCH, f"too little to do: {seconds * 1e6:.3g} us, about what starting it takes; {text}")
    active, possible = metrics.get(WARPS), metrics.get(MAX_WARPS)
    if active is not None and possible is not None:
        by = f" by its {' and '.join(kernel.limiters)}" if possible < 100 else ""
        text += f"; warps {active:.3g} % of {possible:.3g} % possible{by}"
    return Bound(LATENCY, text)


def busy_parts(kernel: DeviceKernel) -> dict[str, float | None]:
    """Percent of the peak of each part of the device. Work in several counters is listed once, where most specific."""
    get = kernel.metrics.get
    tensor, units, dram, l2, pipes = get(TENSOR), get(UNITS_BUSY), get(DRAM), get(L2), get(MEMORY_PIPES)
    # Traffic that fills the memory also fills the L2.
    is_of_memory = dram is not None and dram >= BUSY
    is_of_others = {each for each in (tensor, dram, l2) if each is not None}
    return {
        TENSOR_PIPE: tensor,
        OTHER_PIPES: None if units in is_of_others else units,
        MEMORY: dram,
        L2_CACHE: None if is_of_memory else l2,
        ON_CHIP: None if is_of_memory or pipes in is_of_others else pipes,
    }


def short_name(name: str) -> str:
    """The beginning of a kernel's name without template arguments, parameters and namespaces: some have a thousand
    characters.
    """
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("<")[0].partition("(")[0]
    return (bare.rpartition("::")[2] or name)[:_MAX_NAME_LENGTH]
