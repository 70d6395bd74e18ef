"""Landscapes to search: burst TFLOPS by shape, recorded or generated, with a known best.

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

from mamf.operations.matmul.shapes import MatmulShape

Landscape = dict[MatmulShape, float]


@dataclass(frozen=True)
class Chip:
    """``tiles``: M x N and the share of a unit's peak that a kernel of that tile reaches. ``own``: the standard
    deviation of what cannot be explained by any of this. ``lost_to_size``: the share of its speed that a kernel loses
    where C is 20480 x 20480, and in proportion where it is smaller. ``kept_at_k``: two sizes of K with the shares of
    its speed that it keeps up to the first and from the second on, and in proportion between them.
    """

    compute_units: int = 132
    peak_tflops: float = 990.0
    bandwidth: float = 3.3e12
    tiles: tuple[tuple[int, int, float], ...] = ((128, 256, 0.86), (256, 128, 0.85), (128, 128, 0.80), (64, 256, 0.76))
    startup_k: float = 220.0
    own: float = 0.001
    lost_to_size: float = 0.0
    kept_at_k: tuple[tuple[int, float], tuple[int, float]] = ((0, 1.0), (1, 1.0))

    def tflops(self, shape: MatmulShape, seed: int = 0) -> float:
        seconds = min(self._seconds(shape, *tile) for tile in self.tiles)
        own = random.Random(f"{seed} {shape}").gauss(0.0, self.own)
        kept = 1 - self.lost_to_size * shape.m * shape.n / 20480**2
        (first, kept_first), (last, kept_last) = self.kept_at_k
        kept *= kept_first + (kept_last - kept_first) * min(max((shape.k - first) / (last - first), 0.0), 1.0)
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

_HOPPER_TILES = ((128, 256, 0.89), (256, 128, 0.89), (128, 128, 0.80))

#: Chips whose best shapes lie at the edges of a grid. The first is a model of an H200: C of one wave of tiles gains
#: 1 % from K = 20480 to 40960, and loses some of it to 65536. On the second the operands of a wave stay in the cache
#: where K is short, and many waves are needed.
EDGES = {
    "best at long K": Chip(
        tiles=_HOPPER_TILES, startup_k=900.0, lost_to_size=0.6, kept_at_k=((20480, 1.0), (65536, 0.97))
    ),
    "best at short K": Chip(148, 990.0, 4e12, _HOPPER_TILES, startup_k=15.0, kept_at_k=((1536, 1.0), (2048, 0.97))),
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
