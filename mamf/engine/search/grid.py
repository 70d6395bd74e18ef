"""Plans a search for ceilings: its grid, its budget, the time of each phase, and the shapes to begin with."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mamf.backend import Backend, DeviceInfo
from mamf.engine.estimate import MIN_PROBE_SIZE, choose_working_kernels, measure_matmul_flops
from mamf.engine.search.rounds import Rounds
from mamf.errors import MamfError, UnsupportedError, UsageError, require_seconds
from mamf.logs.ceiling_cache import find_cached_ceiling
from mamf.measurement import label_dtype
from mamf.operations.matmul.shapes import MatmulGrid, MatmulKernel, MatmulProblem, MatmulShape, SearchOptions
from mamf.peaks import find_contributed_rates
from mamf.plans import CEILINGS, DEFAULT_BUDGET_SECONDS, FIND, MATMUL, QUICK_BUDGET_SECONDS, Plan


def find_earlier_winners(info: DeviceInfo, problem: MatmulProblem) -> list[MatmulShape]:
    """Return the winning shapes of an earlier find on this device, then the winning shapes of contributed finds on
    devices of its model.
    """
    shapes = list[MatmulShape]()
    for regime in CEILINGS:
        with suppress(MamfError, OSError):  # the log of that find cannot be read
            if left := find_cached_ceiling(info, problem, regime):
                shapes.append(left.shape)
    for ceiling in find_contributed_rates(info.name, info.compute_units, label_dtype(problem)):
        shapes += map(MatmulShape.parse, ceiling.shapes)
    return list(dict.fromkeys(shapes))


_STEPS = 20
#: Sizes of K beyond the largest M, as multiples of it: if C is a single wave of tiles, a long K may be fastest.
_LONGER = (1.2, 1.6, 2.0, 2.4, 3.2)
_LARGEST_STEP = 1024
_SHARE_OF_MEMORY = 0.6
_SUSTAINED_SETS = 3
_QUICK_SCOUTS, _QUICK_REFINEMENTS = 40, 48
#: Seconds by which each kernel that compiles makes a quick search longer.
_COMPILING_SECONDS = 4.0
#: FLOP of the largest shape in a quick search, as a share of a thorough search's.
_QUICK_SHARE = 0.25


def make_grid(backend: Backend, problem: MatmulProblem, flops: float, budget_seconds: float, scouts: int) -> MatmulGrid:
    """Return a coarse grid for a device with this speed (``flops``, FLOP/s) and its free memory.

    It limits the FLOP of a shape so that a launch takes at most 1.2 trains of a burst, and ``scouts`` shapes fit the
    budget.
    """
    longest = min(1.2 * backend.burst_traits.train_seconds, THOROUGH.scout * budget_seconds / scouts / 4)
    max_flop = flops * longest
    side = 2 * (max_flop / 2) ** (1 / 3)
    free = backend.free_memory()
    if free is not None:
        needed = problem.buffers(MatmulShape(1024, 1024, 1024)).values()
        itemsize = sum(buffer.nbytes for buffer in needed) / 3 / 1024**2
        side = min(side, (free * _SHARE_OF_MEMORY / _SUSTAINED_SETS / 3 / itemsize) ** 0.5)
    step = min(_LARGEST_STEP, max(64, int(side / _STEPS) // 64 * 64))
    sizes = tuple(step * count for count in range(1, _STEPS + 1))
    longer = (step * round(_STEPS * times) for times in _LONGER)
    return MatmulGrid(sizes, sizes, (*sizes, *longer), max_flop)


def list_grid_shapes(grid: MatmulGrid) -> list[MatmulShape]:
    """Return the shapes of a grid that fit its bounds (see ``fits_grid``)."""
    return [shape for shape in grid.shapes() if fits_grid(grid, shape)]


@dataclass(frozen=True)
class Pace:
    """How thorough a search is.

    - ``scout``, ``refine``, ``choose``, ``burst``: the share of the budget after which each phase of burst ends, if the
      search is for burst and sustained.
    - ``visit``, ``chosen``: the share of the budget after which the two choosing phases of sustained end: visits to the
      candidates, then rounds of the best ones.
    - ``burst_rounds``, ``sustained_rounds``: the rounds of each regime.
    - ``candidates``: the number of candidates in the rounds of burst.
    - ``algorithm_shapes``: the number of shapes on which each kernel's algorithms are measured before these rounds.
    """

    scout: float
    refine: float
    choose: float
    burst: float
    burst_rounds: Rounds
    candidates: int
    algorithm_shapes: int
    sustained_rounds: Rounds
    visit: float = 1.0
    chosen: float = 1.0

    @property
    def has_choosing_visits(self) -> bool:
        """Whether sustained makes short visits to choose candidates; if not, it confirms the best of burst."""
        return self.sustained_rounds.choose > 0


THOROUGH = Pace(
    scout=0.15,
    refine=0.30,
    choose=0.36,
    burst=0.40,
    burst_rounds=Rounds(choose=6, confirm=15),
    candidates=8,
    algorithm_shapes=3,
    sustained_rounds=Rounds(choose=1, confirm=6),
    visit=0.44,
    chosen=0.51,
)
QUICK = Pace(
    scout=0.15,
    refine=0.20,
    choose=0.235,
    burst=0.275,
    burst_rounds=Rounds(choose=3, confirm=12),
    candidates=5,
    algorithm_shapes=1,
    # In sustained the best candidates of burst differ by less than 0.2 %, so spend the time on longer visits.
    sustained_rounds=Rounds(choose=0, confirm=6),
)


def choose_pace(options: SearchOptions) -> Pace:
    return QUICK if options.is_quick else THOROUGH


def plan_search(
    backend: Backend,
    problem: MatmulProblem,
    names: Sequence[str] | None = None,
    *,
    regimes: tuple[str, ...] = CEILINGS,
    budget_seconds: float | None = None,
    precision: float = 0.003,
    scouts: int | None = None,
    is_quick: bool = False,
) -> tuple[Plan, list[MatmulKernel]]:
    """Plan a search, and return the plan and its kernels.

    The grid fits the device's speed, which a few launches measure, and its memory. The search begins with shapes that
    won before on devices of this model. If the first kernel does not support the problem, the grid has a single shape.

    - ``names``: the kernels; by default, those that a search tries without being asked to.
    - ``budget_seconds``: by default 57, or 13.2 if ``is_quick`` plus 4 for each kernel that compiles.
    - ``scouts``: the number of shapes to measure on the coarse grid.

    Raises what ``choose_working_kernels`` raises, and UsageError if the budget is too short.
    """
    kernels = choose_working_kernels(backend, problem, names, is_quick)
    if budget_seconds is None:
        compiling = sum(not kernel.has_cheap_variants for kernel in kernels[1:])
        quick = QUICK_BUDGET_SECONDS + _COMPILING_SECONDS * compiling
        budget_seconds = quick if is_quick else DEFAULT_BUDGET_SECONDS
    scouts = scouts or (_QUICK_SCOUTS if is_quick else SearchOptions.scouts)
    require_seconds("budget_seconds", budget_seconds)
    refinements = _QUICK_REFINEMENTS if is_quick else SearchOptions.refinements
    try:
        flops = measure_matmul_flops(kernels[0], problem, backend)
        grid = make_grid(backend, problem, flops, budget_seconds, scouts)
        if is_quick:
            grid = replace(grid, most_flop=_QUICK_SHARE * grid.most_flop)
    except UnsupportedError:  # a row will say why
        grid, scouts, refinements = MatmulGrid(*((MIN_PROBE_SIZE,),) * 3), 1, 0
    if not grid.accepts(MatmulShape(grid.m[0], grid.n[0], grid.k[0])):
        reached = f"{problem.dtype}, which reaches {flops / 1e9:.3g} GFLOPS here"
        raise UsageError(f"a budget of {budget_seconds:g} s is too short for {reached}: raise the budget")
    first = tuple(shape for shape in find_earlier_winners(backend.info, problem) if fits_grid(grid, shape))
    plan = Plan(
        FIND,
        MATMUL,
        (problem,),
        tuple(dict.fromkeys(names or (kernel.name for kernel in kernels))),
        regimes=regimes,
        precision=precision,
        budget_seconds=budget_seconds,
        options=SearchOptions(grid, scouts, refinements, first, is_quick),
    )
    return plan, kernels


def fits_grid(grid: MatmulGrid, shape: MatmulShape) -> bool:
    """Return whether a shape is within the grid's bounds. Its sizes need not be sizes of the grid. No operand may have
    more elements than the square of the largest M or N, because the grid's memory was computed for that.
    """
    widest = max(*grid.m, *grid.n)
    within = shape.m <= max(grid.m) and shape.n <= max(grid.n) and shape.k <= max(grid.k)
    return within and grid.accepts(shape) and shape.k * max(shape.m, shape.n) <= widest**2


def list_refinement_steps(grid: MatmulGrid) -> list[int]:
    """Return a quarter, an eighth and a sixteenth of the grid's step, as multiples of 16. Each occurs twice, because
    the leaders change during a refinement.
    """
    step = grid.m[0]
    return [max(16, step // part // 16 * 16) for part in (4, 4, 8, 8, 16, 16)]


def choose_long_k_sizes(grid: MatmulGrid) -> list[int]:
    """Return two long sizes of K: the largest M, and the middle of the longer ones in the grid."""
    longer = [k for k in grid.k if k >= max(grid.m)] or [max(grid.k)]
    return list(dict.fromkeys((longer[0], longer[(len(longer) - 1) // 2])))


def draw_distant_shapes(
    leaders: Sequence[MatmulShape], step: int, grid: MatmulGrid, count: int, chooser: random.Random
) -> list[MatmulShape]:
    """Draw a shape for each pair of M and N that are multiples of ``step``, or for ``count`` random pairs. K is within
    25 % of a leader's, because how full the waves are depends only on M and N.
    """
    sizes = range(step, max(*grid.m, *grid.n) + 1, step)
    pairs: Iterable[Sequence[int]] = itertools.combinations_with_replacement(sizes, 2)
    if math.comb(len(sizes) + 1, 2) > count:
        pairs = [chooser.choices(sizes, k=2) for _ in range(count)]
    found = []
    for pair in pairs:
        m, n = chooser.sample(pair, 2)
        k = round(chooser.choice(leaders).k * chooser.uniform(0.75, 1.25)) // step * step
        found.append(MatmulShape(m, n, max(k, step)))
    return [shape for shape in found if fits_grid(grid, shape)]


def list_shapes_around(leaders: Iterable[MatmulShape], step: int, grid: MatmulGrid, reach: int) -> list[MatmulShape]:
    """Return shapes near the leaders that fit the grid: up to ``reach`` steps away in M and N and half as many in K,
    and each leader with every K of the grid.
    """
    found: dict[MatmulShape, None] = {}
    for leader in leaders:
        near = [
            [size + offset * step for offset in range(-far, far + 1) if size + offset * step >= 16]
            for size, far in ((leader.m, reach), (leader.n, reach), (leader.k, reach // 2))
        ]
        found |= dict.fromkeys(itertools.starmap(MatmulShape, itertools.product(*near)))
        found |= dict.fromkeys(MatmulShape(leader.m, leader.n, k) for k in grid.k)
    return [shape for shape in found if fits_grid(grid, shape)]
