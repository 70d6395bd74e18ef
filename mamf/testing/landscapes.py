"""The properties of a simulated device, and landscapes to search: burst TFLOPS by shape, recorded or generated,
with a known best.

A generated landscape imitates a library: of several tiles it takes the fastest, a product takes as many waves as its
tiles need, each wave reads and multiplies along K, and a part of every figure is specific to the shape.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mamf.backend import MIB
from mamf.operations.matmul.shapes import MatmulShape
from mamf.statistics import Repeatability

Landscape = dict[MatmulShape, float]


@dataclass(frozen=True)
class Chip:
    """``tiles``: M x N and the share of a unit's peak that a kernel of that tile reaches. ``own``: the standard
    deviation of what cannot be explained by any of this. ``lost_to_size``: the share of its speed that a kernel loses
    where C is 20480 x 20480, and in proportion where it is smaller.
    """

    compute_units: int = 132
    peak_tflops: float = 990.0
    bandwidth: float = 3.3e12
    tiles: tuple[tuple[int, int, float], ...] = ((128, 256, 0.86), (256, 128, 0.85), (128, 128, 0.80), (64, 256, 0.76))
    startup_k: float = 220.0
    own: float = 0.001
    lost_to_size: float = 0.0

    def tflops(self, shape: MatmulShape, seed: int = 0) -> float:
        seconds = min(self._seconds(shape, *tile) for tile in self.tiles)
        own = random.Random(f"{seed} {shape}").gauss(0.0, self.own)
        kept = 1 - self.lost_to_size * shape.m * shape.n / 20480**2
        return shape.flop / seconds / 1e12 * kept * math.exp(own)

    def _seconds(self, shape: MatmulShape, tile_m: int, tile_n: int, share: float) -> float:
        tiles = math.ceil(shape.m / tile_m) * math.ceil(shape.n / tile_n)
        waves = math.ceil(tiles / self.compute_units)
        flops_of_unit = self.peak_tflops * 1e12 / self.compute_units * share
        computing = waves * 2 * tile_m * tile_n * (shape.k + self.startup_k) / flops_of_unit
        nbytes = 2 * sum(shape.elements.values())
        return max(computing, nbytes / self.bandwidth) + 2e-6


#: Chips that no search was tuned on.
CHIPS = {
    "132 units": Chip(),
    "108 units": Chip(
        108, 312.0, 1.6e12, ((256, 128, 0.88), (128, 256, 0.87), (128, 128, 0.84), (64, 128, 0.7)), 120.0
    ),
    "304 units": Chip(
        304, 1307.0, 5.3e12, ((256, 256, 0.60), (256, 224, 0.58), (128, 192, 0.52), (128, 128, 0.5)), 400.0
    ),
    "20 units": Chip(20, 40.0, 3e11, ((64, 64, 0.75), (64, 128, 0.85), (128, 64, 0.84)), 60.0),
}

#: A second kernel of the chip of 132 units: slower where the first is at its best, and at its own best faster.
BEST_ELSEWHERE = Chip(tiles=((128, 256, 0.89), (256, 128, 0.89)), startup_k=300.0, lost_to_size=0.15)


def made(chip: Chip, shapes: Iterable[MatmulShape], seed: int = 0) -> Landscape:
    return {shape: chip.tflops(shape, seed) for shape in shapes}


def recorded(path: Path) -> Landscape:
    """A CSV with the columns m, n, k, tflops."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {MatmulShape(*(int(float(row[name])) for name in "mnk")): float(row["tflops"]) for row in rows}


def noisy(landscape: Landscape, noise: float, seed: int = 0) -> Landscape:
    """Each figure with multiplicative noise of this standard deviation."""
    chooser = random.Random(seed)
    return {shape: tflops * chooser.gauss(1.0, noise) for shape, tflops in landscape.items()}


@dataclass(frozen=True)
class Physics:
    """Properties of a simulated device. Times in seconds, power in watts, memory in bytes.

    ``reaction_seconds``: time constant of the averaged power that the controller acts on. ``thermal_drift``: share of
    the clock lost when hot. ``cache_gain``: share of a launch's time saved by operands still in the cache. ``noise``:
    standard deviation of a launch's duration. ``glitch_every``: every so many intervals read as a nanosecond.
    ``timer_overhead``: what two marks add to a launch between them. ``data_cost``: share of its time that a product of
    other data than zeros takes longer. ``rested_gain``: share of a launch's time saved
    for ``rested_gain_seconds`` once the device was idle for ``rested_after_seconds``. ``at_boost`` and ``capped``: how
    far visits and runs lie apart, as shares of a launch's time. ``hunting``: share by which two levels of the clock lie
    apart that a capped device alternates between, every ``hunting_seconds``. ``wrong_every``: every so many launches
    leave wrong bits that no sampled entry shows. ``throttled``: share of the time at half the clock, for a thermal
    reason. ``link``: bytes per second between devices. ``waking_times``: how many times as long launches take for
    ``waking_seconds`` once the device was idle for ``asleep_after_seconds``. ``cache_bandwidth``: bytes per second of
    passes over arrays that fit in the cache and were used by the launch before; None: as memory.
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
    at_boost: Repeatability | None = None
    capped: Repeatability | None = None
    data_cost: float = 0.0
    hunting: float = 0.0
    hunting_seconds: float = 0.15
    wrong_every: int = 0
    throttled: float = 0.0
    link: float = 400e9
    waking_times: float = 1.0
    waking_seconds: float = 0.0
    asleep_after_seconds: float = 0.005
    cache_bandwidth: float | None = None
