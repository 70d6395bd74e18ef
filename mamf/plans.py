"""What a run sets out to do, as data: which steps, in what order, within which budget."""

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
from mamf.operations.matmul.kernel import MatmulProblem
from mamf.operations.matmul.shapes import MatmulGrid, MatmulShape
from mamf.regimes.names import BURST, CEILINGS, CLASSIC, CLASSIC_WARMUP_SECONDS, SUSTAINED, require_regime

ORDERS = ("shuffled", "given")
DEFAULT_BUDGET_SECONDS = 57.0
QUICK_BUDGET_SECONDS = 20.0
#: Of all devices at once, which share the host: a little more than one alone has.
NODE_BUDGET_SECONDS = QUICK_BUDGET_SECONDS + 4.0
#: Regimes in which kernels of any operation are measured: those that a ceiling is of.
KERNEL_REGIMES = (BURST, SUSTAINED)

#: What a KernelsPlan is for.
ROWS, CEILINGS_OF_ITS_OWN, ROOFLINE, EXPLAIN, GUARD = "rows", "ceilings", "roofline", "explain", "guard"
#: Fresh visits of a row of a guard.
MOST_ROUNDS = 100

#: A shape in a regime: what a log holds, so that a resumed sweep can skip it.
Held = tuple[str, MatmulShape]
#: A kernel on a shape of a problem in a regime; the kernel as it was asked for.
Row = tuple[str, Any, Any, str]


@dataclass(frozen=True)
class Plan:
    """Everything a sweep needs to know, and all that resuming it needs.

    ``seconds`` limits a shape's measuring (None: the regime's own), ``budget_seconds`` the whole sweep. ``reference``
    is measured anew after every ``reference_every`` shapes, to show how far the device drifted. ``layers``: what each
    shape of a preset is.
    """

    shapes: tuple[MatmulShape, ...]
    problem: MatmulProblem
    regimes: tuple[str, ...] = ("burst",)
    order: str = "shuffled"
    precision: float = 0.003
    seconds: float | None = None
    budget_seconds: float | None = None
    warmup_launches: int = 50
    timed_launches: int = 100
    reference: MatmulShape | None = None
    reference_every: int = 100
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_some("shapes", self.shapes, MatmulShape)
        require_measuring(self)
        require_layers(self)
        require_steps(len(self.shapes), len(self.regimes))
        require_known(("order", self.order, ORDERS))
        for name in self.regimes:
            require_regime(name)
        if self.reference is not None and not isinstance(self.reference, MatmulShape):
            raise UsageError(f"reference {self.reference}: it must be a MatmulShape")
        whole_number("reference_every", self.reference_every)
        whole_number("warmup_launches", self.warmup_launches, 0)
        whole_number("timed_launches", self.timed_launches)
        if (
            CLASSIC in self.regimes
            and self.budget_seconds is not None
            and self.budget_seconds <= CLASSIC_WARMUP_SECONDS
        ):
            raise UsageError(f"classic warms up for {CLASSIC_WARMUP_SECONDS:.0f} s: give a --budget above that")

    def ordered_shapes(self) -> list[MatmulShape]:
        shapes = list(self.shapes)
        if self.order == "shuffled":
            random.Random(self.problem.seed).shuffle(shapes)
        return shapes

    def steps(self, held: Collection[Held] = ()) -> list[Held]:
        """What is left to measure, regime by regime, leaving out what ``held`` has."""
        done = frozenset(held)
        everything = [(regime, shape) for regime in self.regimes for shape in self.ordered_shapes()]
        return [step for step in everything if step not in done]

    def common(self) -> MatmulShape:
        """What devices that share the plan are compared on: its reference, else the shape of middling work."""
        return self.reference or sorted(self.shapes, key=lambda shape: shape.flop)[len(self.shapes) // 2]

    def measured_shapes(self) -> tuple[MatmulShape, ...]:
        return self.shapes if self.reference is None else (*self.shapes, self.reference)


@dataclass(frozen=True)
class FindPlan:
    """Everything a search for ceilings needs, and all that resuming it needs.

    ``kernels``: the first, the default, scouts; then shapes and kernels are searched together. ``scouts`` and
    ``refinements``: measurements, at most, on the grid and around its leaders, of all kernels together. ``priors``:
    shapes that are measured first. ``is_quick``: fewer rounds and visits.
    """

    problem: MatmulProblem
    kernels: tuple[str, ...]
    grid: MatmulGrid
    regimes: tuple[str, ...] = CEILINGS
    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    precision: float = 0.003
    scouts: int = 96
    refinements: int = 132
    priors: tuple[MatmulShape, ...] = ()
    is_quick: bool = False

    def __post_init__(self) -> None:
        require_some("kernels", self.kernels, str)
        require_measuring(self)
        whole_number("scouts", self.scouts)
        whole_number("refinements", self.refinements, 0)
        for name in self.regimes:
            require_known(("regime of a ceiling", name, CEILINGS))


@dataclass(frozen=True)
class KernelsPlan:
    """Everything a sweep of kernels of any operation needs, and all that resuming it needs.

    ``kernels``: as they were asked for (``package.module:Class`` for one tried without installing it). ``flush``: evict
    the operands between launches (burst). ``seconds`` limits a row's measuring, ``budget_seconds`` the whole run.
    ``searches``: for the ceiling of each dtype, before all rows; none where ceilings are given, or left out.
    ``confirms``: rows are measured in the first regime alone, and the best of each problem confirmed in all.
    ``explains``: the problems differ in their data alone; all are measured in burst, the first in sustained too.
    ``layers``: what each shape of a preset is.
    ``rounds``: of a guard, how often at most a row in doubt is visited afresh.
    """

    operation: str
    shapes: tuple[Any, ...]
    problems: tuple[Any, ...]
    kernels: tuple[str, ...]
    regimes: tuple[str, ...] = (BURST,)
    precision: float = 0.003
    seconds: float | None = None
    budget_seconds: float | None = None
    flush: bool = True
    searches: tuple[FindPlan, ...] = ()
    confirms: bool = False
    explains: bool = False
    layers: tuple[str, ...] = ()
    rounds: int = 0

    def __post_init__(self) -> None:
        require_some("shapes", self.shapes, object)
        require_some("problems", self.problems, object)
        require_some("kernels", self.kernels, str)
        require_measuring(self)
        require_layers(self)
        require_steps(*map(len, (self.shapes, self.problems, self.kernels, self.regimes)))
        whole_number("rounds", self.rounds, 0, MOST_ROUNDS)
        for problem in self.problems:
            whole_number("seed", problem.seed, 0, LARGEST_SEED)
        for name in self.regimes:
            require_regime(name)
            if name not in KERNEL_REGIMES:
                raise UsageError(
                    f"{self.operation} is measured in {' or '.join(KERNEL_REGIMES)}, not {name}: no ceiling is of it"
                )

    @property
    def purpose(self) -> str:
        """What its rows are for: ``rows`` themselves, ``ceilings`` of the operation, a ``roofline`` (of bandwidth, and
        of products by its searches), an ``explain`` (of one product), or a ``guard``.
        """
        if self.explains:
            return EXPLAIN
        if self.rounds:
            return GUARD
        if not self.confirms:
            return ROWS
        return ROOFLINE if self.searches else CEILINGS_OF_ITS_OWN

    def common(self, dtype: str) -> tuple[Any, Any]:
        """The problem and the shape of middling work that devices which share the plan are compared on."""
        problem = next(problem for problem in self.problems if problem.dtype == dtype)
        by_work = sorted(self.shapes, key=lambda shape: float(problem.work(shape).amount))
        return problem, by_work[len(by_work) // 2]

    def steps(self, held: Collection[Row] = ()) -> list[Row]:
        """What is left to measure; kernels of one shape follow one another."""
        done = frozenset(held)
        everything = (
            (regime, problem, shape, kernel)
            for regime in (self.regimes[:1] if self.confirms else self.regimes)
            for problem in (self.problems[:1] if self.explains and regime == SUSTAINED else self.problems)
            for shape in self.shapes
            for kernel in self.kernels
        )
        return [step for step in everything if step not in done]


AnyPlan = Plan | FindPlan | KernelsPlan


def require_layers(plan: Plan | KernelsPlan) -> None:
    """Raises UsageError where some shapes have a name and others none."""
    if plan.layers and len(plan.layers) != len(plan.shapes):
        raise UsageError(f"{len(plan.layers)} layers of {len(plan.shapes)} shapes: each shape has one, or none has")


def require_measuring(plan: AnyPlan) -> None:
    """What all plans say of measuring. Raises UsageError for what cannot be."""
    require_some("regimes", plan.regimes, str)
    require_share("precision", plan.precision)
    if plan.budget_seconds is not None:
        require_seconds("budget_seconds", plan.budget_seconds)
    if not isinstance(plan, FindPlan) and plan.seconds is not None:
        require_seconds("seconds", plan.seconds)
