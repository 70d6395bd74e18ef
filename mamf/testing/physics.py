"""The properties of a simulated device. The defaults describe an NVIDIA H100."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mamf.backend import MIB


class Scatter(NamedTuple):
    """Standard deviations of a launch's time between visits and between runs, as shares of that time."""

    visit: float
    run: float


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. Seconds, Hz, watts and bytes; bandwidths in bytes per second.

    Power and clock:

    - ``reaction_seconds``: time constant of the mean power to which the power controller reacts.
    - ``thermal_drift``: share of the clock that a hot device loses. ``throttled``: share of the time that the device
      spends at half its clock for a thermal reason.
    - ``hunting``: a device at its power limit alternates between two clocks every ``hunting_seconds``. This is their
      relative difference.
    - ``true_clock``: the clock while a kernel computes, as a share of the clock that sensors read. None: the device has
      no clock stamps.
    - ``counter_seconds``: time between two ticks of the energy counter; 0 if it is continuous.

    Launches:

    - ``data_cost``: share by which a matmul takes longer if its operands are not zeros.
    - ``cache_gain``: share of a launch's time that is saved if its operands are still in the cache.
    - ``cache_bandwidth``: bandwidth of arrays that fit in the cache and that the launch before used. None: as memory.
    - ``link``: bandwidth between devices.
    - ``rested_gain``: share of a launch's time that is saved for ``rested_gain_seconds`` after the device was idle for
      ``rested_after_seconds``.
    - ``waking_times``: factor by which launches take longer for ``waking_seconds`` after the device was idle for
      ``asleep_after_seconds``.

    Noise and faults:

    - ``noise``: relative standard deviation of a launch's time. ``at_boost``, ``capped``: how far visits and runs
      differ at the maximum clock and at the power limit.
    - ``timer_overhead``: how much two marks add to the measured time of the launch between them.
    - ``glitch_every``: one in this many intervals is measured as one nanosecond; 0 for none.
    - ``flips``: probability that a launch flips a bit of its output.
    - ``faulty_unit``: the compute unit that computes wrong tiles. Units take tiles of 128x256 in turn.
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
