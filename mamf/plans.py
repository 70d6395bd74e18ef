"""What a run sets out to do, as data: what kind of run it is, which steps it takes, within which budget."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

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
from mamf.regime_names import BURST, CEILINGS, CLASSIC, CLASSIC_WARMUP_SECONDS, SUSTAINED, require_regime

#: Kinds of runs: rows of given shapes; confirmed ceilings; ceilings of compute and bandwidth in one log; one product on
#: every kind of data; rows held against a baseline.
SWEEP, FIND, ROOFLINE, EXPLAIN, GUARD = "sweep", "find", "roofline", "explain", "guard"
#: The operation that ceilings of compute are measured with.
MATMUL = "matmul"
SHUFFLED, GIVEN = ORDERS = ("shuffled", "given")
DEFAULT_BUDGET_SECONDS = 57.0
QUICK_BUDGET_SECONDS = 20.0
#: For all devices of a node at once, which share the host: a little more than one device needs.
NODE_BUDGET_SECONDS = QUICK_BUDGET_SECONDS + 4.0
#: Regimes that every operation can be measured in; classic is for products alone.
KERNEL_REGIMES = (BURST, SUSTAINED)
#: Fresh visits of a row of a guard.
MOST_ROUNDS = 100

#: Regime, problem, shape and kernel, which is named as it was asked for.
StepKey = tuple[str, Any, Any, str]


@dataclass(frozen=True)
class SweepOptions:
    """``reference``: a shape that is measured again after every ``reference_every`` shapes, to show how far the device
    drifted. ``warmup_launches`` and ``timed_launches``: of the classic regime.
    """

    order: str = GIVEN
    reference: Any = None
    reference_every: int = 100
    warmup_launches: int = 50
    timed_launches: int = 100

    def __post_init__(self) -> None:
        require_known(("order", self.order, ORDERS))
        whole_number("reference_every", self.reference_every)
        whole_number("warmup_launches", self.warmup_launches, 0)
        whole_number("timed_launches", self.timed_launches)


@dataclass(frozen=True)
class GuardOptions:
    """``rounds``: how often at most a row in doubt is visited afresh."""

    rounds: int

    def __post_init__(self) -> None:
        whole_number("rounds", self.rounds, 1, MOST_ROUNDS)


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs to know, and all that resuming it needs.

    ``kernels``: named as they were asked for, ``package.module:Class`` if one is not installed. ``seconds`` limits the
    time of a row (None: the regime's default), ``budget_seconds`` that of the run. ``flush``: evict the operands
    between launches of a burst. ``layers``: the name of each shape of a preset. ``searches``: SearchPlans for ceilings
    of products; a find of products has one and no shapes. ``options``: those of the kind, SweepOptions or GuardOptions.
    """

    kind: str
    operation: str
    problems: tuple[Any, ...]
    kernels: tuple[str, ...]
    shapes: tuple[Any, ...] = ()
    regimes: tuple[str, ...] = (BURST,)
    precision: float = 0.003
    seconds: float | None = None
    budget_seconds: float | None = None
    flush: bool = True
    layers: tuple[str, ...] = ()
    searches: tuple[Any, ...] = ()
    options: Any = None

    def __post_init__(self) -> None:
        if self.options is None and self.kind == SWEEP:
            object.__setattr__(self, "options", SweepOptions())
        require_some("problems", self.problems, object)
        require_some("kernels", self.kernels, str)
        require_regimes(self)
        if not self.is_search:
            require_some("shapes", self.shapes, object)
        if self.seconds is not None:
            require_seconds("seconds", self.seconds)
        if self.layers and len(self.layers) != len(self.shapes):
            raise UsageError(f"{len(self.layers)} layers for {len(self.shapes)} shapes: name all shapes, or none")
        require_steps(*map(len, (self.shapes, self.problems, self.kernels, self.regimes)))
        for problem in self.problems:
            whole_number("seed", problem.seed, 0, LARGEST_SEED)
        self._require_known_regimes()

    def _require_known_regimes(self) -> None:
        for name in self.regimes:
            require_regime(name)
            if name == CLASSIC and self.operation != MATMUL:
                known = " or ".join(KERNEL_REGIMES)
                raise UsageError(f"{self.operation} is measured in {known}, not in {name}: no ceiling is measured so")
        if CLASSIC in self.regimes and (self.budget_seconds or CLASSIC_WARMUP_SECONDS + 1) <= CLASSIC_WARMUP_SECONDS:
            raise UsageError(f"classic warms up for {CLASSIC_WARMUP_SECONDS:.0f} s: give a longer --budget")

    @property
    def problem(self) -> Any:
        """The first problem; a run of products has no other."""
        return self.problems[0]

    @property
    def is_search(self) -> bool:
        """Whether shapes are sought on a grid, not given."""
        return self.kind == FIND and bool(self.searches)

    @property
    def confirms(self) -> bool:
        """Whether the best of each problem's rows is confirmed in all regimes."""
        return self.kind in (FIND, ROOFLINE) and not self.is_search

    def common(self, dtype: str) -> tuple[Any, Any]:
        """The problem and shape that devices which share the plan are compared on: the shape with the median work."""
        problem = next(problem for problem in self.problems if problem.dtype == dtype)
        by_work = sorted(self.shapes, key=lambda shape: float(problem.work(shape).amount))
        return problem, by_work[len(by_work) // 2]

    def steps(self, held: Collection[StepKey] = ()) -> list[StepKey]:
        """What is left to measure, leaving out what ``held`` has; kernels of one shape follow one another.

        Rows that are confirmed later are measured in the first regime alone, and an explanation measures sustained on
        its first problem alone.
        """
        done = frozenset(held)
        everything = (
            (regime, problem, shape, kernel)
            for regime in (self.regimes[:1] if self.confirms else self.regimes)
            for problem in (self.problems[:1] if self.kind == EXPLAIN and regime == SUSTAINED else self.problems)
            for shape in self._ordered_shapes()
            for kernel in self.kernels
        )
        return [step for step in everything if step not in done]

    def _ordered_shapes(self) -> list[Any]:
        shapes = list(self.shapes)
        if self.kind == SWEEP and self.options.order == SHUFFLED:
            random.Random(self.problem.seed).shuffle(shapes)
        return shapes


def require_regimes(plan: Any) -> None:
    """Raises UsageError for regimes, a precision or a budget that mean nothing."""
    require_some("regimes", plan.regimes, str)
    require_share("precision", plan.precision)
    if plan.budget_seconds is not None:
        require_seconds("budget_seconds", plan.budget_seconds)


def require_ceiling_regimes(names: Collection[str]) -> None:
    for name in names:
        require_known(("regime of a ceiling", name, CEILINGS))
