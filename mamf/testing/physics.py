"""Define the properties of a simulated device, such as its clocks, power limit and noise. The defaults describe an
NVIDIA H100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mamf.backend import MIB


class Scatter(NamedTuple):
    """Standard deviations by which the time of a launch varies, as shares of that time.

    - ``visit``: between visits. A visit is a few seconds in which one shape is measured without a break.
    - ``run``: between runs of mamf.
    """

    visit: float
    run: float


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. Times are in seconds, clocks in Hz, power in watts, sizes in bytes, and
    bandwidths in bytes per second.

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
