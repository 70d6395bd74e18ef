"""The metrics that are read by default, by ncu's names, in its base units: cycle, ns, byte, %.

The tensor pipe's share is of elapsed cycles: ``..._active`` would leave out idle units.
"""

from __future__ import annotations

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
