"""The matmul ceilings that rows are shares of: those in given logs, and the searches that a run begins with."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace

from mamf.backend import Backend
from mamf.ceilings.ceiling import Ceiling, Ceilings, require_usable_ceiling
from mamf.cli.resuming import contradiction
from mamf.cli.terminal import warn
from mamf.engine.estimate import working_kernels
from mamf.engine.regimes import Burst, Sustained
from mamf.engine.search.grid import plan_for
from mamf.errors import DeviceError, PluginError, UsageError
from mamf.logs.records import ceiling_record
from mamf.logs.run_log import RunLog, read_run_log
from mamf.operations.matmul.operation import problem_for
from mamf.plans import Plan
from mamf.rate import find_rate
from mamf.regime_names import CEILINGS

#: Seconds to find the ceilings of a dtype, by their number: burst alone, or with sustained.
_SECONDS = {1: 12.0, 2: 57.0}
#: The share of a budget for all searches together: kernels need time too.
_SHARE_OF_BUDGET = 0.5


def wanted_ceilings(plan: Plan) -> list[tuple[str, str]]:
    """The ceilings that rows of a plan are shares of, by dtype and regime."""
    dtypes = dict.fromkeys(problem.dtype for problem in plan.problems)
    return [(dtype, regime) for dtype in dtypes for regime in plan.regimes]


def given_ceilings(
    options: argparse.Namespace, needed: Collection[tuple[str, str]], backend: Backend
) -> dict[tuple[str, str], Ceiling]:
    """The ceilings in the logs of ``--ceiling``. Raises UsageError for a log without any and for a missing one, and
    IncomparableError for another card.
    """
    found: dict[tuple[str, str], Ceiling] = {}
    for path in options.ceiling or ():
        log = read_run_log(path)
        if not log.all_ceilings:
            raise UsageError(f"{path} holds no ceiling: give a log of 'mamf find'")
        for ceiling in log.all_ceilings.values():
            require_usable_ceiling(ceiling, backend)
        found |= log.all_ceilings
    for dtype, regime in needed if options.ceiling else ():
        if find_rate(found, dtype, regime) is None:
            raise UsageError(f"no {dtype} {regime} ceiling in {', '.join(map(str, options.ceiling))}")
    return found


def require_repeated_ceilings(options: argparse.Namespace, log: RunLog, before: Plan, given: Ceilings) -> None:
    """Raises LogMismatchError for ceilings that differ from the log's."""
    held, none = log.all_ceilings, "no ceiling"
    own = "a search for its own ceiling" if before.searches else "a given ceiling" if held else none
    if options.no_ceiling and own != none:
        raise contradiction(options, "no_ceiling", own, True)
    if given and not held:
        raise contradiction(options, "ceiling", own, options.ceiling)
    for key in given.keys() & held.keys():
        if ceiling_record(given[key]) != ceiling_record(held[key]):
            own = f"a {' '.join(key)} ceiling of {held[key].tflops:.6g} TFLOPS at {held[key].shape}"
            raise contradiction(options, "ceiling", own, options.ceiling)


def add_searches(plan: Plan, backend: Backend) -> Plan:
    """Add a search for the ceilings of each dtype."""
    regimes = CEILINGS if Sustained.name in plan.regimes else (Burst.name,)
    searches = []
    for dtype in dict.fromkeys(problem.dtype for problem in plan.problems):
        problem = problem_for(backend, dtype)
        try:
            default = working_kernels(backend, problem)[0].name
        except (DeviceError, PluginError) as error:
            warn(f"no {dtype} ceiling can be measured, so its rows have no shares (MAMFU): {error}")
            continue
        search, _ = plan_for(backend, problem, [default], regimes=regimes, budget_seconds=_SECONDS[len(regimes)])
        searches.append(search)
    return replace(plan, searches=tuple(searches))


def limit_budgets(budget: float | None, searches: Sequence[Plan]) -> list[Plan]:
    """The searches, limited to the time that the run has for them."""
    if budget is None:
        return list(searches)
    part = _SHARE_OF_BUDGET * budget / max(1, len(searches))
    return [replace(search, budget_seconds=min(part, search.budget_seconds or part)) for search in searches]


def budget_warning(search: Plan) -> str | None:
    """A warning if the budget shortens a search."""
    usual = _SECONDS[len(search.regimes)]
    seconds = search.budget_seconds or usual
    if seconds >= usual:
        return None
    return (
        f"--budget leaves {seconds:.3g} of {usual:.0f} s to the search for the {search.problem.dtype} "
        "ceiling: it may be percents too low, and shares too high"
    )
