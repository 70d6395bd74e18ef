"""Plan a search for a device's matmul ceilings (its highest rates in the burst and sustained regimes): the grid of
shapes, the time budget, the time of each phase, and the shapes to begin with.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mamf.backend import Backend, CheckResult, DeviceInfo
from mamf.engine.estimate import MIN_PROBE_SIZE, choose_working_kernels, measure_matmul_flops
from mamf.engine.search.rounds import RoundCounts
from mamf.errors import MamfError, UnsupportedError, UsageError, require_seconds
from mamf.logs.ceiling_cache import find_cached_ceiling
from mamf.machine.environment import SEARCH_TIME_CHECK
from mamf.measurement import make_dtype_label
from mamf.operations.matmul.shapes import MatmulGrid, MatmulKernel, MatmulProblem, MatmulShape, SearchOptions
from mamf.peaks import find_contributed_rates
from mamf.plans import (
    CEILING_REGIMES,
    CPU_BUDGET_FACTOR,
    CPU_QUICK_BUDGET_FACTOR,
    DEFAULT_BUDGET_SECONDS,
    FIND,
    MATMUL,
    QUICK_BUDGET_SECONDS,
    Plan,
)


def find_previously_fastest_shapes(info: DeviceInfo, problem: MatmulProblem) -> list[MatmulShape]:
    """Return the shapes that were fastest in an earlier search on this device, then the shapes that were fastest in the
    searches in results/ on devices of the same model.
    """
    shapes = list[MatmulShape]()
    for regime in CEILING_REGIMES:
        with suppress(MamfError, OSError):  # The log of the earlier search may be unreadable.
            if cached_ceiling := find_cached_ceiling(info, problem, regime):
                shapes.append(cached_ceiling.shape)
    for ceiling in find_contributed_rates(info.name, info.compute_units, make_dtype_label(problem)):
        shapes += map(MatmulShape.parse, ceiling.shapes)
    return list(dict.fromkeys(shapes))


_SIZES_PER_DIMENSION = 20
#: The sizes of K above the largest M, as multiples of the largest M. If all tiles of C fit in a single wave, a shape
#: with a long K may be the fastest.
_LONG_K_RATIOS = (1.2, 1.6, 2.0, 2.4, 3.2)
_MAX_GRID_STEP = 1024
_MAX_MEMORY_SHARE = 0.6
_SUSTAINED_OPERAND_SET_COUNT = 3
#: The number of shapes that a quick search measures on the coarse grid, and the number that it then measures near the
#: fastest of them.
_QUICK_GRID_SHAPE_COUNT, _QUICK_REFINEMENT_COUNT = 40, 48
#: Seconds that a quick search adds to its budget for each kernel that must be compiled.
_SECONDS_PER_COMPILED_KERNEL = 4.0
#: The maximum FLOP of a shape in a quick search on an accelerator, as a share of the maximum FLOP in a thorough search.
_QUICK_FLOP_SHARE = 0.25


def make_grid(
    backend: Backend, problem: MatmulProblem, flops: float, budget_seconds: float, shape_count: int
) -> MatmulGrid:
    """Return a coarse grid of shapes that fits the speed of a device (``flops``, in FLOP/s) and its free memory.

    Two rules limit the FLOP of a shape. A launch must take at most 1.2 times the longest time for which the burst
    regime loads the device without a rest. And the first phase of the search must have time for ``shape_count`` shapes.
    """
    max_flop = flops * min(
        1.2 * backend.burst_traits.train_seconds, THOROUGH_SCHEDULE.scout_end_share * budget_seconds / shape_count / 4
    )
    side = 2 * (max_flop / 2) ** (1 / 3)
    free = backend.read_free_memory_bytes()
    if free is not None:
        needed = problem.list_buffers(MatmulShape(1024, 1024, 1024)).values()
        itemsize = sum(buffer.nbytes for buffer in needed) / 3 / 1024**2
        side = min(side, (free * _MAX_MEMORY_SHARE / _SUSTAINED_OPERAND_SET_COUNT / 3 / itemsize) ** 0.5)
    step = min(_MAX_GRID_STEP, max(64, int(side / _SIZES_PER_DIMENSION) // 64 * 64))
    sizes = tuple(step * count for count in range(1, _SIZES_PER_DIMENSION + 1))
    longer = (step * round(_SIZES_PER_DIMENSION * times) for times in _LONG_K_RATIOS)
    return MatmulGrid(sizes, sizes, (*sizes, *longer), max_flop)


@dataclass(frozen=True)
class SearchSchedule:
    """The schedule of a search: when its phases end, as shares of the budget, and how much each phase measures. In a
    round, mamf measures each candidate (a shape and a kernel) once.

    These shares are the ends of the phases in the burst regime. A search that does not measure in the sustained regime
    scales them up, so that burst gets the whole budget:

    - ``scout_end_share``: the end of measuring shapes of the coarse grid.
    - ``refine_end_share``: the end of measuring shapes near the fastest ones.
    - ``choose_end_share``: the end of the rounds that choose the fastest candidate.
    - ``burst_end_share``: the end of the rounds that confirm the rate of this candidate.

    These shares are the ends of the phases in the sustained regime:

    - ``sustained_visits_end_share``: the end of the short measurements of the candidates.
    - ``sustained_choose_end_share``: the end of the rounds that choose among the best of the candidates.

    How much the phases measure:

    - ``burst_round_counts``, ``sustained_round_counts``: the numbers of rounds in each regime. If sustained has no
      rounds that choose, the search confirms the candidate that was fastest in the burst regime.
    - ``candidate_count``: the number of candidates in the rounds of burst.
    - ``algorithm_trial_shape_count``: the number of shapes on which each kernel's algorithms are measured before the
      rounds of burst.
    """

    scout_end_share: float
    refine_end_share: float
    choose_end_share: float
    burst_end_share: float
    burst_round_counts: RoundCounts
    candidate_count: int
    algorithm_trial_shape_count: int
    sustained_round_counts: RoundCounts
    sustained_visits_end_share: float = 1.0
    sustained_choose_end_share: float = 1.0


THOROUGH_SCHEDULE = SearchSchedule(
    scout_end_share=0.15,
    refine_end_share=0.30,
    choose_end_share=0.36,
    burst_end_share=0.40,
    burst_round_counts=RoundCounts(max_choosing_rounds=6, max_confirming_rounds=15),
    candidate_count=8,
    algorithm_trial_shape_count=3,
    sustained_round_counts=RoundCounts(max_choosing_rounds=1, max_confirming_rounds=6),
    sustained_visits_end_share=0.44,
    sustained_choose_end_share=0.51,
)
QUICK_SCHEDULE = SearchSchedule(
    scout_end_share=0.15,
    refine_end_share=0.20,
    choose_end_share=0.235,
    burst_end_share=0.275,
    burst_round_counts=RoundCounts(max_choosing_rounds=3, max_confirming_rounds=12),
    candidate_count=5,
    algorithm_trial_shape_count=1,
    # In the sustained regime, the rates of the candidates that were fastest in the burst regime differ by less
    # than 0.2 %. So do not choose among them. Spend the time on longer measurements of one candidate, to confirm
    # its rate.
    sustained_round_counts=RoundCounts(max_choosing_rounds=0, max_confirming_rounds=6),
)


def choose_schedule(options: SearchOptions) -> SearchSchedule:
    return QUICK_SCHEDULE if options.is_quick else THOROUGH_SCHEDULE


def plan_search(
    backend: Backend,
    problem: MatmulProblem,
    kernel_names: Sequence[str] | None = None,
    *,
    regimes: tuple[str, ...] = CEILING_REGIMES,
    budget_seconds: float | None = None,
    precision: float = 0.003,
    scouts: int | None = None,
    is_quick: bool = False,
) -> tuple[Plan, list[MatmulKernel]]:
    """Plan a search for the ceilings of a matmul problem, and return the plan and its kernels.

    mamf measures the device's speed with a few launches, and makes a grid that fits this speed and the free memory. The
    search begins with shapes that were the fastest in earlier searches on devices of this model. If the first kernel
    does not support the problem, the grid has a single shape, and its row in the log says why.

    - ``kernel_names``: by default, the kernels that ``choose_search_kernels`` chooses.
    - ``budget_seconds``: by default 57. In a quick search, by default 13.2, plus 4 for each kernel that must be
      compiled. On a CPU, the default is longer.
    - ``scouts``: the number of shapes to measure on the coarse grid.

    Raises what ``choose_working_kernels`` raises, and UsageError if the budget is too short.
    """
    kernels = choose_working_kernels(backend, problem, kernel_names, is_quick)
    if budget_seconds is None:
        budget_seconds = (
            QUICK_BUDGET_SECONDS
            + _SECONDS_PER_COMPILED_KERNEL * sum(not kernel.has_cheap_variants for kernel in kernels[1:])
            if is_quick
            else DEFAULT_BUDGET_SECONDS
        )
        if not backend.is_accelerator:
            budget_seconds *= CPU_QUICK_BUDGET_FACTOR if is_quick else CPU_BUDGET_FACTOR
    scouts = scouts or (_QUICK_GRID_SHAPE_COUNT if is_quick else SearchOptions.scouts)
    require_seconds("budget_seconds", budget_seconds)
    refinements = _QUICK_REFINEMENT_COUNT if is_quick else SearchOptions.refinements
    try:
        flops = measure_matmul_flops(kernels[0], problem, backend)
        grid = make_grid(backend, problem, flops, budget_seconds, scouts)
        if is_quick and backend.is_accelerator:  # A CPU reaches its ceiling only with larger shapes.
            grid = replace(grid, most_flop=_QUICK_FLOP_SHARE * grid.most_flop)
    except UnsupportedError:  # The row of this single shape will say why the kernel does not support the problem.
        grid, scouts, refinements = MatmulGrid(*((MIN_PROBE_SIZE,),) * 3), 1, 0
    if not grid.accepts(MatmulShape(grid.m[0], grid.n[0], grid.k[0])):
        raise UsageError(
            f"a budget of {budget_seconds:g} s is too short, because a {problem.dtype} matmul reaches only "
            f"{flops / 1e9:.3g} GFLOPS on this device: raise the budget"
        )
    first_shapes = tuple(
        shape for shape in find_previously_fastest_shapes(backend.info, problem) if fits_grid(grid, shape)
    )
    plan = Plan(
        FIND,
        MATMUL,
        (problem,),
        tuple(dict.fromkeys(kernel_names or (kernel.name for kernel in kernels))),
        regimes=regimes,
        precision=precision,
        budget_seconds=budget_seconds,
        options=SearchOptions(grid, scouts, refinements, first_shapes, is_quick),
    )
    return plan, kernels


def check_search_time(backend: Backend, plan: Plan, spent_seconds: float = 0.0) -> list[CheckResult]:
    """Return a warning if a search for matmul ceilings has less time than ``mamf find --quick``, or than 45 % of this
    time if it measures only one regime. A short search compares few shapes, and on a CPU only small ones.

    ``spent_seconds``: how long a resumed search has measured before, in addition to the plan's budget.
    """
    seconds = (
        QUICK_BUDGET_SECONDS
        * (1.0 if backend.is_accelerator else CPU_QUICK_BUDGET_FACTOR)
        * (1.0 if len(plan.regimes) > 1 else 0.45)
    )
    if not plan.is_search or plan.budget_seconds is None or spent_seconds + plan.budget_seconds >= seconds:
        return []
    return [
        CheckResult(
            SEARCH_TIME_CHECK,
            "warning",
            f"the search has only {spent_seconds + plan.budget_seconds:.3g} s, so its ceilings may be too low",
            command=f"give this search {seconds:.0f} s or more",
        )
    ]


def fits_grid(grid: MatmulGrid, shape: MatmulShape) -> bool:
    """Return whether a shape is within the bounds of a grid. The sizes of the shape need not be among the sizes of the
    grid, but none may exceed the largest size of the grid. No operand may have more elements than the square of the
    largest M or N, because the grid was chosen so that operands of that size fit in memory.
    """
    is_within = shape.m <= max(grid.m) and shape.n <= max(grid.n) and shape.k <= max(grid.k)
    return is_within and grid.accepts(shape) and shape.k * max(shape.m, shape.n) <= max(*grid.m, *grid.n) ** 2


def choose_long_k_sizes(grid: MatmulGrid) -> list[int]:
    """Return two of the grid's sizes of K that are at least as long as its largest M: the shortest and the middle one.
    If all sizes of K are shorter than the largest M, return only the longest K.
    """
    longer = [k for k in grid.k if k >= max(grid.m)] or [max(grid.k)]
    return list(dict.fromkeys((longer[0], longer[(len(longer) - 1) // 2])))


def draw_distant_shapes(
    leaders: Sequence[MatmulShape], step: int, grid: MatmulGrid, count: int, chooser: random.Random
) -> list[MatmulShape]:
    """Draw shapes from the whole grid, whose M and N are multiples of ``step``: one shape for each pair of sizes or, if
    there are more than ``count`` pairs, one for each of ``count`` random pairs.

    K is within 25 % of the K of a random leader (one of the fastest shapes so far). So the shapes differ from the
    leaders mainly in M and N, which determine the number of waves of tiles.
    """
    sizes = range(step, max(*grid.m, *grid.n) + 1, step)
    size_pairs: Iterable[Sequence[int]] = itertools.combinations_with_replacement(sizes, 2)
    if math.comb(len(sizes) + 1, 2) > count:
        size_pairs = [chooser.choices(sizes, k=2) for _ in range(count)]
    shapes = []
    for pair in size_pairs:
        m, n = chooser.sample(pair, 2)
        k = round(chooser.choice(leaders).k * chooser.uniform(0.75, 1.25)) // step * step
        shapes.append(MatmulShape(m, n, max(k, step)))
    return [shape for shape in shapes if fits_grid(grid, shape)]


def list_shapes_around(leaders: Iterable[MatmulShape], step: int, grid: MatmulGrid, reach: int) -> list[MatmulShape]:
    """Return the shapes within the grid's bounds that are near the leaders (the fastest shapes so far). M and N differ
    from those of a leader by at most ``reach`` steps of ``step`` elements, and K by at most half as many steps. Also
    return each leader with every K of the grid.
    """
    shapes: dict[MatmulShape, None] = {}
    for leader in leaders:
        nearby_sizes = [
            [size + offset * step for offset in range(-far, far + 1) if size + offset * step >= 16]
            for size, far in ((leader.m, reach), (leader.n, reach), (leader.k, reach // 2))
        ]
        shapes |= dict.fromkeys(itertools.starmap(MatmulShape, itertools.product(*nearby_sizes)))
        shapes |= dict.fromkeys(MatmulShape(leader.m, leader.n, k) for k in grid.k)
    return [shape for shape in shapes if fits_grid(grid, shape)]
