"""Define the interface between mamf and a backend, which is the adapter for one vendor's devices.

The class methods of a backend describe the machine (whether mamf can use its devices, and how many it has); an instance
of a backend is one opened device. mamf measures only through these methods, so support for a new accelerator takes one
file and one line of packaging metadata. A backend must pass the test suite ``mamf.testing.BackendContract``.

mamf reads the time and waits with the methods ``now`` and ``sleep`` of the backend, so that tests can run its
measurements in the virtual time of ``mamf.testing.SimulatedBackend``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from mamf.calibration import ASSUMED_TRAITS_REMARK, BurstTraits, SustainedTraits
from mamf.dtypes import DTYPES

#: The name of the backend for tests, which computes the times of launches instead of measuring them.
SIMULATED_BACKEND = "simulated"
#: The number of bytes in a MiB.
MIB = 2**20
#: The environment variable that tells a process of mamf the pid of its parent process. The parent may keep the device
#: open without using it, so the process does not count the parent as another user of the card.
STARTING_PROCESS_PID_VARIABLE = "MAMF_LEADER_PID"
# The text that ``add_sharing_to_name`` puts between a device's name and the ways in which its card is shared.
_SHARING_PREFIX = " (shared: "


@dataclass(frozen=True)
class Unavailability:
    """An explanation of why mamf cannot use a device, kernel or sensor on this machine.

    - ``reason``: why mamf cannot use the device, kernel or sensor, worded so that it can be part of a sentence.
    - ``remedy``: the command or action that would make the device, kernel or sensor usable.
    """

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}; {'use ' if self.remedy.startswith('mamf ') else ''}{self.remedy}"


@dataclass(frozen=True)
class DeviceInfo:
    """A description of one device for logs and reports. A field is None if the vendor's libraries do not report its
    value.
    """

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


def add_sharing_to_name(name: str, sharing_ways: Iterable[str]) -> str:
    """Return a device's name with the ways in which its card is shared, such as "NVIDIA H200 (shared: other
    processes)". Return the name unchanged if ``sharing_ways`` is empty.

    The name of a whole card never contains "(shared:". Therefore mamf finds no datasheet peak for a shared card, and
    never mixes shared and whole cards in ceilings and tables.
    """
    all_ways = dict.fromkeys([*parse_sharing_ways(name), *sharing_ways])
    return f"{name.partition(_SHARING_PREFIX)[0]}{_SHARING_PREFIX}{', '.join(all_ways)})" if all_ways else name


def parse_sharing_ways(name: str) -> tuple[str, ...]:
    """Read from a device's name in which ways its card is shared, such as "MPS". Return an empty tuple for a whole
    card.
    """
    ways = name.partition(_SHARING_PREFIX)[2].removesuffix(")")
    return tuple(ways.split(", ")) if ways else ()


def format_sharing_warning(device_name: str) -> str:
    """Return a warning that the figures of a shared card are not those of a whole card. Return an empty string if the
    device name is that of a whole card.
    """
    ways = ", ".join(parse_sharing_ways(device_name))
    if ways:
        return (
            f"the card is shared ({ways}), so these rates are not those of a whole card, and mamf "
            "knows no datasheet peak for them"
        )
    return ""


@dataclass(frozen=True)
class SensorReading:
    """The values of a device's sensors at one moment; None for a sensor that cannot be read. ``joules`` counts from an
    arbitrary start, so only the difference between two readings is meaningful.
    """

    clock_hz: float | None = None
    watts: float | None = None
    joules: float | None = None
    celsius: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@runtime_checkable
class Telemetry(Protocol):
    """The sensors of one device. Reading the sensors never raises an error.

    The argument ``energy`` of ``read`` says whether to read the energy counter too. Reading the counter can take
    milliseconds, which is too long between timed launches.
    """

    def read(self, energy: bool = False) -> SensorReading: ...


class ElapsedTime(NamedTuple):
    """The clock cycles and the seconds that passed between two clock stamps. A clock stamp records the cycle counter of
    each compute unit, so both values are medians over all compute units.
    """

    cycles: float
    seconds: float

    @property
    def clock_hz(self) -> float | None:
        """The mean clock of the compute units between the two stamps, in Hz; None if no time passed."""
        return self.cycles / self.seconds if self.seconds > 0 else None


@runtime_checkable
class ClockStamps(Protocol):
    """An instrument that measures the real clock of the compute units, which sensors do not show.

    A stamp is a small kernel in the device's queue. After all earlier work in the queue has finished, it makes each
    compute unit record its cycle counter and the time.
    """

    def record_stamp(self) -> Any:
        """Add a stamp to the device's queue, and return a handle to pass to ``compute_elapsed``."""

    def compute_elapsed(self, start: Any, end: Any) -> ElapsedTime | None:
        """Return the cycles and seconds between two stamps. The device must have reached both, and at most 100 stamps
        may lie between them. Return None if no compute unit recorded both stamps.
        """


#: The name of the check that warns if other devices of the machine are busy. Runs on several devices skip this check,
#: because they keep the other devices busy themselves.
SIBLING_CHECK = "sibling devices"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of the machine.

    - ``check_name``: the name of what was checked, such as "power limit". ``finding``: the state that the check found.
    - ``verdict``: whether the state is right for measuring.
    - ``effect``: how a wrong state changes the measured rates. ``command``: the command that corrects the state.
    """

    check_name: str
    verdict: Literal["ok", "warning", "unknown"]
    finding: str
    effect: str = ""
    command: str = ""


class SecondQueue(ABC):
    """A second queue (stream) of a device. Its launches can run at the same time as launches in the device's own queue.
    The methods of Backend use the device's own queue.
    """

    @abstractmethod
    def fork(self) -> None:
        """Make later launches in this queue wait for all work that is in the device's own queue now."""

    @abstractmethod
    def launch(self, call: Callable[[], object]) -> None:
        """Call ``call`` on the host, and put the launches that it makes into this queue."""

    @abstractmethod
    def record_mark(self) -> Any:
        """Insert a mark (a timestamp event) into this queue, and return the mark. ``Backend.wait_for_mark`` and
        ``Backend.compute_seconds_between`` accept marks of this queue and of the device's own queue.
        """

    @abstractmethod
    def join(self) -> None:
        """Make later launches in the device's own queue wait for all work that is in this queue now."""


class Backend(ABC):
    """One opened device of one vendor. Opening a device (``Backend(index)``) affects only this process, and does not
    change the settings of the machine.
    """

    name: ClassVar[str]
    is_accelerator: ClassVar[bool] = True
    #: Whether the backend serves accelerators of any vendor. ``--backend auto`` chooses such a backend only if no
    #: vendor's own backend is available.
    is_generic: ClassVar[bool] = False
    #: The clock that times launches: "device events", or "host clock" if the vendor's events are missing or unreliable.
    timer: str
    #: How quickly the clock and the power of the vendor's devices react to load. If a backend does not set these
    #: traits, mamf measures them once per process, before the first row (see mamf.engine.traits).
    burst_traits: BurstTraits = BurstTraits(remark=ASSUMED_TRAITS_REMARK)
    sustained_traits: SustainedTraits = SustainedTraits(remark=ASSUMED_TRAITS_REMARK)
    default_dtype: str = "bfloat16"
    #: The runtime that device code is compiled for: cuda, hip, sycl, synapse, metal or host. Kernels use it to tell
    #: whether their library supports the device, because libraries support runtimes rather than vendors.
    runtime: ClassVar[str] = ""
    #: Names of environment variables that this vendor's libraries read and that change measured rates.
    environment_variables: ClassVar[tuple[str, ...]] = ()

    #: Whether ``record_idle_mark`` works with this device and driver.
    has_idle_marks: bool = False
    #: Whether the method ``capture_graph`` can record launches in a graph.
    has_graphs: ClassVar[bool] = False
    #: Whether operands and results are torch tensors, which another process can read and check.
    uses_torch_tensors: ClassVar[bool] = False

    index: int
    info: DeviceInfo
    #: The sensors of the device, or the reason why mamf cannot read them.
    telemetry: Telemetry | Unavailability

    @abstractmethod
    def __init__(self, index: int = 0) -> None:
        """Open the device with this index. Raises UnavailableError if there is no such device."""

    @classmethod
    @abstractmethod
    def explain_unavailability(cls) -> Unavailability | None:
        """Return why mamf cannot use any device of this vendor on this machine, or None if it can. May import the
        vendor's library, but never raises an error.
        """

    @classmethod
    @abstractmethod
    def count_devices(cls) -> int:
        """Return the number of devices visible to this process; called only if the backend is available."""

    @classmethod
    def read_device_name(cls, index: int) -> str:
        """Return the device's name. Override this if the name can be read without opening the device."""
        return cls(index).info.name

    @classmethod
    def find_current_index(cls) -> int:
        """Return the index of the device that this process uses by default; called only if the backend is
        available.
        """
        return 0

    # -- the device's queue ------------------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all work in the device's queue has finished."""

    def submit(self) -> None:
        """Start the launches that a lazy library has collected so far. Do nothing if the vendor's library starts each
        launch immediately.
        """

    @abstractmethod
    def record_mark(self) -> Any:
        """Insert a mark (a timestamp event) into the device's queue, after all earlier work, and return the mark."""

    @abstractmethod
    def wait_for_mark(self, mark: Any) -> None:
        """Block the host until the device has reached ``mark``. Work that was queued later may still be running."""

    @abstractmethod
    def is_mark_reached(self, mark: Any) -> bool:
        """Return whether the device has reached ``mark``, without waiting for it."""

    @abstractmethod
    def compute_seconds_between(self, start: Any, end: Any) -> float:
        """Return the device time in seconds between two marks that the device has reached."""

    def record_idle_mark(self, after: Any) -> Any | None:
        """Return a mark that the device reaches once it has finished the work of this process in all its queues.

        Called only if ``has_idle_marks``. ``after``: a mark that was queued earlier. Return None if the device has
        already reached ``after``: the device may then be idle, so the time of the new mark would depend on the host.
        """
        return None

    def get_second_queue(self) -> SecondQueue | None:
        """Return the device's second queue, the same object at each call; None if the device has only one queue."""
        return None

    @property
    def clock_stamps(self) -> ClockStamps | Unavailability:
        """The clock stamps of the device, the same object at each access, or the reason why it has none."""
        return Unavailability(
            f"mamf cannot read the cycle counters of {self.info.name}",
            "the column 'MHz requested' shows the clock that the driver reports",
        )

    def capture_graph(self, launches: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], list[object]]:
        """Record ``launches`` in one graph. Return a function that replays the graph, and the results of the launches,
        which each replay overwrites. Called only if ``has_graphs``.
        """
        raise NotImplementedError(f"mamf cannot capture launches in a graph on backend {self.name}")

    def estimate_timer_overhead(self) -> float | None:
        """Estimate the seconds that two marks add to the time of the launch between them; None if this backend cannot
        estimate it. The caller rejects implausible estimates (mamf.measurement).
        """
        return None

    @abstractmethod
    def flush_cache(self, size: int | None = None) -> None:
        """Queue a write of ``size`` bytes (default: twice the last-level cache), which evicts the operands of launches
        from the cache.
        """

    def open_profiler_window(self, name: str) -> AbstractContextManager[object]:
        """Return a context in which the vendor's profiler records launches, in a range called ``name``. The context
        waits for earlier work when it begins, and for its own launches when it ends. Without an attached profiler,
        nothing is recorded.
        """
        return nullcontext()

    def open_profiler_range(self, name: str) -> AbstractContextManager[object] | None:
        """Return a context whose launches the vendor's profiler shows in a range called ``name``; ranges may be nested.
        The context does not synchronize. Return None if the vendor's profiler has no ranges.
        """
        return None

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_operand_pool(self, data: str, seed: int) -> OperandPool:
        """Return an empty pool that fills operands with random values. ``data``: their distribution, one of
        mamf.kernel.DATA_CHOICES.
        """

    @abstractmethod
    def read_free_memory_bytes(self) -> int | None:
        """Return the bytes of device memory that can still be allocated, or None if the vendor does not report it."""

    def read_allocated_memory_bytes(self) -> int | None:
        """Return the bytes of device memory that this process has allocated now, or None if the vendor does not report
        it. ``read_peak_memory_bytes`` returns the maximum of this number.
        """
        return None

    @abstractmethod
    def read_peak_memory_bytes(self) -> int | None:
        """Return the maximum number of bytes of device memory that this process had allocated at any time since the
        last call of ``reset_peak_memory``, or None if the vendor does not report it.
        """

    def read_peak_reserved_memory_bytes(self) -> int | None:
        """Return the maximum number of bytes that this process had reserved on the device since the last call of
        ``reset_peak_memory``, including cached, unused blocks; None if the vendor does not report it.
        """
        return None

    def reset_peak_memory(self) -> None:
        """Forget earlier peaks, so that ``read_peak_memory_bytes`` and ``read_peak_reserved_memory_bytes`` start again
        at the current memory use. Do nothing if the vendor does not support this.
        """

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an exception means that the device has too little free memory; False for all other
        failures.
        """

    def release_cached_memory(self) -> None:
        """Return cached, unused memory to the device."""

    # -- properties of the device and the machine --------------------------------------------------------------------

    def resolve_dtype(self, name: str) -> str:
        """Return the full name of a dtype. For ``fp8``, return the 8-bit format that this device supports."""
        return "float8_e4m3fn" if name == "fp8" else name

    def explain_unsupported_dtype(self, dtype: str) -> str | None:
        """Return why this device cannot multiply operands of ``dtype``; None if it can."""
        return None if dtype in DTYPES else f"backend {self.name} does not support the dtype {dtype}"

    def explain_missing_compiler(self) -> Unavailability | None:
        """Return why torch.compile cannot generate kernels for this device; None if it can."""
        return None

    def read_bus_address(self) -> str | None:
        """Return the device's address in the machine, such as its PCI address, so that people can find a faulty card;
        None if unknown. mamf never writes the address to a log.
        """
        return None

    def compute_digest(self, result: object) -> str | None:
        """Return a hash of all bits of a launch's result; None if the backend cannot read the result."""
        return None

    def explain_missing_counters(self) -> Unavailability | None:
        """Return why mamf cannot read hardware counters on this device, and what to use instead; None if mamf can read
        them.
        """
        return Unavailability(
            f"mamf reads hardware counters with NVIDIA's ncu, which does not support {self.info.name}",
            "'mamf sweep' and 'mamf attention' need no counters; 'mamf run' works under the vendor's own profiler",
        )

    def find_sharing_ways(self) -> tuple[str, ...]:
        """Return the ways in which the device's card is shared now: the device is only a part of the card, or other
        processes use the card too. Return an empty tuple if the card is not shared, or if the backend does not know.
        mamf calls this method before and after a run, never during the run.
        """
        return ()

    def check_machine(self) -> list[CheckResult]:
        """Check this machine for conditions that change the measured rates, and return the findings. Do not change any
        setting.
        """
        return []

    def read_settings(self) -> dict[str, str]:
        """Return the current values of library flags that change measured rates, by name."""
        return {}

    # -- host time ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the host's time in seconds, counted from an arbitrary start."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Make the host wait for ``seconds``. Meanwhile the device is idle if its queue is empty."""
        time.sleep(seconds)


class OperandPool(ABC):
    """A set of named device buffers that launches of all shapes share. A buffer is reallocated only if a shape needs
    a larger one; smaller shapes use part of it.

    Without shared buffers, allocations between launches would disturb the measurement, and filling buffers with random
    values would take most of the time of a sweep over many shapes.
    """

    @abstractmethod
    def take_buffer(self, name: str, elements: int, dtype: str, fill: bool = True) -> Any:
        """Return the first ``elements`` elements of the buffer called ``name``, as a flat array. Allocate the buffer if
        it is missing, too small or of another dtype, and raise the backend's out-of-memory error if that fails.
        ``fill``: whether to fill a new buffer with random values.
        """

    @abstractmethod
    def release_buffers(self) -> None:
        """Free all buffers of the pool."""
