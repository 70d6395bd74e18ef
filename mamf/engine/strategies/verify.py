"""Verifies random problems until the budget ends. The kernel that had the least time so far is always next."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mamf.backend import Backend
from mamf.dtypes import OPERAND_DTYPES, canonical_name
from mamf.engine.regimes import StoppingRule, regime_class
from mamf.engine.runner import PlanStrategy, Step, Steps
from mamf.errors import UnavailableError, UsageError
from mamf.kernel import AnyKernel
from mamf.operation import plan_of
from mamf.operations.matmul.operation import problem_for
from mamf.operations.matmul.shapes import MatmulShape
from mamf.operations.unknown import operation_called
from mamf.plans import VERIFY, VERIFY_BUDGET_SECONDS, Plan, VerifyOptions
from mamf.plugins.discovery import OPERATIONS, find_registered, operation
from mamf.plugins.selection import choose_kernels, find_operation
from mamf.regime_names import CHECKING, LOADED

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
