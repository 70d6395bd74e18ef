"""The plan of a run, as data: its kind, its steps and its budget."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple, TypeAlias

from mamf.errors import UsageError
from mamf.limits import (
    LARGEST_SEED,
    require_known,
    require_seconds,
    require_share,
    require_some,
    require_steps,
    whole_number,
)
from mamf.regime_names import BURST, CEILINGS, CLASSIC, CLASSIC_WARMUP_SECONDS, NAMES, SUSTAINED, require_regime
from mamf.statistics import FigureError, Interval

#: Kinds of runs: rows for given shapes; confirmed ceilings; compute and bandwidth ceilings in one log; one product on
#: several kinds of data; rows compared with a baseline; figures from elsewhere measured again; products beside others;
#: random problems whose results are verified.
SWEEP, FIND, ROOFLINE, EXPLAIN, GUARD = "sweep", "find", "roofline", "explain", "guard"
REPRODUCE, OVERLAP, VERIFY = "reproduce", "overlap", "verify"
#: The phase of rows that rank the algorithms of a kernel.
ALGORITHM = "algorithm"
#: The operation that measures compute ceilings.
MATMUL = "matmul"
#: Rows whose true clock is measured: the best ones, all, or none.
BEST_CLOCK, ALL_CLOCKS, NO_CLOCK = CLOCKS = ("best", "all", "none")
SHUFFLED, GIVEN = ORDERS = ("shuffled", "given")
DEFAULT_BUDGET_SECONDS = 57.0
QUICK_BUDGET_SECONDS = 13.2
#: For what each device of a node measures alone. Half of it is for the search, which needs a little more time than one
#: device does, since all devices share the host.
NODE_BUDGET_SECONDS = 48.0
#: A minute, with what it takes to open the device.
VERIFY_BUDGET_SECONDS = 57.0
#: Regimes that every operation supports; classic is for products only.
KERNEL_REGIMES = (BURST, SUSTAINED)
#: The most repeated visits to a row of a guard.
MAX_ROUNDS = 100

#: Types of fields whose values belong to the operation of a plan, which writes and reads them in a log.
Shape: TypeAlias = Annotated[Any, "a shape of the operation"]
Problem: TypeAlias = Annotated[Any, "a problem of the operation"]


class StepKey(NamedTuple):
    """What a row answers. ``kernel``: its name as requested."""

    regime: str
    problem: Problem
    shape: Shape
    kernel: str


@dataclass(frozen=True)
class SweepOptions:
    """``reference``: a shape that is measured again after every ``reference_every`` rows to show the device's drift,
    and on each device of a shared run. ``warmup_launches`` and ``timed_launches``: for the classic regime. ``ranks``:
    how many processes share the run, each with its own log and every ``ranks``-th shape from ``rank`` on; 0: alone.
    """

    order: str = GIVEN
    reference: Shape | None = None
    reference_every: int = 100
    warmup_launches: int = 50
    timed_launches: int = 100
    rank: int = 0
    ranks: int = 0

    def __post_init__(self) -> None:
        require_known(("order", self.order, ORDERS))
        whole_number("reference_every", self.reference_every)
        whole_number("warmup_launches", self.warmup_launches, 0)
        whole_number("timed_launches", self.timed_launches)
        whole_number("ranks", self.ranks, 0)
        whole_number("rank", self.rank, 0, max(0, self.ranks - 1))


@dataclass(frozen=True)
class GuardOptions:
    """``rounds``: the most repeated visits to a row in doubt."""

    rounds: int

    def __post_init__(self) -> None:
        whole_number("rounds", self.rounds, 1, MAX_ROUNDS)


@dataclass(frozen=True)
class Claim:
    """A figure from elsewhere, with the step that measures it again, by the kernel's own name.

    ``rate`` and ``interval``: in 1e12 FLOP or bytes per second; the interval of a printed figure is its rounding.
    ``error``: of the figure between runs; None: unknown. ``clock_hz``: read during the measurement.
    """

    step: StepKey
    rate: float
    interval: Interval
    error: FigureError | None = None
    clock_hz: float | None = None

    def __post_init__(self) -> None:
        require_known(("regime", self.step[0], NAMES))
        if not (self.rate > 0 and 0 < self.interval.low <= self.interval.high):
            raise UsageError(f"a claim of {self.rate:g} in {self.interval.low:g} to {self.interval.high:g}")
        # More degrees of freedom, which only a crafted log has, would take long to compute.
        whole_number("degrees", self.error.degrees if self.error else 1, 1, 1000)


@dataclass(frozen=True)
class ReproduceOptions:
    """``source``: the log or table that the claims are from. ``recorded``: what it says of its device and software.
    ``chosen_from``: of how many rows the claims are the best.
    """

    claims: tuple[Claim, ...]
    source: str
    recorded: tuple[tuple[str, str], ...] = ()
    chosen_from: int = 1
    tolerance: float = 0.02


@dataclass(frozen=True)
class VerifyOptions:
    """``number``: the only random problem to verify, from 1; 0 for one after the other. The plan's shape bounds their
    FLOP, and its problems name the dtypes and the seed. ``operations``: of the kernels.
    """

    number: int = 0
    operations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole_number("number", self.number, 0)


@dataclass(frozen=True)
class Plan:
    """All parameters of a run, which are also what resuming it needs.

    - ``kernels``: names as requested, ``package.module:Class`` for a kernel that is not installed.
    - ``seconds``: the time limit per row (None: the regime's default). ``budget_seconds``: the time limit of the run.
    - ``flush``: whether to evict the operands between launches of a burst.
    - ``clock``: of which rows the true clock is measured, one of CLOCKS.
    - ``layers``: the label of each shape of a preset.
    - ``searches``: the searches for ceilings of products that come first: finds without shapes, with SearchOptions.
    - ``options``: what only this kind has: SweepOptions, SearchOptions, GuardOptions, ReproduceOptions or
      VerifyOptions.
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
        require_some("problems", self.problems, object)
        require_some("kernels", self.kernels, str)
        require_some("regimes", self.regimes, str)
        require_share("precision", self.precision)
        require_known(("clock", self.clock, CLOCKS))
        if self.budget_seconds is not None:
            require_seconds("budget_seconds", self.budget_seconds)
        if self.is_search:
            require_known(*(("regime for a ceiling", name, CEILINGS) for name in self.regimes))
        else:
            require_some("shapes", self.shapes, object)
        if self.seconds is not None:
            require_seconds("seconds", self.seconds)
        if self.layers and len(self.layers) != len(self.shapes):
            raise UsageError(f"{len(self.layers)} layers for {len(self.shapes)} shapes: name all shapes, or none")
        require_steps(*map(len, (self.shapes, self.problems, self.kernels, self.regimes)))
        for problem in self.problems:
            whole_number("seed", problem.seed, 0, LARGEST_SEED)
        for name in self.regimes:
            require_regime(name)
        if CLASSIC in self.regimes and (self.budget_seconds or CLASSIC_WARMUP_SECONDS + 1) <= CLASSIC_WARMUP_SECONDS:
            raise UsageError(f"classic warms up for {CLASSIC_WARMUP_SECONDS:.0f} s: give a longer --budget")

    @property
    def problem(self) -> Any:
        """The first problem; a run of products has only one."""
        return self.problems[0]

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations of the rows; the products that rows are shares of are of none of them."""
        return getattr(self.options, "operations", ()) or (self.operation,)

    @property
    def is_search(self) -> bool:
        """Whether the run searches a grid of shapes instead of measuring given shapes."""
        return self.kind == FIND and self.options is not None

    @property
    def confirms(self) -> bool:
        """Whether the best row of each problem is confirmed in all regimes."""
        return self.kind in (FIND, ROOFLINE) and not self.is_search

    @property
    def is_shared(self) -> bool:
        """Whether other processes measure other shapes of the same run."""
        return self.kind == SWEEP and self.options.ranks > 0

    def dealt(self, rank: int, ranks: int) -> Plan:
        """The share of one of several processes: whole shapes in turn, and a reference that makes rows comparable: the
        given one, else the shape with the median work. Only a sweep is shared; others are repeated on each device.
        """
        if self.kind != SWEEP:
            return self
        by_work = sorted(self.shapes, key=lambda shape: float(self.problem.work(shape).amount))
        reference = self.options.reference or by_work[len(by_work) // 2]
        return replace(self, options=replace(self.options, reference=reference, rank=rank, ranks=ranks))

    def steps(self, held: Collection[StepKey] = ()) -> list[StepKey]:
        """The steps left to measure, without those in ``held``; kernels of one shape follow one another.

        Rows that are confirmed later are measured in the first regime only, and an explanation measures sustained on
        its first problem only.
        """
        done = frozenset(held)
        everything = (
            StepKey(regime, problem, shape, kernel)
            for regime in (self.regimes[:1] if self.confirms else self.regimes)
            for problem in (self.problems[:1] if self.kind == EXPLAIN and regime == SUSTAINED else self.problems)
            for shape in self.own_shapes()
            for kernel in self.kernels
        )
        return [step for step in everything if step not in done]

    def own_shapes(self) -> list[Any]:
        """The shapes in the order of their measurement; of a shared run those of this share."""
        shapes = list(self.shapes)
        if self.kind == SWEEP and self.options.order == SHUFFLED:
            random.Random(self.problem.seed).shuffle(shapes)
        return shapes[self.options.rank :: self.options.ranks] if self.is_shared else shapes
