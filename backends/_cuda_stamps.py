"""Measure the real clock of NVIDIA GPUs with stamps: small kernels that record the cycle counter of each SM and the
time. The driver compiles them from the PTX text below.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from mamf.backend import ElapsedTime, Unavailable

#: The first thread of each block stores the nanoseconds of the GPU's timer and the cycle counter of its SM. Before that
#: it waits ``wait`` nanoseconds: the block keeps its SM occupied, so the other blocks go to the other SMs.
_PTX = b"""
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
_WAIT_NANOSECONDS = 1500
#: Two blocks of this many threads fill an SM.
_THREADS_PER_BLOCK, _BLOCKS_PER_UNIT = 1024, 2
#: Number of slots that store the results of stamps. Stamps use the slots in turn, and clear each half of the slots
#: before they use its first slot again.
_SLOT_COUNT, _HALF_SLOT_COUNT = 256, 128


class CudaStamps:
    """An instrument that queues clock stamps in torch's current stream and computes the clock between two of them.

    ``driver``: the driver's library. ``index``: the device. ``units``: its number of SMs.
    """

    def __init__(self, driver: Any, index: int, units: int) -> None:
        """Load the kernel that takes stamps into the device. Raises OSError if the driver refuses it."""
        self._driver, self._index, self._units = driver, index, units
        with torch.cuda.device(index):
            self._results = torch.zeros(_SLOT_COUNT, units, 2, dtype=torch.int64, device="cuda")
            module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
            self._require(driver.cuModuleLoadData(ctypes.byref(module), _PTX + b"\0"))
            self._require(driver.cuModuleGetFunction(ctypes.byref(self._kernel), module, b"stamp"))
        self._next = 0

    def record_stamp(self) -> int:
        place = self._next % _SLOT_COUNT
        self._next += 1
        if place % _HALF_SLOT_COUNT == 0:
            self._results[place : place + _HALF_SLOT_COUNT].zero_()
        values = (
            ctypes.c_uint64(self._results[place].data_ptr()),
            ctypes.c_uint64(_WAIT_NANOSECONDS),
            ctypes.c_uint32(self._units),
        )
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._index).cuda_stream)
        blocks = _BLOCKS_PER_UNIT * self._units
        self._require(
            self._driver.cuLaunchKernel(
                self._kernel, blocks, 1, 1, _THREADS_PER_BLOCK, 1, 1, 0, stream, addresses, None
            )
        )
        return place

    def compute_elapsed(self, start: int, end: int) -> ElapsedTime | None:
        first, last = (self._results[place].cpu().double() for place in (start, end))
        written = (first[:, 0] > 0) & (last[:, 0] > 0)
        if not written.any():
            return None
        nanoseconds, cycles = (last - first)[written].median(dim=0).values.tolist()
        return ElapsedTime(cycles, nanoseconds * 1e-9) if nanoseconds > 0 and cycles > 0 else None

    @staticmethod
    def _require(status: int) -> None:
        if status:
            raise OSError(f"the NVIDIA driver failed with error {status} on the kernel that reads the cycle counters")


def open_stamps(driver: Any, index: int) -> CudaStamps | Unavailable:
    """Open the clock stamps of a device, or return why it has none."""
    if driver is None:
        return Unavailable(
            "mamf cannot read cycle counters: the NVIDIA driver was not found", "install the NVIDIA driver"
        )
    try:
        return CudaStamps(driver, index, torch.cuda.get_device_properties(index).multi_processor_count)
    except Exception as error:  # any error of torch or the driver: rates can be measured without stamps
        return Unavailable(f"mamf cannot read cycle counters: {error}", "update the NVIDIA driver")
