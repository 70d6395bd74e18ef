"""Base classes of backends for devices that torch supports: opening, memory, operands and two kinds of timer.

An adapter in ``backends/`` derives from ``AcceleratorBackend`` if the vendor's torch module has events and memory
statistics (``torch.cuda``, ``torch.xpu``, ``torch.hpu``), else from ``HostTimedBackend``, and adds the rest.
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

from mamf.backend import MIB, Backend, DeviceInfo, OperandPool, Queue, Telemetry, Unavailable, add_sharing_to_name
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError

# Number of elements to draw at a time for 8-bit dtypes, because their values are drawn in float32 first.
_ELEMENTS_PER_DRAW = 2**26
_DEFAULT_FLUSH_BYTES = 256 * MIB
# Kernels with known cycles calibrate the timer: 5 us at 2 GHz, and eight times as long. If the clock changes by 1 %
# between the two, the estimate shifts by 0.05 us. The median of this many rounds repeats within 0.1 us.
_SHORT_SPIN_CYCLES = 10_000
_LONG_TO_SHORT_SPIN_RATIO = 8
_OVERHEAD_ESTIMATE_COUNT = 32
_SPINS_PER_MEASUREMENT = 8
_FLUSHES_BEFORE_SPINS = 20


def to_torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype that stores ``name``: tf32 is float32 in memory."""
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

    def take(self, name: str, elements: int, dtype: str, fill: bool = True) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != to_torch_dtype(dtype) or buffer.numel() < elements:
            buffer = None
            self._buffers.pop(name, None)
            require_memory(self._backend, elements * DTYPES[dtype].itemsize)
            buffer = torch.empty(elements, dtype=to_torch_dtype(dtype), device=self._backend.device)
            if fill:
                self._fill(buffer, name)
            self._buffers[name] = buffer
        return buffer[:elements]

    def release(self) -> None:
        self._buffers.clear()

    def _fill(self, buffer: torch.Tensor, name: str) -> None:
        generator = torch.Generator(device=buffer.device)
        generator.manual_seed(self._seed + zlib.crc32(name.encode()))
        if buffer.dtype == torch.int32:  # for overwriting C of an int8 matmul: any integers will do
            buffer.random_(-128, 128, generator=generator)
            return
        if buffer.dtype.itemsize > 1:
            fill_random(buffer, self._data, generator)
            return
        for chunk in buffer.split(_ELEMENTS_PER_DRAW):
            values = torch.empty(chunk.shape, dtype=torch.float32, device=buffer.device)
            fill_random(values, self._data, generator)
            chunk.copy_(scale_to_int8(values, self._data) if buffer.dtype == torch.int8 else values)


def require_memory(backend: Backend, nbytes: int) -> None:
    """Raise MemoryError if ``nbytes`` are not free. A system that overcommits would kill the process later."""
    free = backend.free_memory()
    if free is not None and nbytes > free:
        raise MemoryError(f"out of memory: {nbytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")


def fill_random(values: torch.Tensor, data: str, generator: torch.Generator) -> None:
    """Fill ``values`` in place. ``data``: normal (mean 0, deviation 1), wide (normal, times powers of two), uniform (-1
    to 1), integers (-2 to 2) or zeros.
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


def scale_to_int8(values: torch.Tensor, data: str) -> torch.Tensor:
    """Scale normal (to 4 sigma) and uniform values to -127..127 and round them; other data are integers already."""
    scale = {"normal": 127 / 4, "uniform": 127.0}.get(data, 1.0)
    return values.mul_(scale).round_().clamp_(-127, 127)


class TorchBackend(Backend):
    """A device that torch addresses as ``device_type:index``."""

    has_tensors = True
    device_type: str
    device: torch.device

    def __init__(self, index: int = 0) -> None:
        reason = self.unavailable()
        if reason is not None:
            raise UnavailableError(f"backend {self.name} is not available: {reason}")
        count = self.device_count()
        if not 0 <= index < count:
            raise UnavailableError(f"{self.name} has no device {index}; it has {count} (0 to {count - 1})")
        self.index = index
        self.device = self.open_device()
        # Buffers by size, because slicing a single buffer would take the host as long as queueing the flush.
        self._flush_buffers: dict[int, torch.Tensor] = {}
        self.setup()
        self.telemetry = self.open_telemetry()
        info = self.describe()
        self.info = replace(info, name=add_sharing_to_name(info.name, self.sharing()))
        # A cache size that is measured later (mamf.engine.traits) only enlarges the flush: a larger cache may exist.
        self._flush_bytes = 2 * (self.info.cache_bytes or 0) or _DEFAULT_FLUSH_BYTES

    def open_device(self) -> torch.device:
        return torch.device(self.device_type, self.index)

    def setup(self) -> None:
        """Set up what the vendor needs in this process. Changes nothing on the machine."""

    @abstractmethod
    def describe(self) -> DeviceInfo: ...

    def open_telemetry(self) -> Telemetry | Unavailable:
        return Unavailable(f"mamf cannot read sensors of {self.name} devices", "the log will lack power and clock")

    def flush_cache(self, size: int | None = None) -> None:
        size = size or max(self._flush_bytes, 2 * (self.info.cache_bytes or 0))
        buffer = self._flush_buffers.get(size)
        if buffer is None:
            buffer = self._flush_buffers[size] = torch.empty(size, dtype=torch.int8, device=self.device)
        buffer.zero_()

    def operand_pool(self, data: str, seed: int) -> OperandPool:
        return TorchOperandPool(self, data, seed)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error).lower()

    def digest(self, result: object) -> str | None:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if not tensors:
            return None
        hash_of_tensors = hashlib.sha256()
        for tensor in tensors:
            hash_of_tensors.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        return hash_of_tensors.hexdigest()

    def settings(self) -> dict[str, str]:
        return {"float32_matmul_precision": torch.get_float32_matmul_precision()}


class HostTimedBackend(TorchBackend):
    """A device that is timed with the host's clock around a synchronize, because it has no reliable events."""

    timer = "host clock"

    def mark(self) -> float:
        self.synchronize()
        return self.now()

    def wait(self, mark: float) -> None:
        pass

    def seconds_between(self, start: SupportsFloat, end: SupportsFloat) -> float:
        return float(end) - float(start)


class AcceleratorBackend(TorchBackend):
    """A device that is timed with events in its queue. ``vendor``: returns the torch module of the device."""

    timer = "device events"

    @classmethod
    @abstractmethod
    def vendor(cls) -> Any:
        """Return the vendor's torch module, such as torch.cuda."""

    @classmethod
    def device_count(cls) -> int:
        return int(cls.vendor().device_count())

    @classmethod
    def device_name(cls, index: int) -> str:
        return str(cls.vendor().get_device_name(index))

    @classmethod
    def current_index(cls) -> int:
        return int(cls.vendor().current_device())

    def setup(self) -> None:
        self.vendor().set_device(self.index)

    def bus_address(self) -> str | None:
        properties = self.vendor().get_device_properties(self.index)
        # Not all vendors have these properties.
        domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
        return None if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"

    def synchronize(self) -> None:
        self.vendor().synchronize(self.index)

    def mark(self) -> Any:
        event = self.vendor().Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def timer_overhead(self) -> float | None:
        """Estimate the overhead from kernels of N and rN cycles: (r T(N) - T(rN)) / (r - 1) is the time of a window
        without cycles.

        A train has kernels of one length only, like a burst. Windows at even and odd positions in the queue differ by
        about 0.3 us. With alternating lengths each length would get only one kind of position, and the estimate would
        multiply that error by up to (r + 1) / (r - 1), which is 3 for r = 2.
        """
        spin = getattr(self.vendor(), "_sleep", None)
        if spin is None:
            return None
        ratio = _LONG_TO_SHORT_SPIN_RATIO
        rounds = [
            [self._measure_spin_seconds(spin, count * _SHORT_SPIN_CYCLES) for count in (1, ratio)]
            for _ in range(_OVERHEAD_ESTIMATE_COUNT)
        ]
        return statistics.median((ratio * short - long) / (ratio - 1) for short, long in rounds)

    def _measure_spin_seconds(self, spin: Callable[[int], object], cycles: int) -> float:
        """Return the median window of a train of kernels. They follow flushes, so that the host stays ahead of the
        device.
        """
        for _ in range(_FLUSHES_BEFORE_SPINS):
            self.flush_cache()
        marks = []
        for _ in range(_SPINS_PER_MEASUREMENT):
            self.flush_cache()
            start = self.mark()
            spin(cycles)
            marks.append((start, self.mark()))
        self.synchronize()
        return statistics.median(self.seconds_between(start, end) for start, end in marks)

    def free_memory(self) -> int | None:
        vendor = self.vendor()
        free, _total = vendor.mem_get_info(self.index)
        cached = vendor.memory_reserved(self.index) - vendor.memory_allocated(self.index)
        return int(free + cached)

    def allocated_memory(self) -> int | None:
        return self._read_requested_bytes("current", self.vendor().memory_allocated)

    def peak_memory(self) -> int | None:
        return self._read_requested_bytes("peak", self.vendor().max_memory_allocated)

    def _read_requested_bytes(self, moment: str, allocated: Callable[[int], int]) -> int:
        """Return the bytes requested, which do not depend on the allocator's cache; if unknown, the bytes allocated."""
        requested = self.vendor().memory_stats(self.index).get(f"requested_bytes.all.{moment}")
        return int(allocated(self.index) if requested is None else requested)

    def peak_reserved_memory(self) -> int | None:
        reserved = self.vendor().memory_stats(self.index).get("reserved_bytes.all.peak")
        return None if reserved is None else int(reserved)

    def reset_peak_memory(self) -> None:
        self.vendor().reset_peak_memory_stats(self.index)

    def release_memory(self) -> None:
        self.vendor().empty_cache()


class StreamQueue(Queue):
    """A stream as the second queue of an accelerator. ``mark``: the backend's method."""

    def __init__(self, vendor: Any, index: int, mark: Callable[[], Any]) -> None:
        self._vendor, self._stream, self._mark = vendor, vendor.Stream(index), mark

    def fork(self) -> None:
        self._stream.wait_stream(self._vendor.current_stream())

    def launch(self, call: Callable[[], object]) -> None:
        with self._vendor.stream(self._stream):
            call()

    def mark(self) -> Any:
        with self._vendor.stream(self._stream):
            return self._mark()

    def join(self) -> None:
        self._vendor.current_stream().wait_stream(self._stream)


class StreamedBackend(AcceleratorBackend):
    """A device with streams."""

    @functools.cached_property
    def _stream_queue(self) -> StreamQueue:
        return StreamQueue(self.vendor(), self.index, self.mark)

    def second_queue(self) -> Queue | None:
        return self._stream_queue if hasattr(self.vendor(), "Stream") else None
