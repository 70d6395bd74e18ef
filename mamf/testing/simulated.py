"""Simulate an accelerator in virtual time for tests: deterministic and fast, with the noise and faults of real devices.

The host and the device each have a clock that only the methods here advance, so a minute of measuring takes
milliseconds and always has the same result. The default ``Physics`` describe an NVIDIA H100, which reaches 842 TFLOPS
in bf16 for 16896x2048x20224 at its maximum clock, and 719 TFLOPS at its power limit.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mamf.backend import (
    MIB,
    Backend,
    ClockStamps,
    DeviceInfo,
    ElapsedTime,
    OperandPool,
    Reading,
    Telemetry,
    Unavailable,
)
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError
from mamf.operations.matmul.shapes import MatmulShape

# Time that two entries in the history of used energy are at least apart.
_MIN_ENERGY_STEP_SECONDS = 1e-3
# Time that the device takes to stamp its clock.
_STAMP_SECONDS = 2e-6


class Scatter(NamedTuple):
    """Standard deviations by which the time of a launch varies, as shares of that time.

    - ``visit``: between visits. A visit is a few seconds in which one shape is measured without a break.
    - ``run``: between runs of mamf.
    """

    visit: float
    run: float


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. The defaults describe an NVIDIA H100.

    Times are in seconds, clocks in Hz, power in watts, sizes in bytes, and bandwidths in bytes per second.

    Power and clock:

    - ``compute_units``, ``flop_per_cycle_per_unit``: the number of compute units, and the peak rate of each of them.
    - ``efficiency``: share of the peak rate that the fastest matmul reaches.
    - ``boost_hz``, ``capped_hz``: the clock below the power limit and at the power limit.
    - ``idle_watts``, ``flush_watts``, ``boost_watts``: power while idle, while memory is read or written, and while a
      matmul runs at the maximum clock.
    - ``cap_watts``: the power limit.
    - ``reaction_seconds``: time constant of the mean power to which the power controller reacts.
    - ``thermal_drift``: share of its clock that a hot device loses.
    - ``thermal_seconds``: time constant of warming up and cooling down.
    - ``throttled``: share of the time that the device spends at half its clock for a thermal reason.
    - ``hunting``: relative difference of the two clocks between which a device at its power limit alternates every
      ``hunting_seconds``; 0 if it does not alternate.
    - ``true_clock``: the clock while a kernel computes, as a share of the clock that sensors read. None if the device
      cannot stamp its clock.
    - ``counter_seconds``: time between two updates of the energy counter; 0 if it is continuous.

    Launches and memory:

    - ``launch_seconds``: time that the host needs for one launch.
    - ``data_cost``: share by which a matmul takes longer if its operands are not zeros.
    - ``bandwidth``, ``memory_bytes``, ``cache_bytes``: bandwidth and size of the memory, and size of the cache.
    - ``cache_gain``: share of the time of a launch that is saved if its operands are still in the cache.
    - ``cache_bandwidth``: bandwidth of arrays that fit in the cache and that the launch before used. None: that of
      memory.
    - ``link``: bandwidth between devices.
    - ``rested_gain``: share of the time of a launch that is saved for ``rested_gain_seconds`` after the device was idle
      for ``rested_after_seconds``.
    - ``waking_times``: factor by which launches take longer for ``waking_seconds`` after the device was idle for
      ``asleep_after_seconds``.

    Noise and faults:

    - ``noise``: relative standard deviation of the time of a launch.
    - ``at_boost``, ``capped``: how much times differ between visits and runs at the maximum clock and at the power
      limit.
    - ``timer_overhead``: seconds that two marks (device events) add to the measured time of the launch between them.
    - ``glitch_every``: one of this many time intervals is measured as one nanosecond; 0 for none.
    - ``flips``: probability that a launch flips a bit of its output.
    - ``faulty_unit``: the index of a compute unit that computes wrong tiles, or None. The units take the tiles (128x256
      elements of the output of a matmul) in turn.
    """

    compute_units: int = 132
    flop_per_cycle_per_unit: int = 4096
    efficiency: float = 0.795
    boost_hz: float = 1980e6
    capped_hz: float = 1690e6
    idle_watts: float = 110.0
    flush_watts: float = 350.0
    boost_watts: float = 950.0
    cap_watts: float = 700.0
    reaction_seconds: float = 0.033
    thermal_drift: float = 0.001
    thermal_seconds: float = 5.0
    noise: float = 0.001
    bandwidth: float = 3e12
    cache_bytes: int = 50 * MIB
    cache_gain: float = 0.02
    memory_bytes: int = 80 * 10**9
    launch_seconds: float = 20e-6
    glitch_every: int = 0
    timer_overhead: float = 3.7e-6
    rested_gain: float = 0.01
    rested_after_seconds: float = 0.15
    rested_gain_seconds: float = 0.3
    at_boost: Scatter | None = None
    capped: Scatter | None = None
    data_cost: float = 0.0
    hunting: float = 0.0
    hunting_seconds: float = 0.15
    flips: float = 0.0
    faulty_unit: int | None = None
    throttled: float = 0.0
    link: float = 400e9
    waking_times: float = 1.0
    waking_seconds: float = 0.0
    asleep_after_seconds: float = 0.005
    cache_bandwidth: float | None = None
    counter_seconds: float = 0.0
    true_clock: float | None = 0.83


class SimulatedOutOfMemoryError(MemoryError):
    """The error that means that the simulated device, not the host, has too little memory."""


class SimulatedPool(OperandPool):
    """An operand pool of a simulated device that counts bytes and allocates nothing.

    ``capacity``: its size in bytes. Raises SimulatedOutOfMemoryError if operands need more.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.bytes_by_name: dict[str, int] = {}

    def take_buffer(self, name: str, elements: int, dtype: str, fill: bool = True) -> None:
        nbytes = max(elements * DTYPES[dtype].itemsize, self.bytes_by_name.get(name, 0))
        if sum(self.bytes_by_name.values()) - self.bytes_by_name.get(name, 0) + nbytes > self.capacity:
            raise SimulatedOutOfMemoryError(f"simulated device out of memory: {name} needs {nbytes} bytes")
        self.bytes_by_name[name] = nbytes

    def release_buffers(self) -> None:
        self.bytes_by_name.clear()


class SimulatedSensors:
    def __init__(self, backend: SimulatedBackend) -> None:
        self.backend = backend

    def read(self, energy: bool = False) -> Reading:
        device = self.backend
        return Reading(
            clock_hz=device.clock_hz,
            watts=device.mean_watts,
            joules=device.read_joules() if energy else None,
            celsius=45 + 20 * device.heat_share,
            throttle_reasons=(
                *(("power cap",) if device.is_capped else ()),
                *(("hardware thermal slowdown",) if device.is_throttled else ()),
            ),
        )


class SimulatedBackend(Backend):
    """One simulated device, whose time advances only when its methods are called.

    - ``faults``: for a shape, the exception to raise when its result is verified, or "wrong_result".
    - ``on_launch``: called before each launch with the number of launches so far, this launch included. Tests use it to
      interrupt or kill the process.
    - ``physics``: the default properties of devices of this class. ``world``: the properties of this device.
    """

    name = "simulated"
    timer = "device events"
    burst_traits = BurstTraits()
    sustained_traits = SustainedTraits()
    physics: ClassVar[Physics] = Physics()
    on_launch: ClassVar[Callable[[int], None] | None] = None

    @classmethod
    def explain_unavailability(cls) -> Unavailable | None:
        return None

    @classmethod
    def count_devices(cls) -> int:
        return 1

    def __init__(self, index: int = 0, physics: Physics | None = None, seed: int = 0) -> None:
        count = self.count_devices()
        if not 0 <= index < count:
            raise UnavailableError(f"{self.name} has no device {index}; it has {count}")
        self.index = index
        self.world = physics or self.physics
        self.random = random.Random(seed)
        self.fault_seed = seed
        self.faults: dict[object, Exception | str] = {}
        self.launches = 0
        self.host_time = self.device_time = self.counted_cycles = 0.0
        # The clock while a kernel computes, as a share of the clock that sensors read.
        self._true_clock_share = 1.0
        self.mean_watts = self.world.idle_watts
        # How hot the device is, from 0 (idle) to 1 (at its power limit for long).
        self.heat_share = 0.0
        # Pairs of a time in seconds and the joules used until then. Consecutive times differ by about a millisecond.
        self._energy_history = deque([(0.0, 0.0), (0.0, 0.0)], maxlen=10_000)
        self.is_capped = False
        # The key of the operand set of the last launch, whose operands may still be in the cache.
        self.cached_operands: object = None
        # Whether a mark precedes the next launch, so that the overhead of the timer adds to the time of this launch.
        self.is_after_mark = False
        # The times at which two effects end: the device is faster after a rest, and slower while it wakes up.
        self.rested_end_time = self.fully_awake_time = 0.0
        self.interval_count = 0
        self._variation_by_capped = {True: self.world.capped, False: self.world.at_boost}
        self.begin_run()
        self.telemetry: Telemetry | Unavailable = SimulatedSensors(self)
        self.info = DeviceInfo(
            backend=self.name,
            index=index,
            name="Simulated H100",
            vendor="mamf",
            architecture="sm_90",
            compute_units=self.world.compute_units,
            memory_bytes=self.world.memory_bytes,
            cache_bytes=self.world.cache_bytes,
            max_clock_hz=self.world.boost_hz,
            power_limit_watts=self.world.cap_watts,
        )

    # -- time and power ----------------------------------------------------------------------------------------------

    @property
    def clock_hz(self) -> float:
        clock = self.world.capped_hz if self.is_capped else self.world.boost_hz
        clock /= 2 if self.is_throttled else 1
        return clock * (1 - self.world.thermal_drift * self.heat_share)

    @property
    def is_throttled(self) -> bool:
        """Whether the device runs at half its clock now for a thermal reason. The state repeats every 0.1 s."""
        return (10 * self.device_time) % 1.0 < self.world.throttled

    def read_joules(self) -> float:
        """Return what the energy counter shows: the joules used until its last update."""
        tick_seconds = self.world.counter_seconds
        counter_time = self.host_time // tick_seconds * tick_seconds if tick_seconds else self.host_time
        while len(self._energy_history) > 2 and self._energy_history[1][0] <= counter_time:
            self._energy_history.popleft()
        (start, before), (end, after) = self._energy_history[0], self._energy_history[1]
        if counter_time >= end:
            return after + self.world.idle_watts * (counter_time - end)
        return before + (after - before) * max(0.0, counter_time - start) / (end - start)

    def now(self) -> float:
        return self.host_time

    def sleep(self, seconds: float) -> None:
        self.host_time += seconds

    def synchronize(self) -> None:
        self.host_time = max(self.host_time, self.device_time)

    def begin_run(self) -> None:
        """Draw at random how much slower or faster the device is during this run of mamf, then begin a visit."""
        self._run_variation_by_capped = {
            capped: self._draw_variation(capped, "run") for capped in self._variation_by_capped
        }
        self.begin_visit()

    def begin_visit(self) -> None:
        """Draw at random how much slower or faster the device is until the next visit (the measurement of another
        shape).
        """
        self._time_factor_by_capped = {
            capped: (1 + run_variation) * (1 + self._draw_variation(capped, "visit"))
            for capped, run_variation in self._run_variation_by_capped.items()
        }

    def _draw_variation(self, capped: bool, level: str) -> float:
        variation = self._variation_by_capped[capped]
        return 0.0 if variation is None else self.random.gauss(0.0, getattr(variation, level))

    def _compute_time_factor(self) -> float:
        """Return the factor by which the time of a launch differs from its mean because of the current run, visit and
        clock.
        """
        factor = self._time_factor_by_capped[self.is_capped]
        if self.is_capped and self.world.hunting:
            is_low = int(self.device_time / self.world.hunting_seconds) % 2
            factor *= 1 + self.world.hunting / 2 * (1 if is_low else -1)
        return factor

    def record_mark(self) -> float:
        self.host_time += self.world.launch_seconds / 4
        self.device_time = self._idle_until_time(self.host_time)
        self.is_after_mark = True
        return self.device_time

    @property
    def clock_stamps(self) -> ClockStamps | Unavailable:
        return super().clock_stamps if self.world.true_clock is None else self

    def record_stamp(self) -> ElapsedTime:
        self.host_time += self.world.launch_seconds / 4
        self.device_time = self._idle_until_time(self.host_time) + _STAMP_SECONDS
        self.counted_cycles += _STAMP_SECONDS * self.clock_hz
        return ElapsedTime(self.counted_cycles, self.device_time)

    def compute_elapsed(self, start: ElapsedTime, end: ElapsedTime) -> ElapsedTime | None:
        return ElapsedTime(end.cycles - start.cycles, end.seconds - start.seconds)

    def estimate_timer_overhead(self) -> float | None:
        return self.world.timer_overhead

    def wait_for_mark(self, mark: float) -> None:
        self.host_time = max(self.host_time, mark)

    def compute_seconds_between(self, start: float, end: float) -> float:
        self.interval_count += 1
        return 1e-9 if self.world.glitch_every and self.interval_count % self.world.glitch_every == 0 else end - start

    def flush_cache(self, size: int | None = None) -> None:
        self.cached_operands = None
        self._run_on_device((size or 2 * self.world.cache_bytes) / self.world.bandwidth, self.world.flush_watts)

    def count_cycles(self, shape: MatmulShape) -> float:
        """Return how many clock cycles a matmul of this shape takes.

        Waves of tiles (128x256 elements of the output) run on the compute units. A start-up cost that equals 200 steps
        of K makes a short K slower.
        """
        units = self.world.compute_units
        tiles = math.ceil(shape.m / 128) * math.ceil(shape.n / 256)
        occupancy = tiles / (math.ceil(tiles / units) * units) * (shape.m * shape.n) / (tiles * 128 * 256)
        peak = units * self.world.flop_per_cycle_per_unit * self.world.efficiency
        return shape.flop / (peak * occupancy * shape.k / (shape.k + 200))

    def compute(self, cycles: float, operands: object) -> None:
        """Simulate the launch of a kernel that takes ``cycles`` clock cycles.

        ``operands``: a key of the operand set, by which the device knows whether the set is still in the cache.
        """
        self._true_clock_share = self.world.true_clock or 1.0
        self._launch(
            cycles, self.clock_hz, self.world.cap_watts if self.is_capped else self.world.boost_watts, operands
        )
        self._true_clock_share = 1.0

    def move(self, nbytes: float, operands: object) -> None:
        """Simulate the launch of a kernel that reads and writes ``nbytes`` bytes of memory. Its time does not depend on
        the clock.
        """
        is_cached = self.cached_operands == operands and nbytes <= self.world.cache_bytes
        rate = (is_cached and self.world.cache_bandwidth) or self.world.bandwidth
        self._launch(nbytes, rate, self.world.flush_watts, operands)

    def send(self, nbytes: float, operands: object) -> None:
        """Simulate the launch of a transfer of ``nbytes`` bytes over the link between devices."""
        self._launch(nbytes, self.world.link, self.world.idle_watts, operands)

    def _launch(self, work: float, rate: float, watts: float, operands: object) -> None:
        self.launches += 1
        hook = type(self).on_launch
        if hook is not None:
            hook(self.launches)
        if self.cached_operands == operands:
            work *= 1 - self.world.cache_gain
        self.cached_operands = operands
        if self.device_time < self.rested_end_time:
            work *= 1 - self.world.rested_gain
        if self.device_time < self.fully_awake_time:
            work *= self.world.waking_times
        noise = self.random.gauss(1, self.world.noise)
        self._run_on_device(work * self._compute_time_factor() * max(noise, 0.5) / rate, watts)

    def _idle_until_time(self, target_time: float) -> float:
        idle = target_time - self.device_time
        if idle <= 0:
            return self.device_time
        if idle > self.world.asleep_after_seconds:
            self.fully_awake_time = target_time + self.world.waking_seconds
        if idle > self.world.rested_after_seconds:
            self.rested_end_time = target_time + self.world.rested_gain_seconds
        self._add_energy(idle, self.world.idle_watts)
        self.counted_cycles += idle * self.clock_hz
        return target_time

    def _run_on_device(self, seconds: float, watts: float) -> None:
        self.host_time += self.world.launch_seconds
        self.counted_cycles += seconds * self.clock_hz * self._true_clock_share
        if self.is_after_mark:
            seconds += self.world.timer_overhead
            self.counted_cycles += self.world.timer_overhead * self.clock_hz
            self.is_after_mark = False
        self.device_time = self._idle_until_time(self.host_time) + seconds
        self._add_energy(seconds, watts)

    def _add_energy(self, seconds: float, watts: float) -> None:
        world, cap_watts, idle_watts = self.world, self.world.cap_watts, self.world.idle_watts
        last_time, spent_joules = self._energy_history[-1]
        if last_time - self._energy_history[-2][0] < _MIN_ENERGY_STEP_SECONDS:
            self._energy_history.pop()
        self._energy_history.append((last_time + seconds, spent_joules + watts * seconds))
        self.mean_watts += (watts - self.mean_watts) * -math.expm1(-seconds / world.reaction_seconds)
        target_heat = (watts - idle_watts) / (cap_watts - idle_watts) if watts < cap_watts else 1.0
        self.heat_share += (target_heat - self.heat_share) * -math.expm1(-seconds / world.thermal_seconds)
        self.is_capped = self.mean_watts >= (0.97 if self.is_capped else 0.995) * cap_watts

    # -- memory ------------------------------------------------------------------------------------------------------

    def make_operand_pool(self, data: str, seed: int) -> OperandPool:
        return SimulatedPool(self.world.memory_bytes)

    def read_free_memory_bytes(self) -> int | None:
        return self.world.memory_bytes

    def read_peak_memory_bytes(self) -> int | None:
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, SimulatedOutOfMemoryError)
