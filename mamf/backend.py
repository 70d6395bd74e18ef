"""The contract of a backend: the adapter of one vendor's device.

The class answers for the machine (is it usable, how many devices); an instance is one opened device. Everything above
this file measures through these methods alone, so a new accelerator is one file and one line of packaging metadata.
``mamf.testing.BackendContract`` is the test suite that an adapter must pass.

Time is asked of the backend (``now``, ``sleep``), so the regimes run unchanged in the virtual time of
``mamf.testing.SimulatedBackend``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from mamf.dtypes import DTYPES
from mamf.regime_traits import BurstTraits, SustainedTraits

#: The backend that computes times instead of measuring them, for tests.
SIMULATED = "simulated"
MIB = 2**20


@dataclass(frozen=True)
class Unavailable:
    """Why something cannot be used here, and the command or step that would change it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass(frozen=True)
class DeviceInfo:
    """What a result must say about the device. None means: the vendor's libraries do not tell."""

    backend: str
    index: int
    name: str
    vendor: str
    architecture: str | None = None
    compute_units: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    max_clock_hz: float | None = None
    power_limit_watts: float | None = None
    driver: str | None = None
    uuid_hash: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    is_accelerator: bool = True


@dataclass(frozen=True)
class Reading:
    """Telemetry at one moment. ``joules`` counts from an arbitrary start, so only differences mean something."""

    clock_hz: float | None = None
    watts: float | None = None
    joules: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@runtime_checkable
class Telemetry(Protocol):
    """Reads the sensors of one device. A sensor that cannot be read is None in the reading; reading never raises.

    ``energy`` asks for joules too: an energy counter can take milliseconds to answer, far too long inside a burst.
    """

    def read(self, energy: bool = False) -> Reading: ...


@dataclass(frozen=True)
class Advice:
    """One finding about the machine: what it costs the measurement and the exact command that mends it."""

    check: str
    verdict: Literal["ok", "warning", "unknown"]
    finding: str
    cost: str = ""
    command: str = ""


class Backend(ABC):
    """One device of one vendor. Opening it (``Backend(index)``) does the vendor's setup inside this process only."""

    name: ClassVar[str]
    is_accelerator: ClassVar[bool] = True
    #: "device events", or "host clock" where the vendor's events are missing or cannot be trusted.
    timer: ClassVar[str]
    burst_traits: ClassVar[BurstTraits] = BurstTraits()
    sustained_traits: ClassVar[SustainedTraits] = SustainedTraits()
    default_dtype: str = "bfloat16"
    #: The family of runtimes whose code the device runs, by which libraries ship kernels: cuda, hip, sycl, synapse,
    #: metal, host; whoever sells the device.
    runtime: ClassVar[str] = ""
    #: Flags and environment variables that this vendor's libraries read and that change results.
    environment_variables: ClassVar[tuple[str, ...]] = ()

    index: int
    info: DeviceInfo
    #: The sensors, or why they cannot be read.
    telemetry: Telemetry | Unavailable

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device of this index. Raises UnavailableError when there is none."""

    @classmethod
    @abstractmethod
    def unavailable(cls) -> Unavailable | None:
        """Why no device of this vendor can be used here, or None. Never raises; may import the vendor's library."""

    @classmethod
    @abstractmethod
    def device_count(cls) -> int:
        """Devices visible to this process; asked only when available."""

    @classmethod
    def device_name(cls, index: int) -> str:
        """The device's name, without opening more of it than that takes."""
        return cls(index).info.name

    @classmethod
    def current_index(cls) -> int:
        """The device that this process uses now; asked only when available."""
        return 0

    # -- the device's queue ------------------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything queued has run."""

    def submit(self) -> None:
        """Hand over what was launched, where the vendor's library gathers launches before running them (lazy mode)."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in the device's queue, between what was queued before and what comes after."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Return when the device has reached ``mark``; later work may still run."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Device seconds from mark to mark, both reached."""

    def timer_overhead(self) -> float | None:
        """Estimate the seconds that two marks add to a launch between them, beyond the kernel's own time; None if this
        backend cannot. An estimate that cannot be true is refused by its caller (mamf.timers).
        """
        return None

    @abstractmethod
    def flush_cache(self, size: int | None = None) -> None:
        """Queue a write over ``size`` bytes (default: twice the last-level cache), evicting the operands."""

    def profiler_window(self, name: str) -> AbstractContextManager[object]:
        """What is launched within is what a profiler of the vendor records, in a range of this name; nothing queued
        before runs within, and everything launched within has run when it ends. Does nothing where there is no such
        profiler, or none is attached.
        """
        return nullcontext()

    def profiler_range(self, name: str) -> AbstractContextManager[object] | None:
        """What is launched within stands in a range of this name in what a profiler of the vendor records; ranges may
        hold one another. Waits for nothing. None where no such profiler reads ranges.
        """
        return None

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def operand_pool(self, data: str, seed: int) -> OperandPool:
        """An empty pool whose operands are filled with ``data`` (see mamf.kernel.DATA)."""

    @abstractmethod
    def free_memory(self) -> int | None:
        """Bytes that can still be allocated, or None if the vendor does not tell."""

    def allocated_memory(self) -> int | None:
        """Bytes allocated now by this process, as ``peak_memory`` counts them, or None."""
        return None

    @abstractmethod
    def peak_memory(self) -> int | None:
        """Most bytes ever allocated since the last ``reset_peak_memory``, or None."""

    def peak_reserved_memory(self) -> int | None:
        """Most bytes that the process took of the device since the last ``reset_peak_memory``, blocks at hand that
        nobody uses among them; None where the vendor does not tell.
        """
        return None

    def reset_peak_memory(self) -> None:
        """Start counting ``peak_memory`` anew, where the vendor can."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an exception means that the device's memory is exhausted (and not that something broke)."""

    def release_memory(self) -> None:
        """Give cached, unused memory back to the device."""

    # -- what the vendor knows ---------------------------------------------------------------------------------------

    def resolve_dtype(self, name: str) -> str:
        """The full dtype name; ``fp8`` is what this device understands by it."""
        return "float8_e4m3fn" if name == "fp8" else name

    def unsupported_dtype(self, dtype: str) -> str | None:
        """Why this device cannot multiply ``dtype`` at all, or None."""
        return None if dtype in DTYPES else f"{self.name} knows no dtype {dtype}"

    def without_compiler(self) -> Unavailable | None:
        """Why torch's compiler makes no kernels for this device, or None."""
        return None

    def bus_address(self) -> str | None:
        """Where the device sits, such as its PCI address, for who stands before the machine; in no log."""
        return None

    def digest(self, result: object) -> str | None:
        """A hash of every bit of what a launch returned; None where it returned nothing that can be read."""
        return None

    def without_counters(self) -> Unavailable | None:
        """Why mamf reads no hardware counters of this device, and what can be had instead; None where it does."""
        return Unavailable(
            f"mamf reads hardware counters by NVIDIA's ncu, and {self.info.name} is no device of theirs",
            "rates need none: 'mamf sweep', 'mamf attention'; 'mamf run' is for the vendor's own profiler",
        )

    def advice(self) -> list[Advice]:
        """What a user should know about this machine before believing a number. Changes nothing."""
        return []

    def settings(self) -> dict[str, str]:
        """Library flags that change results, as they stand now."""
        return {}

    # -- host time ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Host seconds from an arbitrary start."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let the device idle."""
        time.sleep(seconds)


class OperandPool(ABC):
    """Named device buffers, each allocated once at the largest size asked for and viewed by every smaller problem.

    Allocation between launches would perturb the measurement, and refilling would dominate a sweep.
    """

    @abstractmethod
    def take(self, name: str, elements: int, dtype: str, fill: bool = True) -> Any:
        """A flat view of ``elements`` elements. Grows the buffer when it is too small; the backend's OOM error
        surfaces.
        """

    @abstractmethod
    def release(self) -> None:
        """Free every buffer."""
