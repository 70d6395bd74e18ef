"""Define the plan of a run: what it measures, how, and for how long. Also define the names of the kinds of runs and of
the regimes, which are ways of loading the device while mamf measures (``burst``, ``sustained``, ``classic``).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

from mamf.errors import (
    MAX_SEED,
    UsageError,
    require_known_names,
    require_nonempty_list,
    require_rows_within_limit,
    require_seconds,
    require_share,
    require_whole_number,
)
from mamf.statistics import FigureUncertainty, Interval

BURST, SUSTAINED, CLASSIC = "burst", "sustained", "classic"
#: Seconds of warm-up in the regime classic, as in mamf-finder, the predecessor of mamf.
CLASSIC_WARMUP_SECONDS = 30.0
#: Regimes that check results instead of measuring rates. In SPACED, the device rests before each launch. In LOADED,
#: launches follow one another without pauses, so that the device runs at its power limit.
SPACED, LOADED = CHECKING_REGIMES = ("spaced", "loaded")
REGIME_NAMES = (BURST, SUSTAINED, CLASSIC, *CHECKING_REGIMES)
#: For each regime, the statistic of a row's samples that mamf uses to rank the row.
RANKING_STATISTIC_BY_REGIME = {
    BURST: "median",
    SUSTAINED: "mean",
    CLASSIC: "fastest",
    SPACED: "median",
    LOADED: "median",
}
#: The regimes of ceilings: burst gives the MAMF (maximum achievable matmul FLOPS), sustained the MSMF (maximum
#: sustained matmul FLOPS).
CEILING_REGIMES = (BURST, SUSTAINED)


def choose_regimes(
    requested: Collection[str] | None, default: Sequence[str], order: Sequence[str] = ()
) -> tuple[str, ...]:
    """Choose the regimes of a run: the requested ones, or else ``default``. Return them in the order of ``order`` or,
    if ``order`` is empty, of ``default``.
    """
    return tuple(name for name in order or default if name in (requested or default))


#: Kinds of runs. SWEEP measures given shapes, FIND searches for ceilings and confirms them, EXPLAIN measures one matmul
#: on several kinds of data, and GUARD compares rows with an earlier log. REPRODUCE measures claimed rates again,
#: OVERLAP measures matmul at the same time as other work, and VERIFY checks the results of random problems. ROOFLINE
#: occurs only in old logs, which contain both compute and bandwidth ceilings.
SWEEP, FIND, ROOFLINE, EXPLAIN, GUARD = "sweep", "find", "roofline", "explain", "guard"
REPRODUCE, OVERLAP, VERIFY = "reproduce", "overlap", "verify"
#: The value of ``phase`` in rows that were measured only to choose the fastest algorithm of a kernel.
ALGORITHM_PHASE = "algorithm"
#: The name of the operation that measures compute ceilings.
MATMUL = "matmul"
#: The rows for which mamf measures the true clock of the compute units: the best rows, all rows, or no rows.
BEST_CLOCK, ALL_CLOCKS, NO_CLOCK = CLOCK_CHOICES = ("best", "all", "none")
#: The orders in which a sweep can measure its shapes.
SHUFFLED_ORDER, GIVEN_ORDER = ORDER_CHOICES = ("shuffled", "given")
#: The default of --budget, in seconds, for ``mamf reproduce`` and for a search for the ceilings (highest rates) of one
#: dtype.
DEFAULT_BUDGET_SECONDS = 57.0
#: How many seconds a search for the ceilings of one dtype takes with --quick.
QUICK_BUDGET_SECONDS = 13.2
#: On a CPU, a search for ceilings takes this many times as long by default, because launches take longer there, and one
#: sustained measurement takes 6 to 15 s. The second factor is for --quick.
CPU_BUDGET_FACTOR, CPU_QUICK_BUDGET_FACTOR = 2.0, 5.0
#: How many seconds ``mamf node`` measures each device separately. The search for the ceiling gets half of this time,
#: which is more than QUICK_BUDGET_SECONDS, because searches are slower while all devices share the host.
NODE_BUDGET_SECONDS = 48.0
#: The default of --budget, in seconds, for ``mamf verify``. Including the time to open the device, the command takes a
#: minute.
VERIFY_BUDGET_SECONDS = 57.0
#: Regimes that every operation supports. Classic is for matmul only.
COMMON_REGIMES = (BURST, SUSTAINED)
#: The largest allowed value of ``GuardOptions.rounds``, which limits how often an undecided row is measured again.
MAX_GUARD_ROUNDS = 100

#: The types of shapes and problems in the fields of a plan. The plan's operation converts shapes and problems to log
#: records and back.
Shape: TypeAlias = Annotated[Any, "a shape of the operation"]
Problem: TypeAlias = Annotated[Any, "a problem of the operation"]


class RowKey(NamedTuple):
    """The key of a row: the regime, problem, shape and kernel that the row measures. ``kernel``: the kernel's name as
    the user requested it.
    """

    regime: str
    problem: Problem
    shape: Shape
    kernel: str


@dataclass(frozen=True)
class SweepOptions:
    """The options of a sweep.

    - ``reference``: a shape that the run measures again after every ``reference_every`` rows, to show the drift of the
      device. If several devices share the run, each of them measures this shape, to compare the devices.
    - ``warmup_launches``, ``timed_launches``: the numbers of launches before and in the timed loop of the regime
      classic.
    - ``ranks``: the number of processes that divide the shapes among themselves; 0 if one process measures all shapes.
      Process ``rank`` measures the shapes rank, rank + ranks, rank + 2 * ranks and so on, and writes its own log.
    """

    order: str = GIVEN_ORDER
    reference: Shape | None = None
    reference_every: int = 100
    warmup_launches: int = 50
    timed_launches: int = 100
    rank: int = 0
    ranks: int = 0

    def __post_init__(self) -> None:
        require_known_names(("order", self.order, ORDER_CHOICES))
        require_whole_number("reference_every", self.reference_every)
        require_whole_number("warmup_launches", self.warmup_launches, 0)
        require_whole_number("timed_launches", self.timed_launches)
        require_whole_number("ranks", self.ranks, 0)
        require_whole_number("rank", self.rank, 0, max(0, self.ranks - 1))


@dataclass(frozen=True)
class GuardOptions:
    """The options of ``mamf guard``, which compares rows with an earlier log, the baseline.

    ``rounds``: the maximum number of times that a row with an undecided verdict is measured again.
    """

    rounds: int

    def __post_init__(self) -> None:
        require_whole_number("rounds", self.rounds, 1, MAX_GUARD_ROUNDS)


@dataclass(frozen=True)
class Claim:
    """A rate that another log or a text states, and the key (regime, problem, shape and kernel) of the row that
    measures it again.

    - ``step``: the key of the row to measure. It contains the full name of the kernel, such as ``cublaslt[3]``.
    - ``rate``, ``interval``: the claimed rate and its interval, in 1e12 FLOP or bytes per second. If a rate is copied
      from a text, the interval is the range of numbers that round to this rate.
    - ``error``: how much the rate differs between runs; None if unknown.
    - ``clock_hz``: the clock that was read during the measurement.
    - ``cycles_used``: if the rate was measured on another card, the share of the compute units' cycles that the kernel
      used there (see mamf.plausibility). mamf then compares this share instead of the rate. None in all other cases.

    Raises UsageError for an unknown regime or an invalid interval.
    """

    step: RowKey
    rate: float
    interval: Interval
    error: FigureUncertainty | None = None
    clock_hz: float | None = None
    cycles_used: float | None = None

    def __post_init__(self) -> None:
        require_known_names(("regime", self.step[0], REGIME_NAMES))
        if not (self.rate > 0 and 0 < self.interval.low <= self.interval.high):
            raise UsageError(
                f"the claim of rate {self.rate:g} with the interval {self.interval.low:g} to {self.interval.high:g} is "
                "invalid: all three numbers must be above 0, and the interval must begin with its lower end"
            )
        # Reject more degrees of freedom, because only a forged log contains more, and computing with more is slow.
        require_whole_number("degrees", self.error.degrees if self.error else 1, 1, 1000)


@dataclass(frozen=True)
class ReproduceOptions:
    """The options of ``mamf reproduce``, which measures claimed rates again.

    - ``source``: the log or table that states the claims.
    - ``recorded``: the device and the software that the source states, as pairs of name and value.
    - ``chosen_from``: the claims are the fastest of this many rates of the source; 1 for ceilings and for rates in a
      text.
    - ``tolerance``: the relative difference up to which two rates count as equal.
    """

    claims: tuple[Claim, ...]
    source: str
    recorded: tuple[tuple[str, str], ...] = ()
    chosen_from: int = 1
    tolerance: float = 0.02


@dataclass(frozen=True)
class VerifyOptions:
    """The options of ``mamf verify``, which verifies results on random problems.

    - ``number``: verify only the problem with this number, counted from 1; 0 means to verify all problems in order.
    - ``operations``: the operations of the kernels.

    mamf does not run the shape and the problems of the plan. It only takes from them the maximum FLOP of a random
    problem (the FLOP of the shape), the dtypes and the seed.
    """

    number: int = 0
    operations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_whole_number("number", self.number, 0)


@dataclass(frozen=True)
class Plan:
    """All parameters of a run, stored in its log so that the run can be resumed. Raises UsageError for invalid values.

    - ``kernels``: the names by which the user requested kernels; ``package.module:Class`` for an unregistered kernel.
    - ``precision``: mamf measures a row until half the width of its 95 % interval is at most this share of its time.
    - ``seconds``: the time limit per row (None: the regime's default). ``budget_seconds``: the time limit of the run.
    - ``flush``: whether to evict the operands from the cache between launches in the regime burst.
    - ``clock``: for which rows mamf measures the true clock of the compute units, one of CLOCK_CHOICES.
    - ``layers``: for the shapes of a preset, a label of each shape, such as the name of a layer.
    - ``searches``: the searches for ceilings that run first, as plans of the kind FIND.
    - ``options``: the options that only this kind of run has: SweepOptions, SearchOptions, GuardOptions,
      ReproduceOptions or VerifyOptions.
    """

    kind: str
    operation: str
    problems: tuple[Problem, ...]
    kernels: tuple[str, ...]
    shapes: tuple[Shape, ...] = ()
    regimes: tuple[str, ...] = (BURST,)
    precision: float = 0.003
    seconds: float | None = None
    budget_seconds: float | None = None
    flush: bool = True
    clock: str = BEST_CLOCK
    layers: tuple[str, ...] = ()
    searches: tuple[Plan, ...] = ()
    options: Any = None

    def __post_init__(self) -> None:
        if self.options is None and self.kind == SWEEP:
            object.__setattr__(self, "options", SweepOptions())
        require_nonempty_list("problems", self.problems, object)
        require_nonempty_list("kernels", self.kernels, str)
        require_nonempty_list("regimes", self.regimes, str)
        require_share("precision", self.precision)
        require_known_names(("clock", self.clock, CLOCK_CHOICES))
        for label, seconds in (("budget_seconds", self.budget_seconds), ("seconds", self.seconds)):
            if seconds is not None:
                require_seconds(label, seconds)
        if self.is_search:
            require_known_names(*(("regime for a ceiling", name, CEILING_REGIMES) for name in self.regimes))
        else:
            require_nonempty_list("shapes", self.shapes, object)
        if self.layers and len(self.layers) != len(self.shapes):
            raise UsageError(
                f"the plan has {len(self.layers)} layers for {len(self.shapes)} shapes: give one layer per shape, or "
                "none"
            )
        require_rows_within_limit(*map(len, (self.shapes, self.problems, self.kernels, self.regimes)))
        for problem in self.problems:
            require_whole_number("seed", problem.seed, 0, MAX_SEED)
        require_known_names(*(("regime", name, REGIME_NAMES) for name in self.regimes))
        if CLASSIC in self.regimes and (self.budget_seconds or CLASSIC_WARMUP_SECONDS + 1) <= CLASSIC_WARMUP_SECONDS:
            raise UsageError(f"the regime classic warms up for {CLASSIC_WARMUP_SECONDS:.0f} s: give a longer --budget")

    @property
    def problem(self) -> Any:
        """The first problem of the plan. It is the only problem if the run measures matmul."""
        return self.problems[0]

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations whose rows the run reports. If the run measures matmul only to find the ceiling,
        matmul is not among them.
        """
        return getattr(self.options, "operations", ()) or (self.operation,)

    @property
    def is_search(self) -> bool:
        """Whether the run searches a grid of shapes for a ceiling, instead of measuring given shapes."""
        return self.kind == FIND and self.options is not None

    @property
    def confirms_best_rows(self) -> bool:
        """Whether the run measures the best row of each problem again in all regimes, to confirm it."""
        return self.kind in (FIND, ROOFLINE) and not self.is_search

    @property
    def is_shared(self) -> bool:
        """Whether other processes measure other shapes of this run."""
        return self.kind == SWEEP and self.options.ranks > 0

    def make_plan_for_rank(self, rank: int, ranks: int) -> Plan:
        """Return the plan for one of several processes that divide a sweep. Return any other plan unchanged.

        The process measures every ``ranks``-th shape, beginning with shape number ``rank``, and a reference shape. All
        processes measure the same reference shape, so that reports can compare their rows. By default, the reference
        is the shape with the median work.
        """
        if self.kind != SWEEP:
            return self
        shapes_by_work = sorted(self.shapes, key=lambda shape: float(self.problem.compute_work(shape).amount))
        reference = self.options.reference or shapes_by_work[len(shapes_by_work) // 2]
        return replace(self, options=replace(self.options, reference=reference, rank=rank, ranks=ranks))

    def list_row_keys(self, excluded: Collection[RowKey] = ()) -> list[RowKey]:
        """List the keys (regime, problem, shape and kernel) of the plan's rows that are not in ``excluded``. Keys that
        differ only in the kernel follow one another.

        If the run later confirms the best rows, list only the keys in the first regime. A run of ``mamf explain``
        measures the regime sustained on its first problem only.
        """
        excluded_keys = frozenset(excluded)
        planned_keys = (
            RowKey(regime, problem, shape, kernel)
            for regime in (self.regimes[:1] if self.confirms_best_rows else self.regimes)
            for problem in (self.problems[:1] if self.kind == EXPLAIN and regime == SUSTAINED else self.problems)
            for shape in self.list_assigned_shapes()
            for kernel in self.kernels
        )
        return [key for key in planned_keys if key not in excluded_keys]

    def list_assigned_shapes(self) -> list[Any]:
        """List the shapes in the order in which this process measures them. In a shared run, leave out the shapes of
        other processes.
        """
        shapes = list(self.shapes)
        if self.kind == SWEEP and self.options.order == SHUFFLED_ORDER:
            random.Random(self.problem.seed).shuffle(shapes)
        return shapes[self.options.rank :: self.options.ranks] if self.is_shared else shapes
