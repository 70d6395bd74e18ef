"""The properties of a simulated device. By default an NVIDIA H100."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mamf.backend import MIB


class Scatter(NamedTuple):
    """Standard deviations between visits and between runs, as shares of a launch's time."""

    visit: float
    run: float


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. Times in seconds, power in watts, memory in bytes.

    ``reaction_seconds``: time constant of the averaged power that the controller acts on. ``thermal_drift``: share of
    the clock lost when hot. ``cache_gain``: share of a launch's time saved by operands still in the cache. ``noise``:
    standard deviation of a launch's duration. ``glitch_every``: every so many intervals read as a nanosecond.
    ``timer_overhead``: what two marks add to a launch between them. ``data_cost``: share of its time that a product of
    other data than zeros takes longer. ``rested_gain``: share of a launch's time saved
    for ``rested_gain_seconds`` once the device was idle for ``rested_after_seconds``. ``at_boost`` and ``capped``: how
    far visits and runs lie apart. ``hunting``: share by which two levels of the clock lie
    apart that a capped device alternates between, every ``hunting_seconds``. ``flips``: the probability that a launch
    flips a bit of its output. ``faulty_unit``: the compute unit whose tiles are wrong; tiles of 128x256 go to the units
    in turn. ``throttled``: share of the time at half the clock, for a thermal reason.
    ``link``: bytes per second between devices. ``waking_times``: how many times as long launches take for
    ``waking_seconds`` once the device was idle for ``asleep_after_seconds``. ``cache_bandwidth``: bytes per second of
    passes over arrays that fit in the cache and were used by the launch before; None: as memory.
    ``counter_seconds``: between two ticks of the energy counter; 0: it is continuous. ``true_clock``: the clock while a
    kernel computes, as a share of the one that sensors read; None: without stamps of the clock.
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
