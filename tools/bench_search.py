"""Test how close the search of ``mamf find`` gets to the best rate after 50 to 200 measurements.

    python tools/bench_search.py LANDSCAPE.csv                # search the rates in this file
    python tools/bench_search.py LANDSCAPE.csv --made         # search the simulated chips below too
    python tools/bench_search.py LANDSCAPE.csv --noise 0.003  # add noise of 0.3 % to each rate, as on a real card

A landscape is a set of shapes with their rates. The file has the columns m, n, k and tflops. Shapes of the grid that
are missing in the file are shapes that cannot be measured (NaN).

The tool runs each search several times with different random seeds. The table shows the rate of the best shape that a
search found, in percent of the best rate in the landscape: the median and the worst of all seeds. The rates in the
table do not include the noise. Repeated measurements of a shape count as one measurement. "ms per step" is the mean
time that the search needs between two measurements, and "longest" is the longest time.

A simulated chip imitates a matmul library. The library uses the fastest of several tile sizes. The time of a matmul
grows with the number of waves that its tiles need, and the time of a wave grows with K. Each shape also has a small
random deviation. On two of the chips, the best shape is at an edge of the grid.
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
    """A simulated chip, which gives a rate for each matmul shape.

    - ``bandwidth``: the memory bandwidth in bytes per second.
    - ``tiles``: the tile sizes of the kernels as M, N, and the share of a compute unit's peak that the kernel reaches.
    - ``startup_k``: the time that a wave needs to start, expressed as an additional length of K.
    - ``deviation``: the standard deviation of the random deviation that each shape has.
    - ``lost_to_size``: the share of its speed that a kernel loses if C is 20480 x 20480. With a smaller C, it loses
      proportionally less.
    - ``kept_at_k``: two lengths of K, each with the share of its speed that a kernel keeps. Below the first and above
      the second length, the share is constant; between them, it is interpolated.
    """

    compute_units: int = 132
    peak_tflops: float = 990.0
    bandwidth: float = 3.3e12
    tiles: tuple[tuple[int, int, float], ...] = ((128, 256, 0.86), (256, 128, 0.85), (128, 128, 0.80), (64, 256, 0.76))
    startup_k: float = 220.0
    deviation: float = 0.001
    lost_to_size: float = 0.0
    kept_at_k: tuple[tuple[int, float], tuple[int, float]] = ((0, 1.0), (1, 1.0))

    def compute_tflops(self, shape: MatmulShape, seed: int = 0) -> float:
        """Return the rate of a shape. ``seed``: selects the random deviations of the shapes."""
        seconds = min(self._compute_seconds(shape, *tile) for tile in self.tiles)
        deviation = random.Random(f"{seed} {shape}").gauss(0.0, self.deviation)
        speed = 1 - self.lost_to_size * shape.m * shape.n / 20480**2
        (first, kept_first), (last, kept_last) = self.kept_at_k
        speed *= kept_first + (kept_last - kept_first) * min(max((shape.k - first) / (last - first), 0.0), 1.0)
        return shape.flop / seconds / 1e12 * speed * math.exp(deviation)

    def _compute_seconds(self, shape: MatmulShape, tile_m: int, tile_n: int, share: float) -> float:
        tiles = math.ceil(shape.m / tile_m) * math.ceil(shape.n / tile_n)
        waves = math.ceil(tiles / self.compute_units)
        flops_per_unit = self.peak_tflops * 1e12 / self.compute_units * share
        compute_seconds = waves * 2 * tile_m * tile_n * (shape.k + self.startup_k) / flops_per_unit
        nbytes = 2 * sum(shape.element_counts.values())
        return max(compute_seconds, nbytes / self.bandwidth) + 2e-6


#: Chips that were not used to tune the search.
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

#: Chips on which the best shape is at an edge of the grid. The first is a model of an H200: if the tiles of C need only
#: one wave, the rate rises by 1 % from K = 20480 to 40960, and falls again up to K = 65536, though by less. On the
#: second, the operands of a wave fit in the cache only if K is small, and the best shape needs many waves.
EDGES = {
    "best at long K": Chip(
        tiles=_HOPPER_TILES, startup_k=900.0, lost_to_size=0.6, kept_at_k=((20480, 1.0), (65536, 0.97))
    ),
    "best at short K": Chip(148, 990.0, 4e12, _HOPPER_TILES, startup_k=15.0, kept_at_k=((1536, 1.0), (2048, 0.97))),
}

#: A second kernel for the chip with 132 units. It is slower than the first kernel on the first kernel's best shape, but
#: on its own best shape it is faster than the first kernel on any shape.
BEST_ELSEWHERE = Chip(tiles=((128, 256, 0.89), (256, 128, 0.89)), startup_k=300.0, lost_to_size=0.15)


def simulate_landscape(chip: Chip, shapes: Iterable[MatmulShape], seed: int = 0) -> Landscape:
    """Return the landscape of a simulated chip."""
    return {shape: chip.compute_tflops(shape, seed) for shape in shapes}


def read_landscape(path: Path) -> Landscape:
    """Read a landscape from a CSV file with the columns m, n, k and tflops."""
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {MatmulShape(*(int(float(row[name])) for name in "mnk")): float(row["tflops"]) for row in rows}


# -- searches ----------------------------------------------------------------------------------------------------------

MEASUREMENT_COUNTS = (50, 100, 150, 200)
COLUMNS = ("landscape", "search", *(f"{kind} {count}" for count in MEASUREMENT_COUNTS for kind in ("median", "worst")))
TIME_COLUMNS = ("ms per step", "longest")
SIMULATED_SIZES = range(1024, 21504, 1024)
# For the chips in EDGES: the sizes of M and N, and the sizes of K.
EDGE_SIZES = (range(1024, 17408, 1024), (*range(1024, 21504, 1024), 24576, 32768, 40960, 49152, 65536))


@dataclass
class Task:
    """A landscape to search, and its grid. The rate of a shape that is not in the landscape is NaN."""

    name: str
    rates: Landscape
    compute_units: int
    grid: MatmulGrid = field(init=False)
    best: float = field(init=False)

    def __post_init__(self) -> None:
        sizes = (sorted({getattr(shape, name) for shape in self.rates}) for name in "mnk")
        self.grid = MatmulGrid(*sizes)
        self.best = max(self.rates.values())
        if len(self.rates) < MEASUREMENT_COUNTS[-1]:
            raise SystemExit(
                f"{self.name} has too few shapes ({len(self.rates)}): give at least {MEASUREMENT_COUNTS[-1]}, "
                "because a search measures as many"
            )


def make_task(name: str, chip: Chip) -> Task:
    sizes, lengths = EDGE_SIZES if name in EDGES else (SIMULATED_SIZES, SIMULATED_SIZES)
    return Task(name, simulate_landscape(chip, MatmulGrid(sizes, sizes, lengths).list_shapes()), chip.compute_units)


class MeasurementsSpentError(Exception):
    """The error that stops a search after its last permitted measurement."""


class RateLookup:
    """A function that measures a shape by looking up its rate.

    - ``measured_rates``: the measured shapes, in order, with the rates that the search received.
    - ``step_seconds``: the seconds that the search took before each measurement.
    """

    def __init__(self, task: Task, noise: float, seed: int) -> None:
        self.task = task
        self.measured_rates: dict[MatmulShape, float] = {}
        self.step_seconds: list[float] = []
        self._noise = noise
        self._random = random.Random(seed)
        self._last_measured_at = time.perf_counter()

    def __call__(self, shape: MatmulShape) -> float:
        self.step_seconds.append(time.perf_counter() - self._last_measured_at)
        if shape not in self.measured_rates:
            if len(self.measured_rates) == MEASUREMENT_COUNTS[-1]:
                raise MeasurementsSpentError
            self.measured_rates[shape] = self.task.rates.get(shape, math.nan) * self._random.gauss(1.0, self._noise)
        self._last_measured_at = time.perf_counter()
        return self.measured_rates[shape]

    def compute_best_share(self, count: int) -> float:
        """Return the best rate among the first ``count`` measured shapes, as a share of the landscape's best rate."""
        return max(self.task.rates.get(shape, 0.0) for shape in list(self.measured_rates)[:count]) / self.task.best


def run_searches(task: Task, compute_units: int | None, noise: float, seeds: range) -> list[str]:
    """Run the search once for each seed. Return the cells of its row in the table: the rates, then the times."""
    lookups = []
    for seed in seeds:
        lookup = RateLookup(task, noise, seed)
        with contextlib.suppress(MeasurementsSpentError):
            find_best(
                lookup, task.grid, compute_units=compute_units, max_measurements=MEASUREMENT_COUNTS[-1], seed=seed
            )
        lookups.append(lookup)
    cells = []
    for count in MEASUREMENT_COUNTS:
        best_shares = [lookup.compute_best_share(count) for lookup in lookups]
        cells += [f"{100 * share:.2f}" for share in (statistics.median(best_shares), min(best_shares))]
    # Leave out the time before the first measurement: it occurs only once, and no device waits during it.
    milliseconds = [1000 * step for lookup in lookups for step in lookup.step_seconds[1:]]
    return [*cells, f"{statistics.fmean(milliseconds):.1f}", f"{max(milliseconds):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "landscape",
        type=Path,
        metavar="LANDSCAPE.csv",
        help="rates of matmul shapes, with the columns m, n, k and tflops",
    )
    parser.add_argument(
        "--compute-units", type=int, default=132, help="number of compute units of the recorded device (default: 132)"
    )
    parser.add_argument("--seeds", type=int, default=20, help="number of runs of each search (default: 20)")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=0,
        help="seed of the first run (default: 0); choose seeds that were not used to tune the search",
    )
    parser.add_argument(
        "--noise", type=float, default=0.0, help="standard deviation of a measurement, as a share (default: 0)"
    )
    parser.add_argument("--made", action="store_true", help="also search the simulated chips (default: only the file)")
    options = parser.parse_args()
    tasks = [Task(options.landscape.stem, read_landscape(options.landscape), options.compute_units)]
    if options.made:
        tasks += [make_task(name, chip) for name, chip in (CHIPS | EDGES).items()]
    print(
        f"best rate found, in % of the highest rate, after {MEASUREMENT_COUNTS[0]} to {MEASUREMENT_COUNTS[-1]} "
        f"measurements; {options.seeds} seeds from {options.first_seed}, noise {options.noise}"
    )
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    lines = [
        [task.name, name, *run_searches(task, units, options.noise, seeds)]
        for task in tasks
        for name, units in (("mamf", task.compute_units), ("mamf, compute units unknown", None))
    ]
    print(align_table((*COLUMNS, *TIME_COLUMNS), lines, COLUMNS[:2]), end="")


if __name__ == "__main__":
    main()
