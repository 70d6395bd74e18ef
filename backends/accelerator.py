"""Measure devices of torch.accelerator for which mamf has no other backend, such as a vendor's PrivateUse1 device.

The vendor's torch module (``torch.npu`` for the device type ``npu``) usually resembles torch.cuda. If the module lacks
a function, this backend calls the corresponding function of torch.accelerator. When this backend opens a device, it
tests which functions work.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mamf.backend import MIB, CheckResult, DeviceInfo, OperandPool, Unavailability
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError, describe_error
from mamf.machine.environment import get_package_version
from mamf.plugins.discovery import BACKEND_GROUP, find_entry_points_by_name, load_backend_class
from mamf.torch_backend import MultiStreamBackend, TorchOperandPool, get_torch_dtype, hash_identifier

ResultT = TypeVar("ResultT")
_BACKEND_NAME = "accelerator"
#: Functions whose name in torch.accelerator differs from the name in torch.cuda and in vendors' modules. The keys are
#: the names in torch.cuda.
_TORCH_ACCELERATOR_NAMES = {
    "current_device": "current_device_index",
    "mem_get_info": "get_memory_info",
    "set_device": "set_device_index",
}
#: Types of errors that a vendor's module may raise if a function is missing or unfinished.
_MISSING_FUNCTION_ERRORS = (
    AssertionError,
    AttributeError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
_CACHE_SIZE_PROPERTIES = ("L2_cache_size", "last_level_cache_size", "l2_cache_size")
_DEFAULT_DTYPE_CANDIDATES = ("bfloat16", "float16", "float32")
# To test whether the device's events work, mamf times a load of at least 0.02 s with events and with the host clock. A
# shorter load would show mostly the overhead of launches. The events work if the two times differ by at most 10 %.
_MIN_LOAD_SECONDS, _LOAD_BUFFER_BYTES, _MAX_LOAD_LAUNCHES, _MAX_TIMER_ERROR_SHARE = 0.02, 64 * MIB, 4096, 0.1
# Number of comparisons between events and the host clock. One agreement is enough, because a busy host may disturb the
# other comparisons.
_TIMER_COMPARISON_COUNT = 3
_EMPTY_INTERVAL_COUNT, _MAX_RANDOM_VALUE_COUNT = 32, 2**22


def _call_or_none(query: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """Return the result of ``query``; None if the vendor's torch module does not implement the function."""
    try:
        return query(*arguments)
    except _MISSING_FUNCTION_ERRORS:
        return None


def _return_none_if_missing(method: Callable[..., Any]) -> Any:
    """Wrap a method of the backend so that it returns None if the result is 0, or if the vendor's torch module lacks a
    function that the method calls.
    """
    return lambda backend: _call_or_none(method, backend) or None


class VendorModule:
    """The vendor's torch module. If it lacks a function, the function of torch.accelerator takes its place."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._module = torch.get_device_module(device_type)

    def __getattr__(self, name: str) -> Any:
        module_attribute = getattr(self._module, name, None)
        if module_attribute is not None:
            return module_attribute
        if name == "Event":
            return functools.partial(torch.Event, device=self._device_type)
        return getattr(torch.accelerator, _TORCH_ACCELERATOR_NAMES.get(name, name))


class HostFilledPool(TorchOperandPool):
    """An operand pool that generates random values on the host, for devices without a random number generator."""

    def _fill_with_random_values(self, buffer: torch.Tensor, name: str) -> None:
        random_values = torch.empty(min(buffer.numel(), _MAX_RANDOM_VALUE_COUNT), dtype=buffer.dtype)
        super()._fill_with_random_values(random_values, name)
        for part in buffer.split(_MAX_RANDOM_VALUE_COUNT):
            part.copy_(random_values[: part.numel()])


class AnyAcceleratorBackend(MultiStreamBackend):
    name = _BACKEND_NAME
    is_generic = True

    @classmethod
    def find_device_type(cls) -> str:
        """Return the device type of torch's accelerator, such as "npu"."""
        return str(torch.accelerator.current_accelerator().type)  # type: ignore[union-attr]

    @classmethod
    def vendor(cls) -> Any:
        return VendorModule(cls.find_device_type())

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        if not hasattr(torch, "accelerator"):
            return Unavailability(
                f"this torch ({torch.__version__}) has no torch.accelerator",
                "install torch 2.6 or newer, and the vendor's package for it",
            )
        if _call_or_none(lambda: torch.accelerator.is_available()) is not True:
            return Unavailability(
                "torch.accelerator sees no device",
                "install the vendor's package for torch, which registers its devices when torch is imported",
            )
        dedicated_backend = cls.find_dedicated_backend(cls.find_device_type())
        if dedicated_backend is not None:
            return Unavailability(
                f"mamf has a backend for {cls.find_device_type()} devices", f"use --backend {dedicated_backend}"
            )
        return None

    @classmethod
    def find_dedicated_backend(cls, device_type: str) -> str | None:
        """Return the name of an available backend that is made for this device type; None if there is none."""
        for name in find_entry_points_by_name(BACKEND_GROUP).keys() - {_BACKEND_NAME}:
            try:
                backend_class = load_backend_class(name)
                if (
                    getattr(backend_class, "device_type", None) == device_type
                    and backend_class.explain_unavailability() is None
                ):
                    return name
            except Exception:  # A broken backend cannot be used.
                continue
        return None

    @classmethod
    def call_or_none(cls, name: str, *arguments: Any) -> Any:
        """Return the result of the function ``name`` of the vendor's torch module; None if it is not implemented."""
        return _call_or_none(lambda: getattr(cls.vendor(), name)(*arguments))

    @classmethod
    def read_device_name(cls, index: int) -> str:
        # In some vendors' modules get_device_name ignores the index, but get_device_properties does not.
        name = getattr(cls.call_or_none("get_device_properties", index), "name", None) or cls.call_or_none(
            "get_device_name", index
        )
        return str(name or cls.call_or_none("get_device_name", index) or cls.find_device_type())

    def open_device(self) -> torch.device:
        self.device_type = self.find_device_type()
        return super().open_device()

    def setup(self) -> None:
        super().setup()
        self._has_generator = _call_or_none(torch.Generator, self.device) is not None
        self.default_dtype = next(filter(self._can_multiply, _DEFAULT_DTYPE_CANDIDATES), _DEFAULT_DTYPE_CANDIDATES[-1])
        launch_load = self._make_busy_work_function()
        reasons = [self._explain_unusable_events(launch_load) for _ in range(_TIMER_COMPARISON_COUNT)]
        self.reason_events_are_unusable = reasons[0] if all(reasons) else ""
        self.timer = "host clock" if self.reason_events_are_unusable else "device events"

    def _can_multiply(self, dtype: str) -> bool:
        matrix = _call_or_none(lambda: torch.ones(32, 32, device=self.device, dtype=get_torch_dtype(dtype)))
        return matrix is not None and _call_or_none(lambda: torch.mm(matrix, matrix)) is not None

    def _make_busy_work_function(self) -> Callable[[], None]:
        """Return a function that launches enough work to keep the device busy for at least _MIN_LOAD_SECONDS.

        Raises UnavailableError if synchronize does not wait for this work, because mamf could not time the device.
        """
        buffer, launch_count = torch.zeros(_LOAD_BUFFER_BYTES, dtype=torch.int8, device=self.device), 1

        def launch_load() -> None:
            for _ in range(launch_count):
                buffer.zero_()

        def time_busy_work() -> tuple[float, float]:
            """Run the load and return two times in seconds. The first is how long the load kept running after
            synchronize returned (about 0 if synchronize works). The second is how long the launches and synchronize
            took.
            """
            self.synchronize()
            start_seconds = self.now()
            launch_load()
            self.synchronize()
            seconds = self.now() - start_seconds
            buffer[:1].cpu()  # This read waits for all queued work.
            return self.now() - start_seconds - seconds, seconds

        time_busy_work()  # Ignore the time of the first launches, which may compile kernels.
        while sum(time_busy_work()) < _MIN_LOAD_SECONDS and launch_count < _MAX_LOAD_LAUNCHES:
            launch_count *= 2
        wait_seconds, seconds = min(time_busy_work() for _ in range(_TIMER_COMPARISON_COUNT))
        if wait_seconds > max(seconds, _MIN_LOAD_SECONDS / 2):
            fault = (
                f"synchronize returned after {seconds * 1e3:.1f} ms, {wait_seconds * 1e3:.1f} ms before the work ended"
            )
            raise UnavailableError(f"{self.find_device_type()} devices cannot be timed: {fault}")
        return launch_load

    def _explain_unusable_events(self, launch_load: Callable[[], None]) -> str:
        """Return why events cannot time the load; an empty string if the events agree with the host clock."""
        try:
            start_seconds = self.now()
            start = super().record_mark()
            launch_load()
            end = super().record_mark()
            self.synchronize()
            seconds = self.now() - start_seconds
            elapsed = super().compute_seconds_between(start, end)
        except _MISSING_FUNCTION_ERRORS as error:
            return f"the timing events of the device do not work: {describe_error(error)}"
        if abs(elapsed - seconds) <= _MAX_TIMER_ERROR_SHARE * seconds:
            return ""
        return f"device events measure {elapsed * 1e3:.3g} ms for work that takes {seconds * 1e3:.3g} ms"

    # -- time --------------------------------------------------------------------------------------------------------

    def record_mark(self) -> Any:
        if not self.reason_events_are_unusable:
            return super().record_mark()
        self.synchronize()
        return self.now()

    def wait_for_mark(self, mark: Any) -> None:
        if not self.reason_events_are_unusable:
            super().wait_for_mark(mark)

    def is_mark_reached(self, mark: Any) -> bool:
        return bool(self.reason_events_are_unusable) or super().is_mark_reached(mark)

    def compute_seconds_between(self, start: Any, end: Any) -> float:
        return float(end - start) if self.reason_events_are_unusable else super().compute_seconds_between(start, end)

    def estimate_timer_overhead(self) -> float | None:
        """Return how many seconds two marks (events, or readings of the host clock) add to the measured time of a
        launch.

        For events, AcceleratorBackend estimates the overhead. For the host clock, return the median time between two
        marks with no launch between them.
        """
        if not self.reason_events_are_unusable:
            return super().estimate_timer_overhead()
        intervals = [(self.record_mark(), self.record_mark()) for _ in range(_EMPTY_INTERVAL_COUNT)]
        return statistics.median(self.compute_seconds_between(start, end) for start, end in intervals)

    # -- memory (None if the vendor does not report it) --------------------------------------------------------------

    def make_operand_pool(self, data: str, seed: int) -> OperandPool:
        return super().make_operand_pool(data, seed) if self._has_generator else HostFilledPool(self, data, seed)

    read_free_memory_bytes = _return_none_if_missing(MultiStreamBackend.read_free_memory_bytes)
    read_allocated_memory_bytes = _return_none_if_missing(MultiStreamBackend.read_allocated_memory_bytes)
    read_peak_memory_bytes = _return_none_if_missing(MultiStreamBackend.read_peak_memory_bytes)
    read_peak_reserved_memory_bytes = _return_none_if_missing(MultiStreamBackend.read_peak_reserved_memory_bytes)
    reset_peak_memory = _return_none_if_missing(MultiStreamBackend.reset_peak_memory)
    release_cached_memory = _return_none_if_missing(MultiStreamBackend.release_cached_memory)
    read_bus_address = _return_none_if_missing(MultiStreamBackend.read_bus_address)

    # -- description and checks of the device ------------------------------------------------------------------------

    def describe(self) -> DeviceInfo:
        device_type, properties = self.find_device_type(), self.call_or_none("get_device_properties", self.index)
        cache_bytes = next((size for name in _CACHE_SIZE_PROPERTIES if (size := getattr(properties, name, None))), None)
        _free, memory_bytes = self.call_or_none("mem_get_info", self.index) or (None, None)
        uuid, package = getattr(properties, "uuid", None), f"torch_{device_type}"
        version = get_package_version(package)
        return DeviceInfo(
            backend=self.name,
            index=self.index,
            name=self.read_device_name(self.index),
            vendor=device_type,
            compute_units=getattr(properties, "multi_processor_count", None) or None,
            memory_bytes=getattr(properties, "total_memory", None) or memory_bytes or None,
            cache_bytes=cache_bytes,
            uuid_hash=hash_identifier(str(uuid)) if uuid else None,
            versions={package: version} if version else {},
        )

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        if dtype == "tf32":
            return "torch.accelerator has no tf32; use float32"
        if (
            dtype in DTYPES
            and _call_or_none(lambda: torch.zeros(16, device=self.device).to(get_torch_dtype(dtype))) is None
        ):
            return f"{self.find_device_type()} devices do not support {dtype}; use another dtype"
        return super().explain_unsupported_dtype(dtype)

    def explain_missing_compiler(self) -> Unavailability | None:
        return Unavailability(
            f"mamf cannot use torch.compile on {self.find_device_type()}",
            "run 'mamf kernels' to see which kernels do not need it",
        )

    def check_machine(self) -> list[CheckResult]:
        if not self.reason_events_are_unusable:
            return [CheckResult("timer", "ok", "device events agree with the host clock")]
        effect, remedy = (
            "times of launches below 1 ms include host time",
            "measure launches of several milliseconds",
        )
        return [
            CheckResult(
                "timer",
                "warning",
                f"{self.reason_events_are_unusable}, so mamf times launches with the host clock",
                effect,
                remedy,
            )
        ]
