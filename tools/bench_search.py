"""How few measurements does the search need? The share of a landscape's best rate that it reaches.

    python tools/bench_search.py LANDSCAPE.csv                # columns m,n,k,tflops; absent shapes cannot be measured
    python tools/bench_search.py LANDSCAPE.csv --made         # also on the simulated chips below, two of them with
                                                              # their best at the edges of the grid
    python tools/bench_search.py LANDSCAPE.csv --noise 0.003  # each measurement 0.3 % off, as on a card

"reached" is the true figure of the best shape among those measured, as a share of the landscape's best, without
the noise that the search saw. A shape counts once, even if it is measured again. "ms a step" is a search's own time
between two measurements, mean and longest.

A made landscape imitates a library: of several tiles it takes the fastest, a matmul takes as many waves as its tiles
need, each wave reads and multiplies along K, and a part of every figure is specific to the shape.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mamf.engine.search.search import find_best
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.report.document import align_table

# -- landscapes --------------------------------------------------------------------------------------------------------

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
        nbytes = 2 * sum(shape.element_counts.values())
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
    """Read a CSV with the columns m, n, k, tflops."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {MatmulShape(*(int(float(row[name])) for name in "mnk")): float(row["tflops"]) for row in rows}


# -- searches ----------------------------------------------------------------------------------------------------------

CHECKPOINTS = (50, 100, 150, 200)
COLUMNS = ("landscape", "search", *(f"{kind} {count}" for count in CHECKPOINTS for kind in ("median", "worst")))
TIMES = ("ms a step", "longest")
MADE_SIZES = range(1024, 21504, 1024)
# The sizes of M and N, and those of K, where the best lies at an edge.
EDGE_SIZES = (range(1024, 17408, 1024), (*range(1024, 21504, 1024), 24576, 32768, 40960, 49152, 65536))


@dataclass
class Task:
    """A landscape to be searched: absent shapes of its grid read as NaN."""

    name: str
    truth: Landscape
    compute_units: int
    grid: MatmulGrid = field(init=False)
    best: float = field(init=False)

    def __post_init__(self) -> None:
        sizes = (sorted({getattr(shape, name) for shape in self.truth}) for name in "mnk")
        self.grid = MatmulGrid(*sizes)
        self.best = max(self.truth.values())
        if len(self.truth) < CHECKPOINTS[-1]:
            raise SystemExit(f"{self.name} has {len(self.truth)} shapes: a search may measure {CHECKPOINTS[-1]}")


def made_task(name: str, chip: Chip) -> Task:
    sizes, lengths = EDGE_SIZES if name in EDGES else (MADE_SIZES, MADE_SIZES)
    return Task(name, made(chip, MatmulGrid(sizes, sizes, lengths).list_shapes()), chip.compute_units)


class SpentError(Exception):
    """The measurements that a search may take are spent."""


class Meter:
    """Measures by looking up, counts, and times what a search does in between."""

    def __init__(self, task: Task, noise: float, seed: int) -> None:
        self.task = task
        self.seen: dict[MatmulShape, float] = {}
        self.steps: list[float] = []
        self._noise = noise
        self._random = random.Random(seed)
        self._since = time.perf_counter()

    def __call__(self, shape: MatmulShape) -> float:
        self.steps.append(time.perf_counter() - self._since)
        if shape not in self.seen:
            if len(self.seen) == CHECKPOINTS[-1]:
                raise SpentError
            self.seen[shape] = self.task.truth.get(shape, math.nan) * self._random.gauss(1.0, self._noise)
        self._since = time.perf_counter()
        return self.seen[shape]

    def reached(self, count: int) -> float:
        """Return the share of the landscape's best that the first ``count`` measurements reached."""
        return max(self.task.truth.get(shape, 0.0) for shape in list(self.seen)[:count]) / self.task.best


def run(task: Task, compute_units: int | None, noise: float, seeds: range) -> list[str]:
    """Return the cells of a line: what the search reached over the seeds, and its own time."""
    meters = []
    for seed in seeds:
        meter = Meter(task, noise, seed)
        with contextlib.suppress(SpentError):
            find_best(meter, task.grid, compute_units=compute_units, max_measurements=CHECKPOINTS[-1], seed=seed)
        meters.append(meter)
    cells = []
    for count in CHECKPOINTS:
        reached = [meter.reached(count) for meter in meters]
        cells += [f"{100 * value:.2f}" for value in (statistics.median(reached), min(reached))]
    # Before the first measurement it sets out: once, and no device waits.
    steps = [1000 * step for meter in meters for step in meter.steps[1:]]
    return [*cells, f"{statistics.fmean(steps):.1f}", f"{max(steps):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscape", type=Path, metavar="LANDSCAPE.csv")
    parser.add_argument("--compute-units", type=int, default=132, help="of the recorded device (default: 132)")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each search (default: 20)")
    parser.add_argument("--first-seed", type=int, default=0, help="of these runs; use seeds that nothing was tuned on")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of a measurement (default: 0)")
    parser.add_argument("--made", action="store_true")
    options = parser.parse_args()
    tasks = [Task(options.landscape.stem, recorded(options.landscape), options.compute_units)]
    if options.made:
        tasks += [made_task(name, chip) for name, chip in (CHIPS | EDGES).items()]
    print(f"best reached in %, by measurements; {options.seeds} seeds from {options.first_seed}, noise {options.noise}")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    lines = [
        [task.name, name, *run(task, units, options.noise, seeds)]
        for task in tasks
        for name, units in (("mamf", task.compute_units), ("mamf, compute units unknown", None))
    ]
    print(align_table((*COLUMNS, *TIMES), lines, COLUMNS[:2]), end="")


if __name__ == "__main__":
    main()
