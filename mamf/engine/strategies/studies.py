"""Chooses the steps of runs that compare kernels with a baseline, measure claims again or verify random problems."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mamf.backend import Backend
from mamf.ceilings.ceiling import CONFIRM, summarize_conditions
from mamf.dtypes import OPERAND_DTYPES, canonical_name
from mamf.engine.regimes import Regime, StoppingRule, regime_class
from mamf.engine.runner import PlanStrategy, Setup, Step, Steps
from mamf.engine.strategies.rows import RowsStrategy
from mamf.errors import UnavailableError, UsageError
from mamf.kernel import AnyKernel
from mamf.logs.entries import Entry, by_step, visited_entry
from mamf.logs.judging import DEFAULT_TOLERANCE, UNDECIDED, is_in_doubt, judge_claims
from mamf.measurement import Measurement
from mamf.operation import plan_of
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.unknown import operation_called
from mamf.plans import CHECKING, LOADED, VERIFY, VERIFY_BUDGET_SECONDS, Plan, StepKey, VerifyOptions
from mamf.plugins.discovery import OPERATIONS, choose_kernels, find_operation, find_registered, operation


class GuardStrategy(RowsStrategy):
    """Visits every row once, then visits rows in doubt again, up to the plan's rounds.

    ``baseline``: its entries by key; None makes a baseline, and then every row goes through all rounds.
    """

    def __init__(
        self, setup: Setup, baseline: Mapping[object, Entry] | None = None, tolerance: float = DEFAULT_TOLERANCE
    ) -> None:
        super().__init__(setup, replayed=[row for row in setup.rows if row.phase])
        self.baseline, self.tolerance = baseline, tolerance
        self._visits = by_step(row for row in setup.rows if not row.phase)

    def steps(self) -> Steps:
        left = frozenset(self.setup.steps)
        for name in self.plan.regimes:
            regime = self.run.start(self.regime(name))
            steps = [step for step in self.plan.steps() if step.regime == name]
            yield from self._visited(regime, [step for step in steps if step in left], "", 1)
            confirmation_regime = regime.confirmation_regime(summarize_conditions(self._measured(name)), math.inf)
            for number in range(1, self.plan.options.rounds + 1):
                doubtful = [step for step in steps if self._is_in_doubt(step)]
                if not doubtful:
                    break
                due = add_another_row(doubtful, steps)
                random.Random(f"{name} {number}").shuffle(due)
                yield from self._visited(confirmation_regime, due, CONFIRM, number)

    def _visited(self, regime: Regime, steps: Sequence[StepKey], phase: str, number: int) -> Steps:
        for step in steps:
            name, problem, shape, kernel = step
            progress = f"round {number} of at most {self.plan.options.rounds}" if phase else ""
            self.setup.on_phase(f"{name} {shape} {kernel} {progress}".rstrip())
            row = yield Step(self.kernels[kernel], problem, shape, regime, self.rule(regime), phase, number)
            if row is not None:
                self._visits.setdefault(self._key(step), []).append(row)

    def _measured(self, regime: str) -> list[Measurement]:
        return [row for visits in self._visits.values() for row in visits if row.ok and row.regime == regime]

    def _is_in_doubt(self, step: StepKey) -> bool:
        visits = self._visits.get(self._key(step))
        if not visits:
            return False
        if self.baseline is None:
            return visits[-1].ok
        before = self.baseline.get(visited_entry(visits).key)
        return before is not None and is_in_doubt(before, visits, self.tolerance)

    def _key(self, step: StepKey) -> StepKey:
        """The step with the kernel's own name, as in rows."""
        regime, problem, shape, kernel = step
        return StepKey(regime, problem, shape, self.kernels[kernel].name)


def add_another_row(due: Sequence[StepKey], steps: Sequence[StepKey]) -> list[StepKey]:
    """The due steps, plus another one if there is only one, so that no row is measured twice in succession."""
    others = [step for step in steps if step not in due]
    return [*due, *(others[-1:] if len(due) == 1 else ())]


#: The most visits to a claim.
_MAX_VISITS = 5


class ReproduceStrategy(RowsStrategy):
    """Measures the claims of a plan again."""

    def steps(self) -> Steps:
        self._seen, self._held = list(self.setup.rows), {(row.step, row.round) for row in self.setup.rows}
        for name in self.plan.regimes:
            yield from self._visits(self.run.start(self.regime(name)))

    def _visits(self, regime: Regime) -> Steps:
        # Claims take turns. Later visits follow a rest if the device would otherwise stay in one state.
        by_name = {kernel.name: kernel for kernel in self.kernels.values()}
        for visit in range(1, _MAX_VISITS + 1):
            judged = judge_claims(self.plan.options, self._seen)
            for step in [each.claim.step for each in judged if visit == 1 or each.verdict == UNDECIDED]:
                if step.regime == regime.name and (step, visit) not in self._held:
                    _, problem, shape, name = step
                    self.setup.on_phase(f"{regime.name} {shape} {name} {CONFIRM} {visit}")
                    row = yield Step(by_name[name], problem, shape, regime, self.rule(regime), CONFIRM, visit)
                    self._seen += [row] if row is not None else []
            seen = [row for row in self._seen if row.ok and row.regime == regime.name]
            regime = regime.confirmation_regime(summarize_conditions(seen), math.inf) if visit == 1 else regime


# Attempts to draw a problem that a kernel supports; and the most rows of a log: a longer budget makes visits longer.
_TRIES, _MAX_ROWS = 200, 5000
# The shortest visit to a problem that was requested by number.
_REPEAT_SECONDS = 1.0
# A problem that must load the device has at least this share of the most multiply-adds.
_LOADING_SHARE = 0.25


def draw_problem(backend: Backend, plan: Plan, kernel: AnyKernel, number: int, regime: str) -> tuple[Any, Any] | None:
    """Draw random problem ``number`` of a kernel, and its shape; None if the kernel supports none that the plan allows.

    The result depends only on the plan's seed and largest shape, the kernel, the number and the regime.
    """
    of, seed = operation_called(kernel.operation), plan.problem.seed + number
    chooser = random.Random(f"{seed} {kernel.name}")
    max_terms, allowed = plan.shapes[0].flop // 2, {problem.dtype for problem in plan.problems}
    terms = range(int(max_terms * _LOADING_SHARE) if regime == LOADED else 1, max_terms + 1)
    dtypes = [each for each in kernel.dtypes or OPERAND_DTYPES if each in allowed]
    for _ in range(_TRIES if dtypes else 0):
        dtype, case = chooser.choice(dtypes), of.random_case(chooser, terms)
        if case is None:
            continue
        shape = case.pop("shape")
        problem = of.problem_for(backend, {**case, "dtype": dtype, "seed": seed})
        if not (kernel.unsupported(backend, problem) or kernel.unsupported_shape(problem, shape)):
            return problem, shape
    return None


def kernels_to_verify(backend: Backend, names: Sequence[str] | None) -> dict[str, AnyKernel]:
    """The named kernels, of any operation; by default all that are available and do not compile for minutes."""
    groups: dict[str, list[str] | None] = {}
    for name in names or ():
        groups.setdefault(find_operation(name).name, []).append(name)  # type: ignore[union-attr]
    found = dict[str, AnyKernel]()
    for of, own in (groups or dict.fromkeys(find_registered(OPERATIONS))).items():
        with suppress(*(() if names else (UnavailableError,))):
            found |= choose_kernels(operation(of), backend, own)
    return {
        name: each
        for name, each in found.items()
        if names
        or (each.is_tried_unasked and operation(each.operation).random_case(random.Random(0), range(1, 2)) is not None)
    }


def verify_plan(
    backend: Backend,
    kernels: Mapping[str, AnyKernel],
    budget_seconds: float | None = None,
    dtypes: Sequence[str] | None = None,
    regimes: Sequence[str] = CHECKING,
    largest: MatmulShape | None = None,
    seed: int = 0,
    number: int = 0,
) -> Plan:
    """The plan of a verification. ``largest``: random problems have at most the FLOP of this shape."""
    names = dict.fromkeys(map(canonical_name, dtypes or OPERAND_DTYPES))
    problems = tuple(problem_for(backend, name, seed=seed) for name in names)
    size, budget = 4096 if backend.is_accelerator else 256, budget_seconds or VERIFY_BUDGET_SECONDS
    shape, own = largest or MatmulShape(size, size, size), sorted({each.operation for each in kernels.values()})
    options = VerifyOptions(number, tuple(own))
    of = operation_called(problems[0].operation)
    return plan_of(of, kernels, problems, [shape], regimes, VERIFY, budget_seconds=budget, options=options)


class VerifyStrategy(PlanStrategy):
    """Verifies random problems of the plan's kernels."""

    left_out = 0  # the end of the budget is the end of the run

    def steps(self) -> Steps:
        """Raises UsageError if no kernel has a problem to verify."""
        run, rows = self.run, self.setup.rows
        asked, budget = self.plan.options.number, self.plan.budget_seconds or VERIFY_BUDGET_SECONDS
        number, drawn = asked or 1 + max((row.round for row in rows), default=0), None
        seconds, repeats = max(budget / _MAX_ROWS, _REPEAT_SECONDS if asked else 0.0), len(rows)
        rule = StoppingRule(seconds=seconds)
        for index, name in enumerate(self.plan.regimes, 1):
            regime, spent = run.start(regime_class(name)(self.backend)), dict.fromkeys(self.setup.opened, 0.0)
            while spent and run.now() < run.begun + budget * index / len(self.plan.regimes):
                kernel, begun = min(spent, key=lambda each: spent[each]), run.now()
                found = draw_problem(self.backend, self.plan, kernel, number, name)
                if found is None:
                    del spent[kernel]
                    continue
                drawn, repeats = found, repeats + 1
                self.setup.on_phase(f"{name} {number} {kernel.name} {drawn[1]}")
                # A problem that was requested by number is verified repeatedly, with a row each time, until it fails.
                row = yield Step(kernel, *drawn, regime, rule, str(repeats) if asked else "", number)
                run.release_pools()  # each problem has its own seed
                # A kernel that fails immediately must not always be next.
                spent[kernel] = spent[kernel] + run.now() - begun if row and row.ok else max(spent.values())
                if asked and row and not row.ok:
                    del spent[kernel]
                number += not asked
            if not (spent or drawn):
                raise UsageError("no kernel has a random problem with these dtypes: add dtypes, or raise --largest")
