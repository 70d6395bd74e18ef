"""How few measurements does the search need? Share of a landscape's best reached, beside random shapes.

    python tools/bench_search.py LANDSCAPE.csv                # columns m,n,k,tflops; absent shapes cannot be measured
    python tools/bench_search.py LANDSCAPE.csv --made         # also on the simulated chips of tools/landscapes.py, two
                                                              # of them with their best at the edges of the grid
    python tools/bench_search.py LANDSCAPE.csv --noise 0.003  # each measurement 0.3 % off, as on a card
    python tools/bench_search.py LANDSCAPE.csv --several      # several kernels at once, and one that is best elsewhere
    python tools/bench_search.py LANDSCAPE.csv --only mamf    # only searches whose names begin with this

"reached" is the true figure of the best shape among those measured, as a share of the landscape's best, without
the noise that the search saw. A shape counts once, even if it is measured again. "ms a step" is a search's own time
between two measurements, mean and longest.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from landscapes import BEST_ELSEWHERE, CHIPS, EDGES, Chip, Landscape, made, noisy, recorded

from mamf.engine.search.search import FIRST_SHAPES, Search, find_best
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.report.text import table

CHECKPOINTS = (50, 100, 150, 200)
COLUMNS = ("landscape", "search", *(f"{kind} {count}" for count in CHECKPOINTS for kind in ("median", "worst")))
TIMES = ("ms a step", "longest")
MADE_SIZES = range(1024, 21504, 1024)
# The sizes of M and N, and those of K, where the best lies at an edge.
EDGE_SIZES = (range(1024, 17408, 1024), (*range(1024, 21504, 1024), 24576, 32768, 40960, 49152, 65536))


@dataclass
class Task:
    """A landscape to be searched: absent shapes of its grid read as NaN. ``others``: those of further kernels."""

    name: str
    truth: Landscape
    compute_units: int
    others: Sequence[Landscape] = ()
    grid: MatmulGrid = field(init=False)
    best: float = field(init=False)

    def __post_init__(self) -> None:
        sizes = (sorted({getattr(shape, name) for shape in self.truth}) for name in "mnk")
        self.grid = MatmulGrid(*sizes)
        self.best = max(max(each.values(), default=0.0) for each in (self.truth, *self.others))
        if len(self.truth) < CHECKPOINTS[-1]:
            raise SystemExit(f"{self.name} has {len(self.truth)} shapes: a search may measure {CHECKPOINTS[-1]}")


def made_task(name: str, chip: Chip) -> Task:
    sizes, lengths = EDGE_SIZES if name in EDGES else (MADE_SIZES, MADE_SIZES)
    return Task(name, made(chip, MatmulGrid(sizes, sizes, lengths).shapes()), chip.compute_units)


class SpentError(Exception):
    """The measurements that a search may take are spent."""


class Meter:
    """Measures by looking up, counts, and times what a search does in between."""

    def __init__(self, task: Task, noise: float, seed: int) -> None:
        self.task = task
        self.seen: dict[tuple[MatmulShape, int], float] = {}
        self.steps: list[float] = []
        self._noise = noise
        self._random = random.Random(seed)
        self._since = time.perf_counter()

    def __call__(self, shape: MatmulShape, kernel: int = 0) -> float:
        self.steps.append(time.perf_counter() - self._since)
        asked = shape, kernel
        if asked not in self.seen:
            if len(self.seen) == CHECKPOINTS[-1]:
                raise SpentError
            self.seen[asked] = self.true(*asked, math.nan) * self._random.gauss(1.0, self._noise)
        self._since = time.perf_counter()
        return self.seen[asked]

    def true(self, shape: MatmulShape, kernel: int, otherwise: float) -> float:
        return (self.task.truth, *self.task.others)[kernel].get(shape, otherwise)

    def reached(self, count: int) -> float:
        """Share of the landscape's best that the first ``count`` measurements held."""
        return max(self.true(*asked, 0.0) for asked in list(self.seen)[:count]) / self.task.best


Contender = Callable[[Meter, int], object]


def ours(meter: Meter, seed: int) -> None:
    units = meter.task.compute_units
    find_best(meter, meter.task.grid, compute_units=units, max_measurements=CHECKPOINTS[-1], seed=seed)


def ours_blind(meter: Meter, seed: int) -> None:
    find_best(meter, meter.task.grid, max_measurements=CHECKPOINTS[-1], seed=seed)


def ours_with_several_kernels(meter: Meter, seed: int) -> None:
    """The first scouts; the others join as they do in a find."""
    search = Search(list(meter.task.truth), "0", compute_units=meter.task.compute_units, seed=seed)
    while (proposed := search.propose()) is not None:
        shape, kernel = proposed
        search.record(proposed, meter(shape, int(kernel)))
        if len(search.measured) == FIRST_SHAPES:
            for number in range(1, len(meter.task.others) + 1):
                search.add_kernel(str(number))


def at_random(meter: Meter, seed: int) -> None:
    # Not the bare seed: a recorded landscape lacks what a shuffle by some seed left for last.
    for shape in random.Random(f"random {seed}").sample(meter.task.grid.shapes(), CHECKPOINTS[-1]):
        meter(shape)


SEARCHES: dict[str, Contender] = {
    "mamf": ours,
    "mamf, compute units unknown": ours_blind,
    "mamf, several kernels": ours_with_several_kernels,
    "random": at_random,
}


def run(task: Task, search: Contender, noise: float, seeds: range) -> list[str]:
    """The cells of a line: what a search reached over the seeds, and its own time."""
    meters = []
    for seed in seeds:
        meter = Meter(task, noise, seed)
        with contextlib.suppress(SpentError):
            search(meter, seed)
        meters.append(meter)
    cells = []
    for count in CHECKPOINTS:
        reached = [meter.reached(count) for meter in meters]
        cells += [f"{100 * value:.2f}" for value in (statistics.median(reached), min(reached))]
    # Before the first measurement it sets out: once, and no device waits.
    steps = [1000 * step for meter in meters for step in meter.steps[1:]]
    return [*cells, f"{statistics.fmean(steps):.1f}", f"{max(steps):.1f}"]


def tasks_from(options: argparse.Namespace) -> list[Task]:
    tasks = [Task(options.landscape.stem, recorded(options.landscape), options.compute_units)]
    if options.made:
        tasks += [made_task(name, chip) for name, chip in (CHIPS | EDGES).items()]
    if options.several:
        truth = tasks[0].truth
        alike, slower, far_slower = (
            {shape: share * tflops for shape, tflops in noisy(truth, own, seed).items()}
            for seed, (share, own) in enumerate(((1.0, 0.001), (0.92, 0.02), (0.7, 0.02)))
        )
        shapes = MatmulGrid(MADE_SIZES, MADE_SIZES, MADE_SIZES).shapes()
        first = CHIPS["132 units"]
        elsewhere = [made(BEST_ELSEWHERE, shapes, seed=1)]
        tasks += [
            Task("and one alike", truth, options.compute_units, [alike]),
            Task("and three", truth, options.compute_units, [alike, slower, far_slower]),
            Task("best elsewhere", made(first, shapes), first.compute_units, elsewhere),
        ]
    return tasks


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Share of a landscape's best that searches reach, in per cent.")
    parser.add_argument("landscape", type=Path, metavar="LANDSCAPE.csv", help="columns m, n, k, tflops")
    parser.add_argument("--compute-units", type=int, default=132, help="of the recorded device (default: 132)")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each search (default: 20)")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=0,
        help="of these runs: fresh ones show what a choice of settings fitted (default: 0)",
    )
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of a measurement (default: 0)")
    parser.add_argument("--made", action="store_true", help="search made landscapes of other chips too")
    parser.add_argument("--several", action="store_true", help="landscapes of several kernels too")
    parser.add_argument("--only", default="", metavar="NAME", help="of the searches whose names begin so")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    tasks = tasks_from(options)
    print(
        f"best reached, % of the landscape's, after so many measurements; {options.seeds} seeds from "
        f"{options.first_seed}, noise {options.noise}"
    )
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    lines = [
        [task.name, name, *run(task, search, options.noise, seeds)]
        for task in tasks
        for name, search in SEARCHES.items()
        if name.startswith(options.only) and bool(task.others) == (search is ours_with_several_kernels)
    ]
    print(table((*COLUMNS, *TIMES), lines, COLUMNS[:2]), end="")


if __name__ == "__main__":
    main()
