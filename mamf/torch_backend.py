"""Provide the base classes of backends (adapters for one vendor's devices) whose devices torch supports.

A backend in ``backends/`` derives from ``AcceleratorBackend`` if the vendor's torch module (such as ``torch.cuda``) has
events and memory statistics, and otherwise from ``HostTimedBackend``. The backend adds the parts that differ between
vendors, such as sensors. A mark is a point in the device's queue at which the time is recorded.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, SupportsFloat

import torch

from mamf.backend import (
    MIB,
    Backend,
    DeviceInfo,
    OperandPool,
    SecondQueue,
    Telemetry,
    Unavailability,
    add_sharing_to_name,
)
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError

# For 8-bit dtypes, draw only this many elements at a time. mamf first draws the values in float32, which takes four
# times the memory.
_ELEMENTS_PER_DRAW = 2**26
# The number of bytes to write in order to flush a cache of unknown size.
_DEFAULT_FLUSH_BYTES = 256 * MIB
# Estimate the timer's overhead from spin kernels, which wait for a given number of clock cycles: a short one (5 us at 2
# GHz) and one that is eight times as long. If the clock changes by 1 % between the two kernels, the estimate shifts by
# 0.05 us. Repeated medians of 32 estimates agree within 0.1 us.
_SHORT_SPIN_CYCLES = 10_000
_LONG_TO_SHORT_SPIN_RATIO = 8
_OVERHEAD_ESTIMATE_COUNT = 32
_SPINS_PER_MEASUREMENT = 8
_FLUSHES_BEFORE_SPINS = 20


def get_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype in which values of mamf's dtype ``name`` are stored, which is float32 for tf32."""
    dtype = getattr(torch, "float32" if name == "tf32" else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def hash_identifier(identifier: str) -> str:
    """Return a stable hash of a serial number, so that logs can identify a card without revealing it."""
    return hashlib.sha256(identifier.encode()).hexdigest()[:12]


class TorchOperandPool(OperandPool):
    def __init__(self, backend: TorchBackend, data: str, seed: int) -> None:
        self._backend = backend
        self._data = data
        self._seed = seed
        self._buffers: dict[str, torch.Tensor] = {}

    def take_buffer(self, name: str, elements: int, dtype: str, fill: bool = True) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != get_torch_dtype(dtype) or buffer.numel() < elements:
            buffer = None
            self._buffers.pop(name, None)
            require_free_memory(self._backend, elements * DTYPES[dtype].itemsize)
            buffer = torch.empty(elements, dtype=get_torch_dtype(dtype), device=self._backend.device)
            if fill:
                self._fill_with_random_values(buffer, name)
            self._buffers[name] = buffer
        return buffer[:elements]

    def release_buffers(self) -> None:
        self._buffers.clear()

    def _fill_with_random_values(self, buffer: torch.Tensor, name: str) -> None:
        generator = torch.Generator(device=buffer.device)
        generator.manual_seed(self._seed + zlib.crc32(name.encode()))
        if buffer.dtype == torch.int32:
            # mamf uses this buffer only to overwrite outputs of int8 matmuls, so its values do not matter.
            buffer.random_(-128, 128, generator=generator)
        elif buffer.dtype.itemsize > 1:
            fill_with_random_values(buffer, self._data, generator)
        else:
            for chunk in buffer.split(_ELEMENTS_PER_DRAW):
                values = torch.empty(chunk.shape, dtype=torch.float32, device=buffer.device)
                fill_with_random_values(values, self._data, generator)
                if buffer.dtype == torch.int8:
                    # Scale values to the range of int8: 127 stands for 4 standard deviations of normal data, or for the
                    # maximum of uniform data (1.0).
                    values.mul_({"normal": 127 / 4, "uniform": 127.0}.get(self._data, 1.0)).round_().clamp_(-127, 127)
                chunk.copy_(values)


def require_free_memory(backend: Backend, nbytes: int) -> None:
    """Raise MemoryError if fewer than ``nbytes`` bytes of device memory are free. Without this check, an operating
    system that overcommits memory would grant the allocation and kill the process later.
    """
    free_bytes = backend.read_free_memory_bytes()
    if free_bytes is not None and nbytes > free_bytes:
        raise MemoryError(
            f"out of memory: {nbytes / 1e9:.1f} GB are needed, but only {free_bytes / 1e9:.1f} GB are free"
        )


def fill_with_random_values(values: torch.Tensor, data: str, generator: torch.Generator) -> None:
    """Fill the tensor ``values`` in place with random values. ``data``: their distribution: normal (mean 0, standard
    deviation 1), wide (normal, times random powers of two), uniform (-1 to 1), integers (-2 to 2) or zeros.
    """
    if data == "normal":
        values.normal_(generator=generator)
    elif data == "wide":
        exponents = torch.empty_like(values).random_(-10, 3, generator=generator)
        values.normal_(generator=generator).mul_(exponents.exp2_())
    elif data == "uniform":
        values.uniform_(-1, 1, generator=generator)
    elif data == "integers":
        values.random_(0, 5, generator=generator).sub_(2)
    else:
        values.zero_()


class TorchBackend(Backend):
    """A device that torch addresses as ``device_type:index``, such as "cuda:0"."""

    uses_torch_tensors = True
    device_type: str
    device: torch.device

    def __init__(self, index: int = 0) -> None:
        if reason := self.explain_unavailability():
            raise UnavailableError(f"backend {self.name} is not available: {reason}")
        count = self.count_devices()
        if not 0 <= index < count:
            choice = f"choose an index from 0 to {count - 1}" if count > 1 else "the only index is 0"
            raise UnavailableError(f"{self.name} has no device {index}: {choice}")
        self.index = index
        self.device = self.open_device()
        # Keep one buffer for each flush size. If all sizes shared one buffer, slicing it would double the time that the
        # host needs for a flush.
        self._flush_buffers: dict[int, torch.Tensor] = {}
        self.setup()
        self.telemetry = self.open_telemetry()
        info = self.describe()
        self.info = replace(info, name=add_sharing_to_name(info.name, self.find_sharing_ways()))
        # Flush at least this many bytes. mamf may later measure the size of the cache (mamf.engine.traits), but this
        # measurement may miss a second, larger cache.
        self._flush_bytes = 2 * (self.info.cache_bytes or 0) or _DEFAULT_FLUSH_BYTES

    def open_device(self) -> torch.device:
        return torch.device(self.device_type, self.index)

    def setup(self) -> None:
        """Prepare the vendor's libraries in this process before the device is used. Changes no setting of the
        machine.
        """

    @abstractmethod
    def describe(self) -> DeviceInfo:
        """Return the description of the opened device for logs and reports."""

    def open_telemetry(self) -> Telemetry | Unavailability:
        return Unavailability(f"mamf cannot read sensors of {self.name} devices", "the log will lack power and clock")

    def flush_cache(self, size: int | None = None) -> None:
        size = size or max(self._flush_bytes, 2 * (self.info.cache_bytes or 0))
        buffer = self._flush_buffers.get(size)
        if buffer is None:
            buffer = self._flush_buffers[size] = torch.empty(size, dtype=torch.int8, device=self.device)
        buffer.zero_()

    def make_operand_pool(self, data: str, seed: int) -> OperandPool:
        return TorchOperandPool(self, data, seed)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()

    def compute_digest(self, result: object) -> str | None:
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if not tensors:
            return None
        hash_of_tensors = hashlib.sha256()
        for tensor in tensors:
            hash_of_tensors.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        return hash_of_tensors.hexdigest()

    def read_settings(self) -> dict[str, str]:
        return {"float32_matmul_precision": torch.get_float32_matmul_precision()}


class HostTimedBackend(TorchBackend):
    """A device whose launches mamf times with the host's clock, because it has no reliable events. Each mark first
    waits until the device is idle.
    """

    timer = "host clock"

    def record_mark(self) -> float:
        self.synchronize()
        return self.now()

    def wait_for_mark(self, mark: float) -> None:
        pass

    def is_mark_reached(self, mark: float) -> bool:
        return True

    def compute_seconds_between(self, start: SupportsFloat, end: SupportsFloat) -> float:
        return float(end) - float(start)


class AcceleratorBackend(TorchBackend):
    """A device whose launches mamf times with events in the device's queue."""

    timer = "device events"

    @classmethod
    @abstractmethod
    def vendor(cls) -> Any:
        """Return the vendor's torch module, such as torch.cuda."""

    @classmethod
    def count_devices(cls) -> int:
        return int(cls.vendor().device_count())

    @classmethod
    def read_device_name(cls, index: int) -> str:
        return str(cls.vendor().get_device_name(index))

    @classmethod
    def find_current_index(cls) -> int:
        return int(cls.vendor().current_device())

    def setup(self) -> None:
        self.vendor().set_device(self.index)

    def read_bus_address(self) -> str | None:
        properties = self.vendor().get_device_properties(self.index)
        # Read the properties with a default, because only some vendors' torch modules have them.
        domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        return None if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"

    def synchronize(self) -> None:
        self.vendor().synchronize(self.index)

    def record_mark(self) -> Any:
        event = self.vendor().Event(enable_timing=True)
        event.record()
        return event

    def wait_for_mark(self, mark: Any) -> None:
        mark.synchronize()

    def is_mark_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def compute_seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def estimate_timer_overhead(self) -> float | None:
        """Estimate the seconds that two events add to the measured time of the launch between them.

        The overhead is (r T(N) - T(rN)) / (r - 1). T(N) is the measured time of a kernel that spins for N cycles, and r
        is the length of the long spin divided by that of the short spin.

        Each measurement launches kernels of only one length. Times at even and odd positions in the queue differ by
        about 0.3 us. If short and long kernels alternated, one length would get all even positions and the other all
        odd positions, and this difference would distort the estimate.
        """
        spin = getattr(self.vendor(), "_sleep", None)
        if spin is None:
            return None
        ratio = _LONG_TO_SHORT_SPIN_RATIO
        short_and_long_seconds = [
            [self._measure_spin_seconds(spin, count * _SHORT_SPIN_CYCLES) for count in (1, ratio)]
            for _ in range(_OVERHEAD_ESTIMATE_COUNT)
        ]
        return statistics.median((ratio * short - long) / (ratio - 1) for short, long in short_and_long_seconds)

    def _measure_spin_seconds(self, spin: Callable[[int], object], cycles: int) -> float:
        """Return the median seconds between the events around kernels that spin for ``cycles`` cycles. Cache flushes
        before the kernels keep the device busy, so that it never waits for the host.
        """
        for _ in range(_FLUSHES_BEFORE_SPINS):
            self.flush_cache()
        marks = []
        for _ in range(_SPINS_PER_MEASUREMENT):
            self.flush_cache()
            start = self.record_mark()
            spin(cycles)
            marks.append((start, self.record_mark()))
        self.synchronize()
        return statistics.median(self.compute_seconds_between(start, end) for start, end in marks)

    def read_free_memory_bytes(self) -> int | None:
        vendor = self.vendor()
        free_bytes, _total = vendor.mem_get_info(self.index)
        return int(free_bytes + vendor.memory_reserved(self.index) - vendor.memory_allocated(self.index))

    def read_allocated_memory_bytes(self) -> int | None:
        return self._read_requested_bytes("current", self.vendor().memory_allocated)

    def read_peak_memory_bytes(self) -> int | None:
        return self._read_requested_bytes("peak", self.vendor().max_memory_allocated)

    def _read_requested_bytes(self, moment: str, read_allocated: Callable[[int], int]) -> int:
        """Return the bytes that tensors requested, without the allocator's rounding. If torch does not count requested
        bytes, return the result of ``read_allocated``. ``moment``: "current" or "peak".
        """
        requested = self.vendor().memory_stats(self.index).get(f"requested_bytes.all.{moment}")
        return int(read_allocated(self.index) if requested is None else requested)

    def read_peak_reserved_memory_bytes(self) -> int | None:
        reserved = self.vendor().memory_stats(self.index).get("reserved_bytes.all.peak")
        return None if reserved is None else int(reserved)

    def reset_peak_memory(self) -> None:
        self.vendor().reset_peak_memory_stats(self.index)

    def release_cached_memory(self) -> None:
        self.vendor().empty_cache()


class StreamQueue(SecondQueue):
    """A torch stream that serves as the second queue of an accelerator.

    - ``vendor``: the vendor's torch module, such as torch.cuda. ``index``: the device's index.
    - ``record_mark``: the method ``Backend.record_mark``, which inserts a mark into the current stream.
    """

    def __init__(self, vendor: Any, index: int, record_mark: Callable[[], Any]) -> None:
        self._vendor, self._stream, self._record_mark = vendor, vendor.Stream(index), record_mark

    def fork(self) -> None:
        self._stream.wait_stream(self._vendor.current_stream())

    def launch(self, call: Callable[[], object]) -> None:
        with self._vendor.stream(self._stream):
            call()

    def record_mark(self) -> Any:
        with self._vendor.stream(self._stream):
            return self._record_mark()

    def join(self) -> None:
        self._vendor.current_stream().wait_stream(self._stream)


class MultiStreamBackend(AcceleratorBackend):
    """The backend of a device with torch streams. It can run work in a second queue at the same time."""

    @functools.cached_property
    def _stream_queue(self) -> StreamQueue:
        return StreamQueue(self.vendor(), self.index, self.record_mark)

    def get_second_queue(self) -> SecondQueue | None:
        return self._stream_queue if hasattr(self.vendor(), "Stream") else None
