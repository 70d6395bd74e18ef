"""The contract of a backend: the adapter for one vendor's devices.

The class describes the machine (is it usable, how many devices); an instance is one opened device. All measurements go
through these methods, so support for a new accelerator takes one file and one line of packaging metadata. An adapter
must pass the test suite ``mamf.testing.BackendContract``.

The clock belongs to the backend (``now``, ``sleep``), so the regimes run unchanged in the virtual time of
``mamf.testing.SimulatedBackend``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from mamf.calibration import ASSUMED_TRAITS, BurstTraits, SustainedTraits
from mamf.dtypes import DTYPES

#: The backend that computes times instead of measuring them, for tests.
SIMULATED = "simulated"
MIB = 2**20
#: Environment variable of processes that mamf starts: the pid of the process that starts them. That process may have
#: the device open without using it.
LEADER_PID_VARIABLE = "MAMF_LEADER_PID"
# The text in a device's name before the ways in which its card is shared.
_SHARED_MARK = " (shared: "


@dataclass(frozen=True)
class Unavailable:
    """Why something cannot be used here, and the command or action that would change it."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


@dataclass(frozen=True)
class DeviceInfo:
    """The device as results describe it. None: the vendor's libraries do not report this field."""

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


def add_sharing_to_name(name: str, ways: Iterable[str]) -> str:
    """Add to a device's name the ways in which its card is shared: "NVIDIA H200 (shared: other processes)". Return the
    name unchanged if there are none.

    No whole card has such a name, so a shared card has no peak, and ceilings and tables never mix the two.
    """
    all_ways = dict.fromkeys([*parse_sharing(name), *ways])
    return f"{name.partition(_SHARED_MARK)[0]}{_SHARED_MARK}{', '.join(all_ways)})" if all_ways else name


def parse_sharing(name: str) -> tuple[str, ...]:
    """Return the ways in which a device of this name shares its card; empty for a whole card."""
    ways = name.partition(_SHARED_MARK)[2].removesuffix(")")
    return tuple(ways.split(", ")) if ways else ()


def describe_sharing(device_name: str) -> str:
    """Say that a shared card has other figures than a whole card. Return an empty string for a whole card."""
    ways = ", ".join(parse_sharing(device_name))
    return (
        f"the card is shared ({ways}): its figures are not those of a whole card, and its peak is unknown"
        if ways
        else ""
    )


@dataclass(frozen=True)
class Reading:
    """Telemetry at one moment. ``joules`` counts from an arbitrary start, so only differences are meaningful."""

    clock_hz: float | None = None
    watts: float | None = None
    joules: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@runtime_checkable
class Telemetry(Protocol):
    """Reads the sensors of one device. A sensor that cannot be read gives None; reading never raises.

    ``energy`` requests joules too: an energy counter can take milliseconds to answer, far too long within a burst.
    """

    def read(self, energy: bool = False) -> Reading: ...


class Elapsed(NamedTuple):
    """The clock cycles of the median compute unit, and the seconds, between two stamps."""

    cycles: float
    seconds: float

    @property
    def clock_hz(self) -> float | None:
        """The mean clock; None if no time passed."""
        return self.cycles / self.seconds if self.seconds > 0 else None


@runtime_checkable
class ClockStamps(Protocol):
    """Measures the clock at which the compute units really ran, which sensors do not show.

    A stamp waits in the device's queue for all earlier work. Then each compute unit records its cycle counter and the
    time.
    """

    def stamp(self) -> Any:
        """Queue a stamp, and return it."""

    def between(self, start: Any, end: Any) -> Elapsed | None:
        """Return the cycles and seconds between two stamps that the device has reached, at most 100 stamps apart.
        Return None if no unit recorded both.
        """


@dataclass(frozen=True)
class Advice:
    """One finding about the machine: its effect on the measurement and the exact command that fixes it."""

    check: str
    verdict: Literal["ok", "warning", "unknown"]
    finding: str
    cost: str = ""
    command: str = ""


class Queue(ABC):
    """A second queue of a device. Its launches run at the same time as those in the queue of the backend's methods."""

    @abstractmethod
    def fork(self) -> None:
        """Make later launches in this queue wait for all work that is in the device's own queue now."""

    @abstractmethod
    def launch(self, call: Callable[[], object]) -> None:
        """Run ``call``, and put its launches into this queue."""

    @abstractmethod
    def mark(self) -> Any:
        """Insert a mark into this queue. ``Backend.wait`` and ``seconds_between`` take marks of both queues."""

    @abstractmethod
    def join(self) -> None:
        """Make later launches in the device's own queue wait for all work that is in this queue now."""


class Backend(ABC):
    """One device of one vendor. Opening it (``Backend(index)``) affects this process only."""

    name: ClassVar[str]
    is_accelerator: ClassVar[bool] = True
    #: Whether it serves devices of any kind. 'auto' prefers other available adapters of accelerators to it.
    is_generic: ClassVar[bool] = False
    #: "device events", or "host clock" if the vendor's events are missing or unreliable.
    timer: str
    #: How its devices react to load, calibrated or assumed. Runs measure assumed traits (mamf.engine.traits).
    burst_traits: BurstTraits = BurstTraits(remark=ASSUMED_TRAITS)
    sustained_traits: SustainedTraits = SustainedTraits(remark=ASSUMED_TRAITS)
    default_dtype: str = "bfloat16"
    #: The runtime that the device's code is compiled for: cuda, hip, sycl, synapse, metal or host. Libraries ship
    #: kernels per runtime, not per vendor.
    runtime: ClassVar[str] = ""
    #: Environment variables that this vendor's libraries read and that change results.
    environment_variables: ClassVar[tuple[str, ...]] = ()

    #: Whether ``idle_mark`` works with this device and driver.
    has_idle_marks: bool = False
    #: Whether ``capture`` records launches.
    has_graphs: ClassVar[bool] = False
    #: Whether operands and results are torch's tensors, so that another process can read and check them.
    has_tensors: ClassVar[bool] = False

    index: int
    info: DeviceInfo
    #: The sensors, or why they cannot be read.
    telemetry: Telemetry | Unavailable

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device with this index. Raises UnavailableError if there is no such device."""

    @classmethod
    @abstractmethod
    def unavailable(cls) -> Unavailable | None:
        """Return why no device of this vendor can be used here, or None. Never raises. May import the library."""

    @classmethod
    @abstractmethod
    def device_count(cls) -> int:
        """Return the number of devices visible to this process; called only if the backend is available."""

    @classmethod
    def device_name(cls, index: int) -> str:
        """Return the device's name. Override this if the name can be read without opening the device."""
        return cls(index).info.name

    @classmethod
    def current_index(cls) -> int:
        """Return the index of the device that this process uses now; called only if the backend is available."""
        return 0

    # -- the device's queue ------------------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all queued work has finished."""

    def submit(self) -> None:
        """Start the launches that the vendor's library has collected (lazy mode). Does nothing in other libraries."""

    @abstractmethod
    def mark(self) -> Any:
        """Insert a mark into the device's queue, after all work queued so far, and return it."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Return when the device has reached ``mark``; later work may still be running."""

    @abstractmethod
    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the device time in seconds between two marks that the device has reached."""

    def idle_mark(self, after: Any) -> Any | None:
        """Return a mark that the device reaches once it has finished all work of this process, in whatever queue.

        Called only if ``has_idle_marks``. ``after``: a mark that was queued before. None if the device has already
        reached ``after``: the time between the two marks would depend on the host.
        """
        return None

    def second_queue(self) -> Queue | None:
        """Return the device's second queue, the same at each call; None if it has none."""
        return None

    @property
    def stamps(self) -> ClockStamps | Unavailable:
        """Stamps of the compute units' clock, the same at each call, or why it has no stamps."""
        return Unavailable(
            f"mamf cannot read the cycle counters of {self.info.name}",
            "the column 'MHz requested' shows the clock that the driver reports",
        )

    def capture(self, launches: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], list[object]]:
        """Record these launches in one graph. Return a function that replays all of them, and the results of the
        launches, which each replay overwrites. Called only if ``has_graphs``.
        """
        raise NotImplementedError(f"{self.name} has no graphs of launches")

    def timer_overhead(self) -> float | None:
        """Estimate the seconds that two marks add to the time of the launch between them; None if this backend cannot
        estimate it. The caller rejects implausible estimates (mamf.measurement).
        """
        return None

    @abstractmethod
    def flush_cache(self, size: int | None = None) -> None:
        """Queue a write of ``size`` bytes (default: twice the last-level cache), which evicts the operands."""

    def profiler_window(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which the vendor's profiler records, in a range of this name. Earlier work has finished
        when it begins, and all launches within it have finished when it ends. Does nothing without an attached
        profiler.
        """
        return nullcontext()

    def profiler_range(self, name: str) -> AbstractContextManager[object] | None:
        """Return a context whose launches the vendor's profiler records in a range of this name; ranges may be nested.
        Does not synchronize. None if the vendor's profiler has no ranges.
        """
        return None

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def operand_pool(self, data: str, seed: int) -> OperandPool:
        """Make an empty pool that fills operands with ``data`` (see mamf.kernel.DATA)."""

    @abstractmethod
    def free_memory(self) -> int | None:
        """Return the bytes that can still be allocated, or None if the vendor does not report it."""

    def allocated_memory(self) -> int | None:
        """Return the bytes that this process has allocated now, counted as in ``peak_memory``, or None."""
        return None

    @abstractmethod
    def peak_memory(self) -> int | None:
        """Return the most bytes allocated at once since the last ``reset_peak_memory``, or None."""

    def peak_reserved_memory(self) -> int | None:
        """Return the most bytes that the process has reserved on the device since the last ``reset_peak_memory``,
        including cached, unused blocks; None if the vendor does not report it.
        """
        return None

    def reset_peak_memory(self) -> None:
        """Restart the count of ``peak_memory``, if the vendor supports it."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the device has no memory left; False for all other failures."""

    def release_memory(self) -> None:
        """Return cached, unused memory to the device."""

    # -- what the vendor knows ---------------------------------------------------------------------------------------

    def resolve_dtype(self, name: str) -> str:
        """Return the full dtype name; ``fp8`` becomes the 8-bit format that this device supports."""
        return "float8_e4m3fn" if name == "fp8" else name

    def unsupported_dtype(self, dtype: str) -> str | None:
        """Return why this device cannot multiply ``dtype``, or None."""
        return None if dtype in DTYPES else f"{self.name} has no dtype {dtype}"

    def without_compiler(self) -> Unavailable | None:
        """Return why torch.compile cannot generate kernels for this device, or None."""
        return None

    def bus_address(self) -> str | None:
        """Return the device's address in the machine, such as its PCI address, to find a faulty card. Never logged."""
        return None

    def digest(self, result: object) -> str | None:
        """Return a hash of all bits of a launch's result; None if the result cannot be read."""
        return None

    def without_counters(self) -> Unavailable | None:
        """Return why mamf cannot read hardware counters on this device, and the alternative; None if it can."""
        return Unavailable(
            f"mamf reads hardware counters with NVIDIA's ncu, which does not support {self.info.name}",
            "'mamf sweep' and 'mamf attention' need no counters; 'mamf run' works under the vendor's own profiler",
        )

    def sharing(self) -> tuple[str, ...]:
        """Return the ways in which the device's card is shared now: the device is a part of it, or others use it too.
        Empty if it is not shared, or if that is unknown. Called before and after a run, never during it.
        """
        return ()

    def advice(self) -> list[Advice]:
        """Check this machine for conditions that affect its figures. Changes nothing."""
        return []

    def settings(self) -> dict[str, str]:
        """Return the current values of library flags that change results."""
        return {}

    # -- host time ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the host time in seconds, counted from an arbitrary start."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let the device idle."""
        time.sleep(seconds)


class OperandPool(ABC):
    """Named device buffers. Each is allocated once, at the largest size requested; smaller problems view part of it.

    Allocation between launches would perturb the measurement, and refilling would dominate the time of a sweep.
    """

    @abstractmethod
    def take(self, name: str, elements: int, dtype: str, fill: bool = True) -> Any:
        """Return a flat view of ``elements`` elements. Grows the buffer if it is too small. Raises the backend's
        out-of-memory error.
        """

    @abstractmethod
    def release(self) -> None:
        """Free every buffer."""
