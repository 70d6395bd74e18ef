"""Measure the actual clock of NVIDIA GPUs with stamps. To record a stamp, mamf launches a small kernel that stores the
time and the cycle counter of each SM. The driver compiles this kernel from the PTX text below.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mamf.backend import ElapsedTime, Unavailability

#: The kernel that records a stamp. In each block, the first thread waits for ``wait`` nanoseconds, then stores the
#: GPU's time in nanoseconds and the cycle counter of its SM. During the wait, the block occupies its SM, so other
#: blocks run on other SMs.
_STAMP_KERNEL_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry stamp(.param .u64 results, .param .u64 wait, .param .u32 units)
{
    .reg .pred %outside, %early;
    .reg .u32 %thread, %unit, %units;
    .reg .u64 %result, %offset, %now, %cycles, %until, %wait;
    mov.u32 %thread, %tid.x;
    setp.ne.u32 %outside, %thread, 0;
    @%outside bra END;
    mov.u32 %unit, %smid;
    ld.param.u32 %units, [units];
    setp.ge.u32 %outside, %unit, %units;
    @%outside bra END;
    ld.param.u64 %result, [results];
    mul.wide.u32 %offset, %unit, 16;
    add.u64 %result, %result, %offset;
    ld.param.u64 %wait, [wait];
    mov.u64 %until, %globaltimer;
    add.u64 %until, %until, %wait;
READ:
    mov.u64 %now, %globaltimer;
    mov.u64 %cycles, %clock64;
    setp.lt.u64 %early, %now, %until;
    @%early bra READ;
    st.global.v2.u64 [%result], {%now, %cycles};
END:
    ret;
}
"""
#: Minimum time for which each block of the stamp kernel occupies its SM.
_MIN_BLOCK_NANOSECONDS = 1500
#: Number of threads per block, and number of blocks that together occupy a whole SM.
_THREADS_PER_BLOCK, _BLOCKS_PER_UNIT = 1024, 2
#: Number of slots in the ring buffer (one stamp per slot), and in half of it. Before a stamp is written to the first
#: slot of either half, mamf clears that half.
_SLOT_COUNT, _HALF_SLOT_COUNT = 256, 128


class CudaStamps:
    """Records stamps (times and cycle counters) of an NVIDIA device in torch's current stream.

    ``driver``: the library of the CUDA driver. ``index``: the index of the device. ``unit_count``: its number of SMs.
    """

    def __init__(self, driver: Any, index: int, unit_count: int) -> None:
        """Load the kernel that records stamps. Raises OSError if the driver cannot load it."""
        self._driver, self._index, self._unit_count = driver, index, unit_count
        with torch.cuda.device(index):
            self._slots = torch.zeros(_SLOT_COUNT, unit_count, 2, dtype=torch.int64, device="cuda")
            module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
            self._raise_on_error(driver.cuModuleLoadData(ctypes.byref(module), _STAMP_KERNEL_PTX + b"\0"))
            self._raise_on_error(driver.cuModuleGetFunction(ctypes.byref(self._kernel), module, b"stamp"))
        self._next_stamp_number = 0

    def record_stamp(self) -> int:
        slot = self._next_stamp_number % _SLOT_COUNT
        self._next_stamp_number += 1
        if slot % _HALF_SLOT_COUNT == 0:
            self._slots[slot : slot + _HALF_SLOT_COUNT].zero_()
        kernel_arguments = (
            ctypes.c_uint64(self._slots[slot].data_ptr()),
            ctypes.c_uint64(_MIN_BLOCK_NANOSECONDS),
            ctypes.c_uint32(self._unit_count),
        )
        argument_addresses = (ctypes.c_void_p * len(kernel_arguments))(
            *(ctypes.addressof(argument) for argument in kernel_arguments)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._index).cuda_stream)
        blocks = _BLOCKS_PER_UNIT * self._unit_count
        self._raise_on_error(
            self._driver.cuLaunchKernel(
                self._kernel, blocks, 1, 1, _THREADS_PER_BLOCK, 1, 1, 0, stream, argument_addresses, None
            )
        )
        return slot

    def compute_elapsed(self, start: int, end: int) -> ElapsedTime | None:
        first_stamps, last_stamps = (self._slots[slot].cpu().double() for slot in (start, end))
        has_both_stamps = (first_stamps[:, 0] > 0) & (last_stamps[:, 0] > 0)
        if not has_both_stamps.any():
            return None
        nanoseconds, cycles = (last_stamps - first_stamps)[has_both_stamps].median(dim=0).values.tolist()
        return ElapsedTime(cycles, nanoseconds * 1e-9) if nanoseconds > 0 and cycles > 0 else None

    @staticmethod
    def _raise_on_error(status: int) -> None:
        if status:
            raise OSError(f"the NVIDIA driver failed with error {status} on the kernel that reads the cycle counters")


def open_stamps(driver: Any, index: int) -> CudaStamps | Unavailability:
    """Return an object that records stamps on a device, or the reason why stamps are unavailable."""
    if driver is None:
        return Unavailability(
            "mamf cannot read cycle counters: the NVIDIA driver was not found", "install the NVIDIA driver"
        )
    try:
        return CudaStamps(driver, index, torch.cuda.get_device_properties(index).multi_processor_count)
    except Exception as error:  # Whatever fails here, rates can be measured without stamps.
        return Unavailability(f"mamf cannot read cycle counters: {error}", "update the NVIDIA driver")
