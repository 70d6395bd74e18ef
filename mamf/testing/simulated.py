"""Simulate an accelerator for tests, with the noise and faults of real devices.

The simulation runs in virtual time. The host and the device each have a clock that advances only when a method of
SimulatedBackend is called. So measurements of one simulated minute take milliseconds and always have the same results.
The default ``Physics`` describes an NVIDIA H100, which reaches 842 TFLOPS in bf16 for 16896x2048x20224 at its maximum
clock, and 719 TFLOPS at its power limit.
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
    SensorReading,
    Telemetry,
    Unavailability,
)
from mamf.calibration import BurstTraits, SustainedTraits
from mamf.dtypes import DTYPES
from mamf.errors import UnavailableError
from mamf.operations.matmul.shapes import MatmulShape

# Minimum time in seconds between two entries in the energy history.
_MIN_ENERGY_STEP_SECONDS = 1e-3
# Time in seconds that the device needs to record a stamp (its time and cycle counter).
_STAMP_SECONDS = 2e-6


class TimeVariation(NamedTuple):
    """Relative standard deviations of launch times.

    - ``visit_deviation``: between visits. A visit is one uninterrupted measurement of a shape for a few seconds.
    - ``run_deviation``: between runs of mamf.
    """

    visit_deviation: float
    run_deviation: float


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. The defaults describe an NVIDIA H100.

    Times are in seconds, clocks in Hz, power in watts, sizes in bytes, and bandwidths in bytes per second.

    Power and clock:

    - ``compute_units``, ``flop_per_cycle_per_unit``: the number of compute units, and the peak rate of each unit.
    - ``matmul_peak_share``: share of the peak rate that the fastest matmul reaches.
    - ``boost_clock_hz``, ``capped_clock_hz``: the clock while power is below the power limit, and at the limit.
    - ``idle_watts``, ``memory_transfer_watts``, ``boost_watts``: power while idle, while memory is read or written, and
      while a matmul runs at the maximum clock.
    - ``power_averaging_seconds``: time constant of the mean power. The clock drops when this mean reaches the limit.
    - ``hot_clock_loss_share``: relative reduction of the clock if the device is hot.
    - ``heating_seconds``: time constant of warming up and cooling down.
    - ``throttled_time_share``: share of the time during which the device runs at half its clock because of heat.
    - ``clock_alternation_share``: the relative difference between the two clocks that the device alternates between at
      its power limit; 0 if the clock is constant. ``clock_alternation_seconds``: the time between two changes.
    - ``true_clock_share``: the clock while a kernel computes, as a share of the clock that sensors read. None if the
      device cannot record clock stamps.
    - ``energy_update_seconds``: time between two updates of the energy counter; 0 if it updates continuously.

    Launches and memory:

    - ``host_launch_seconds``: time that the host needs for one launch.
    - ``queue_capacity``: the number of launches that the host can queue before it must wait for the device.
    - ``nonzero_data_slowdown``: relative increase of the time of a matmul if its operands are not zeros.
    - ``memory_bandwidth``, ``memory_bytes``, ``cache_bytes``: bandwidth and size of the memory, and size of the cache.
    - ``cached_time_saving_share``: relative reduction of the time of a launch if its operands are still in the cache.
    - ``cache_bandwidth``: bandwidth of arrays that the previous launch left in the cache; None if it equals
      ``memory_bandwidth``.
    - ``link_bandwidth``: bandwidth between devices.
    - ``rested_time_saving_share``: relative reduction of the time of launches for ``rested_effect_seconds`` after the
      device was idle for ``min_rest_seconds``.
    - ``waking_time_factor``: factor by which launches take longer for ``waking_seconds`` after the device was idle for
      ``sleep_delay_seconds``.

    Noise and faults:

    - ``launch_noise``: relative standard deviation of the time of a launch.
    - ``boost_variation``, ``capped_variation``: how much launch times vary between visits and between runs, at the
      maximum clock and at the power limit; None if they do not vary.
    - ``timer_overhead_seconds``: seconds that two marks (device events) add to the measured time of the launch between
      them.
    - ``intervals_per_glitch``: one of this many measured time intervals is a glitch; 0 for no glitches. In a glitch,
      the timer wrongly returns one nanosecond.
    - ``bit_flip_probability``: probability that a launch flips a bit of its output.
    - ``faulty_unit_index``: the index of a compute unit that computes wrong results; None if no unit is faulty. The
      units take turns computing the tiles (128x256 elements) of a matmul's output.
    """

    compute_units: int = 132
    flop_per_cycle_per_unit: int = 4096
    matmul_peak_share: float = 0.795
    boost_clock_hz: float = 1980e6
    capped_clock_hz: float = 1690e6
    idle_watts: float = 110.0
    memory_transfer_watts: float = 350.0
    boost_watts: float = 950.0
    power_limit_watts: float = 700.0
    power_averaging_seconds: float = 0.033
    hot_clock_loss_share: float = 0.001
    heating_seconds: float = 5.0
    launch_noise: float = 0.001
    memory_bandwidth: float = 3e12
    cache_bytes: int = 50 * MIB
    cached_time_saving_share: float = 0.02
    memory_bytes: int = 80 * 10**9
    host_launch_seconds: float = 20e-6
    queue_capacity: int = 1024
    intervals_per_glitch: int = 0
    timer_overhead_seconds: float = 3.7e-6
    rested_time_saving_share: float = 0.01
    min_rest_seconds: float = 0.15
    rested_effect_seconds: float = 0.3
    boost_variation: TimeVariation | None = None
    capped_variation: TimeVariation | None = None
    nonzero_data_slowdown: float = 0.0
    clock_alternation_share: float = 0.0
    clock_alternation_seconds: float = 0.15
    bit_flip_probability: float = 0.0
    faulty_unit_index: int | None = None
    throttled_time_share: float = 0.0
    link_bandwidth: float = 400e9
    waking_time_factor: float = 1.0
    waking_seconds: float = 0.0
    sleep_delay_seconds: float = 0.005
    cache_bandwidth: float | None = None
    energy_update_seconds: float = 0.0
    true_clock_share: float | None = 0.83


class SimulatedOutOfMemoryError(MemoryError):
    """Raised if the simulated device, not the host, runs out of memory."""


class SimulatedPool(OperandPool):
    """An operand pool of a simulated device, which counts the bytes of operands without allocating memory.

    ``capacity_bytes``: the size of the pool. Raises SimulatedOutOfMemoryError if operands need more bytes.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_by_name: dict[str, int] = {}

    def take_buffer(self, name: str, elements: int, dtype: str, fill: bool = True) -> None:
        nbytes = max(elements * DTYPES[dtype].itemsize, self.bytes_by_name.get(name, 0))
        if sum(self.bytes_by_name.values()) - self.bytes_by_name.get(name, 0) + nbytes > self.capacity_bytes:
            raise SimulatedOutOfMemoryError(
                f"the simulated device is out of memory: operand {name} needs {nbytes} bytes"
            )
        self.bytes_by_name[name] = nbytes

    def release_buffers(self) -> None:
        self.bytes_by_name.clear()


class SimulatedSensors:
    def __init__(self, backend: SimulatedBackend) -> None:
        self.backend = backend

    def read(self, energy: bool = False) -> SensorReading:
        device = self.backend
        return SensorReading(
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

    - ``faults``: the faults to simulate when mamf verifies results, by shape. A fault is an exception to raise, or
      "wrong_result".
    - ``on_launch``: a function that is called before each launch with the number of launches so far, including this
      one. Tests use it to interrupt or kill the process.
    - ``physics``: the default properties of all devices of this class. ``device_physics``: the properties of this
      device.
    """

    name = "simulated"
    timer = "device events"
    burst_traits = BurstTraits()
    sustained_traits = SustainedTraits()
    physics: ClassVar[Physics] = Physics()
    on_launch: ClassVar[Callable[[int], None] | None] = None

    @classmethod
    def explain_unavailability(cls) -> Unavailability | None:
        return None

    @classmethod
    def count_devices(cls) -> int:
        return 1

    def __init__(self, index: int = 0, physics: Physics | None = None, seed: int = 0) -> None:
        count = self.count_devices()
        if not 0 <= index < count:
            choice = f"choose an index from 0 to {count - 1}" if count > 1 else "the only index is 0"
            raise UnavailableError(f"{self.name} has no device {index}: {choice}")
        self.index = index
        self.device_physics = physics or self.physics
        self.random = random.Random(seed)
        self.fault_seed = seed
        self.faults: dict[object, Exception | str] = {}
        self.launch_count = 0
        self.host_time = self.device_time = self.cycle_counter = 0.0
        # The actual clock as a share of the clock that sensors read. It is below 1 while a kernel computes.
        self._true_clock_share = 1.0
        self.mean_watts = self.device_physics.idle_watts
        # How hot the device is, from 0 (idle for a long time) to 1 (at its power limit for a long time).
        self.heat_share = 0.0
        # Pairs of a time in seconds and the energy in joules that the device had used by then, one pair per
        # millisecond.
        self._energy_history = deque([(0.0, 0.0), (0.0, 0.0)], maxlen=10_000)
        self.is_capped = False
        # The key of the operand set of the last launch, whose operands may still be in the cache.
        self.cached_operands_key: object = None
        # Whether a mark (a device event) was recorded after the last launch. If so, the overhead of the timer is added
        # to the time of the next launch.
        self.is_after_mark = False
        # An idle period has two opposite effects on the launches after it. Until rested_end_time they are shorter,
        # because the device is rested. Until fully_awake_time they are longer, because the device is still waking up.
        self.rested_end_time = self.fully_awake_time = 0.0
        self.interval_count = 0
        # The end times of the last ``queue_capacity`` launches. When the queue is full, the host waits until the oldest
        # of these launches has ended.
        self._launch_end_times: deque[float] = deque(maxlen=self.device_physics.queue_capacity)
        self._variation_by_capped = {
            True: self.device_physics.capped_variation,
            False: self.device_physics.boost_variation,
        }
        self.draw_run_variation()
        self.telemetry: Telemetry | Unavailability = SimulatedSensors(self)
        self.info = DeviceInfo(
            backend=self.name,
            index=index,
            name="Simulated H100",
            vendor="mamf",
            architecture="sm_90",
            compute_units=self.device_physics.compute_units,
            memory_bytes=self.device_physics.memory_bytes,
            cache_bytes=self.device_physics.cache_bytes,
            max_clock_hz=self.device_physics.boost_clock_hz,
            power_limit_watts=self.device_physics.power_limit_watts,
        )

    # -- time and power ----------------------------------------------------------------------------------------------

    @property
    def clock_hz(self) -> float:
        clock = self.device_physics.capped_clock_hz if self.is_capped else self.device_physics.boost_clock_hz
        clock /= 2 if self.is_throttled else 1
        return clock * (1 - self.device_physics.hot_clock_loss_share * self.heat_share)

    @property
    def is_throttled(self) -> bool:
        """Whether the device now runs at half its clock because of heat, as it does at the start of every interval of
        0.1 s.
        """
        return (10 * self.device_time) % 1.0 < self.device_physics.throttled_time_share

    def read_joules(self) -> float:
        """Return the value of the energy counter: the joules used until the counter's last update."""
        update_seconds = self.device_physics.energy_update_seconds
        counter_time = self.host_time // update_seconds * update_seconds if update_seconds else self.host_time
        while len(self._energy_history) > 2 and self._energy_history[1][0] <= counter_time:
            self._energy_history.popleft()
        (start, joules_before), (end, joules_after) = self._energy_history[0], self._energy_history[1]
        if counter_time >= end:
            return joules_after + self.device_physics.idle_watts * (counter_time - end)
        return joules_before + (joules_after - joules_before) * max(0.0, counter_time - start) / (end - start)

    def now(self) -> float:
        return self.host_time

    def sleep(self, seconds: float) -> None:
        self.host_time += seconds

    def synchronize(self) -> None:
        self.host_time = max(self.host_time, self.device_time)

    def draw_run_variation(self) -> None:
        """Choose at random how much slower or faster than usual this run of mamf and its first visit (measurement of a
        shape) are.
        """
        self._run_variation_by_capped = {
            capped: self._draw_deviation(capped, "run_deviation") for capped in self._variation_by_capped
        }
        self.draw_visit_variation()

    def draw_visit_variation(self) -> None:
        """Choose at random how much slower or faster than usual a visit (one measurement of a shape) is."""
        self._time_factor_by_capped = {
            capped: (1 + run_variation) * (1 + self._draw_deviation(capped, "visit_deviation"))
            for capped, run_variation in self._run_variation_by_capped.items()
        }

    def _draw_deviation(self, is_capped: bool, field: str) -> float:
        variation = self._variation_by_capped[is_capped]
        return 0.0 if variation is None else self.random.gauss(0.0, getattr(variation, field))

    def _compute_time_factor(self) -> float:
        """Return the time of a launch relative to the mean over many runs. This factor depends on the current run,
        visit (measurement of a shape) and clock.
        """
        factor = self._time_factor_by_capped[self.is_capped]
        if self.is_capped and self.device_physics.clock_alternation_share:
            is_low = int(self.device_time / self.device_physics.clock_alternation_seconds) % 2
            factor *= 1 + self.device_physics.clock_alternation_share / 2 * (1 if is_low else -1)
        return factor

    def record_mark(self) -> float:
        self.host_time += self.device_physics.host_launch_seconds / 4
        self.device_time = self._idle_until_time(self.host_time)
        self.is_after_mark = True
        return self.device_time

    @property
    def clock_stamps(self) -> ClockStamps | Unavailability:
        return super().clock_stamps if self.device_physics.true_clock_share is None else self

    def record_stamp(self) -> ElapsedTime:
        self.host_time += self.device_physics.host_launch_seconds / 4
        self.device_time = self._idle_until_time(self.host_time) + _STAMP_SECONDS
        self.cycle_counter += _STAMP_SECONDS * self.clock_hz
        return ElapsedTime(self.cycle_counter, self.device_time)

    def compute_elapsed(self, start: ElapsedTime, end: ElapsedTime) -> ElapsedTime | None:
        return ElapsedTime(end.cycles - start.cycles, end.seconds - start.seconds)

    def estimate_timer_overhead(self) -> float | None:
        return self.device_physics.timer_overhead_seconds

    def wait_for_mark(self, mark: float) -> None:
        self.host_time = max(self.host_time, mark)

    def is_mark_reached(self, mark: float) -> bool:
        return mark <= self.host_time

    def compute_seconds_between(self, start: float, end: float) -> float:
        self.interval_count += 1
        return (
            1e-9
            if self.device_physics.intervals_per_glitch
            and self.interval_count % self.device_physics.intervals_per_glitch == 0
            else end - start
        )

    def flush_cache(self, size: int | None = None) -> None:
        self.cached_operands_key = None
        self._run_on_device(
            (size or 2 * self.device_physics.cache_bytes) / self.device_physics.memory_bandwidth,
            self.device_physics.memory_transfer_watts,
        )

    def compute_matmul_cycles(self, shape: MatmulShape) -> float:
        """Return the number of clock cycles that a matmul of this shape takes.

        The output is divided into tiles of 128x256 elements. In each wave, every compute unit computes one tile, and
        units without a tile in the last wave are idle. Each tile also has a fixed cost equal to that of 200 elements of
        K, so a matmul with a short K is less efficient.
        """
        units = self.device_physics.compute_units
        tiles = math.ceil(shape.m / 128) * math.ceil(shape.n / 256)
        occupancy = tiles / (math.ceil(tiles / units) * units) * (shape.m * shape.n) / (tiles * 128 * 256)
        peak = units * self.device_physics.flop_per_cycle_per_unit * self.device_physics.matmul_peak_share
        return shape.flop / (peak * occupancy * shape.k / (shape.k + 200))

    def launch_compute(self, cycles: float, operands_key: object) -> None:
        """Simulate the launch of a kernel that takes ``cycles`` clock cycles.

        ``operands_key``: identifies the operand set. If the previous launch used this set, its operands may still
        be in the cache.
        """
        self._true_clock_share = self.device_physics.true_clock_share or 1.0
        self._simulate_launch(
            cycles,
            self.clock_hz,
            self.device_physics.power_limit_watts if self.is_capped else self.device_physics.boost_watts,
            operands_key,
        )
        self._true_clock_share = 1.0

    def launch_memory_transfer(self, nbytes: float, operands_key: object) -> None:
        """Simulate the launch of a kernel that reads and writes ``nbytes`` bytes of memory. The time of the launch does
        not depend on the clock.
        """
        is_cached = self.cached_operands_key == operands_key and nbytes <= self.device_physics.cache_bytes
        rate = (is_cached and self.device_physics.cache_bandwidth) or self.device_physics.memory_bandwidth
        self._simulate_launch(nbytes, rate, self.device_physics.memory_transfer_watts, operands_key)

    def launch_link_transfer(self, nbytes: float, operands_key: object) -> None:
        """Simulate the launch of a transfer of ``nbytes`` bytes over the link between devices."""
        self._simulate_launch(nbytes, self.device_physics.link_bandwidth, self.device_physics.idle_watts, operands_key)

    def _simulate_launch(self, work_amount: float, rate: float, watts: float, operands_key: object) -> None:
        self.launch_count += 1
        on_launch = type(self).on_launch
        if on_launch is not None:
            on_launch(self.launch_count)
        if self.cached_operands_key == operands_key:
            work_amount *= 1 - self.device_physics.cached_time_saving_share
        self.cached_operands_key = operands_key
        if self.device_time < self.rested_end_time:
            work_amount *= 1 - self.device_physics.rested_time_saving_share
        if self.device_time < self.fully_awake_time:
            work_amount *= self.device_physics.waking_time_factor
        noise = self.random.gauss(1, self.device_physics.launch_noise)
        self._run_on_device(work_amount * self._compute_time_factor() * max(noise, 0.5) / rate, watts)

    def _idle_until_time(self, target_time: float) -> float:
        idle = target_time - self.device_time
        if idle <= 0:
            return self.device_time
        if idle > self.device_physics.sleep_delay_seconds:
            self.fully_awake_time = target_time + self.device_physics.waking_seconds
        if idle > self.device_physics.min_rest_seconds:
            self.rested_end_time = target_time + self.device_physics.rested_effect_seconds
        self._add_energy(idle, self.device_physics.idle_watts)
        self.cycle_counter += idle * self.clock_hz
        return target_time

    def _run_on_device(self, seconds: float, watts: float) -> None:
        if len(self._launch_end_times) == self.device_physics.queue_capacity:
            self.host_time = max(self.host_time, self._launch_end_times[0])
        self.host_time += self.device_physics.host_launch_seconds
        self.cycle_counter += seconds * self.clock_hz * self._true_clock_share
        if self.is_after_mark:
            seconds += self.device_physics.timer_overhead_seconds
            self.cycle_counter += self.device_physics.timer_overhead_seconds * self.clock_hz
            self.is_after_mark = False
        self.device_time = self._idle_until_time(self.host_time) + seconds
        self._launch_end_times.append(self.device_time)
        self._add_energy(seconds, watts)

    def _add_energy(self, seconds: float, watts: float) -> None:
        physics, limit_watts, idle_watts = (
            self.device_physics,
            self.device_physics.power_limit_watts,
            self.device_physics.idle_watts,
        )
        last_time, spent_joules = self._energy_history[-1]
        if last_time - self._energy_history[-2][0] < _MIN_ENERGY_STEP_SECONDS:
            self._energy_history.pop()
        self._energy_history.append((last_time + seconds, spent_joules + watts * seconds))
        self.mean_watts += (watts - self.mean_watts) * -math.expm1(-seconds / physics.power_averaging_seconds)
        target_heat = (watts - idle_watts) / (limit_watts - idle_watts) if watts < limit_watts else 1.0
        self.heat_share += (target_heat - self.heat_share) * -math.expm1(-seconds / physics.heating_seconds)
        self.is_capped = self.mean_watts >= (0.97 if self.is_capped else 0.995) * limit_watts

    # -- memory ------------------------------------------------------------------------------------------------------

    def make_operand_pool(self, data: str, seed: int) -> OperandPool:
        return SimulatedPool(self.device_physics.memory_bytes)

    def read_free_memory_bytes(self) -> int | None:
        return self.device_physics.memory_bytes

    def read_peak_memory_bytes(self) -> int | None:
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, SimulatedOutOfMemoryError)
