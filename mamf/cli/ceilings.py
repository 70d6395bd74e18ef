"""Find the ceilings that a command compares its rows (measurements) with. They come from the logs given with --ceiling,
or from searches before the run.

A ceiling is the highest confirmed rate of a device: of matmul in a dtype, or of reading memory. A share is the rate of
a row divided by a ceiling. A regime is a kind of load, such as short bursts of launches or sustained load.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from mamf.backend import Backend, CheckResult
from mamf.ceilings.ceiling import Ceiling, Ceilings, require_ceiling_of_card, require_known_interval
from mamf.ceilings.roof import (
    READ_BANDWIDTH_KEY,
    READ_PATTERN,
    get_ceiling_name,
)
from mamf.cli.resuming import make_contradiction_error
from mamf.cli.terminal import warn
from mamf.engine.estimate import choose_working_kernels
from mamf.engine.regimes import BurstRegime, SustainedRegime
from mamf.engine.search.grid import plan_search
from mamf.errors import DeviceError, PluginError, UnavailableError, UsageError
from mamf.logs.records import make_ceiling_record
from mamf.logs.roofs import find_read_bandwidths
from mamf.logs.run_log import RunLog, read_run_log
from mamf.machine.environment import SEARCH_TIME_CHECK
from mamf.measurement import find_rate, group_pairs
from mamf.operation import make_operation_plan
from mamf.operations.bandwidth.operation import (
    DEFAULT_CACHE_BYTES,
    MIN_ARRAYS_TO_CACHE_RATIO,
    BandwidthOperation,
    BandwidthShape,
)
from mamf.operations.matmul.operation import make_problem
from mamf.operations.unknown import get_operation
from mamf.plans import CEILING_REGIMES, FIND, Plan
from mamf.plugins.discovery import choose_kernels

#: How long one search for ceilings takes, in seconds, by two keys: whether the device is an accelerator, and the number
#: of regimes that the search measures: 1 (burst only) or 2 (burst and sustained). On a CPU, a search for 12 s finds a
#: burst ceiling that is 20 % too low.
_SEARCH_SECONDS = {(True, 1): 12.0, (True, 2): 57.0, (False, 1): 36.0, (False, 2): 114.0}
#: The minimum size of the array that mamf reads to find the read bandwidth of an accelerator. On an H200 in the burst
#: regime, reading 4 GiB reaches 99.2 % of the rate of reading 16 GiB, but reading 1 GiB reaches only 96.6 %. And the
#: maximum size on a CPU, where filling and checking 8 GiB takes 40 s.
_MIN_READ_ARRAY_BYTES, _MAX_CPU_READ_ARRAY_BYTES = 4 * 2**30, 4 * 2**30
#: All searches for ceilings together may use at most this share of the run's budget. The rest is for the rows.
_MAX_SEARCH_SHARE_OF_BUDGET = 0.5


def list_needed_ceiling_keys(plan: Plan) -> list[tuple[str, str]]:
    """List the ceilings that a report needs in order to show every rate of a plan as a share of a ceiling. Each item is
    a pair: a dtype (or READ_BANDWIDTH_KEY) and a regime.
    """
    names = [problem.dtype for problem in plan.problems]
    names += [READ_BANDWIDTH_KEY] if get_operation(plan.operation).shows_bandwidth_shares else []
    return [(name, regime) for name in dict.fromkeys(names) for regime in plan.regimes]


def read_given_ceilings(
    options: argparse.Namespace, needed_keys: Collection[tuple[str, str]], backend: Backend
) -> dict[tuple[str, str], Ceiling]:
    """Read the ceilings in the logs of ``--ceiling``, and return them by dtype (or READ_BANDWIDTH_KEY) and regime.

    Raises UsageError if a log has no ceiling or if one of ``needed_keys`` is missing. Raises IncomparableError if a
    ceiling is from another card than ``backend``, or if the interval of a needed ceiling is unknown.
    """
    ceilings_by_key: dict[tuple[str, str], Ceiling] = {}
    noisy_ceilings_by_key: dict[tuple[str, str], Ceiling] = {}
    for path in options.ceiling or ():
        log = read_run_log(path)
        ceilings_of_log = {**log.matmul_ceilings, **find_read_bandwidths(log, backend.info.cache_bytes)}
        if not ceilings_of_log:
            raise UsageError(
                f"{path}, given with --ceiling, has no ceiling: give a log of 'mamf find', or of 'mamf bandwidth "
                f"--pattern read' with arrays of at least "
                f"{BandwidthShape(MIN_ARRAYS_TO_CACHE_RATIO * (backend.info.cache_bytes or DEFAULT_CACHE_BYTES))}"
            )
        for key, ceiling in ceilings_of_log.items():
            require_ceiling_of_card(ceiling, backend)
            (ceilings_by_key if ceiling.interval.is_known else noisy_ceilings_by_key)[key] = ceiling
    for name, regime in needed_keys if options.ceiling else ():
        if find_rate(ceilings_by_key, name, regime) is None:
            if noisy_ceiling := find_rate(noisy_ceilings_by_key, name, regime):
                alternative = (
                    "give --no-ceiling instead of --ceiling" if "no_ceiling" in options else "leave out --ceiling"
                )
                require_known_interval(noisy_ceiling, alternative)
            raise UsageError(
                f"--ceiling {' '.join(map(str, options.ceiling))} has no {name} {regime} ceiling: add a log of 'mamf "
                f"{'bandwidth --pattern read' if name == READ_BANDWIDTH_KEY else 'find'}' that has one"
            )
    return ceilings_by_key


def require_same_ceilings(
    options: argparse.Namespace, log: RunLog, logged_plan: Plan, given_ceilings: Ceilings
) -> None:
    """Raise LogMismatchError if the options contradict the ceilings in the resumed log.

    ``log``, ``logged_plan``: the resumed log and its plan. ``given_ceilings``: the ceilings in the logs of --ceiling.
    """
    logged_ceilings, no_ceiling_text = log.matmul_ceilings, "no ceiling"
    logged_choice = (
        "a search for its own ceiling"
        if logged_plan.searches
        else "a given ceiling"
        if logged_ceilings
        else no_ceiling_text
    )
    if options.no_ceiling and logged_choice != no_ceiling_text:
        raise make_contradiction_error(options, "no_ceiling", logged_choice, True)
    if given_ceilings and not logged_ceilings:
        raise make_contradiction_error(options, "ceiling", logged_choice, options.ceiling)
    for key in given_ceilings.keys() & logged_ceilings.keys():
        if make_ceiling_record(given_ceilings[key]) != make_ceiling_record(logged_ceilings[key]):
            logged_choice = (
                f"a {' '.join(key)} ceiling of {logged_ceilings[key].tflops:.6g} TFLOPS at {logged_ceilings[key].shape}"
            )
            raise make_contradiction_error(options, "ceiling", logged_choice, options.ceiling)


def add_ceiling_searches(plan: Plan, backend: Backend) -> Plan:
    """Return a copy of the plan that first searches for the ceilings that its rows need.

    These are the matmul ceiling of each dtype and, if memory can limit the operation, the read bandwidth. Leave out
    ceilings that cannot be measured here, and warn about them.
    """
    regimes = CEILING_REGIMES if SustainedRegime.name in plan.regimes else (BurstRegime.name,)
    searches = []
    for dtype in dict.fromkeys(problem.dtype for problem in plan.problems):
        problem = make_problem(backend, dtype)
        try:
            kernel_name = choose_working_kernels(backend, problem)[0].name
        except (DeviceError, PluginError) as error:
            warn(f"cannot measure a {dtype} ceiling, so rows in this dtype show no share (MAMFU): {error}")
            continue
        search, _ = plan_search(
            backend,
            problem,
            [kernel_name],
            regimes=regimes,
            budget_seconds=_SEARCH_SECONDS[backend.is_accelerator, len(regimes)],
        )
        searches.append(search)
    if get_operation(plan.operation).shows_bandwidth_shares:
        try:
            searches.append(_plan_bandwidth_search(backend, regimes))
        except UnavailableError as error:
            warn(f"cannot measure the {READ_BANDWIDTH_KEY}, so rows show no share of it (MBU): {error}")
    return replace(plan, searches=tuple(searches))


def _plan_bandwidth_search(backend: Backend, regimes: tuple[str, ...]) -> Plan:
    """Plan a search for the read bandwidth in ``regimes``, with an array that does not fit in a cache. Raises
    UnavailableError on a CPU whose cache is so large that filling such an array takes long, or memory is too small.

    On an accelerator the array is several GiB large, because a longer pass over memory reaches a higher rate.
    """
    operation = BandwidthOperation()
    problem = operation.make_problem(backend, {"pattern": READ_PATTERN})
    shapes = [
        shape
        for shape in operation.choose_default_shapes(backend)
        if problem.is_served_by_memory(shape, backend.info.cache_bytes)
    ]
    if backend.is_accelerator:
        shapes = [shape for shape in shapes if shape.nbytes >= _MIN_READ_ARRAY_BYTES] or shapes[-1:]
    elif not shapes or shapes[0].nbytes > _MAX_CPU_READ_ARRAY_BYTES:
        raise UnavailableError(
            "it needs an array that takes long to fill, because the last-level cache is large; measure it with 'mamf "
            "bandwidth --pattern read', and give its log to --ceiling, together with a log of 'mamf find'"
        )
    kernels = [name for name, _ in choose_kernels(operation, backend)]
    return make_operation_plan(
        operation,
        kernels,
        [problem],
        shapes[:1] or operation.choose_default_shapes(backend)[-1:],
        regimes,
        FIND,
        budget_seconds=_SEARCH_SECONDS[backend.is_accelerator, len(regimes)],
    )


def divide_search_budget(budget_seconds: float | None, searches: Sequence[Plan]) -> list[Plan]:
    """Return copies of the searches that together take at most half of ``budget_seconds``, with equal time limits.
    Without a budget (None), return the searches unchanged.
    """
    if budget_seconds is None:
        return list(searches)
    seconds_per_search = _MAX_SEARCH_SHARE_OF_BUDGET * budget_seconds / max(1, len(searches))
    return [
        replace(search, budget_seconds=min(seconds_per_search, search.budget_seconds or seconds_per_search))
        for search in searches
    ]


def check_search_budgets(searches: Iterable[Plan], backend: Backend) -> list[CheckResult]:
    """Return warnings that the budget leaves some searches less than their usual time, so their ceilings may be too
    low. Return one warning for all searches that get the same time.
    """
    return [
        CheckResult(
            SEARCH_TIME_CHECK,
            "warning",
            f"--budget leaves only {seconds:.3g} of the usual "
            f"{_SEARCH_SECONDS[backend.is_accelerator, regime_count]:.0f} s for {' and '.join(names)}, so a ceiling "
            "may be too low, and shares of it too high",
            command="give a longer --budget",
        )
        for (seconds, regime_count), names in group_pairs(
            ((each.budget_seconds, len(each.regimes)), f"the {get_ceiling_name(each)} ceiling") for each in searches
        ).items()
        if seconds and seconds < _SEARCH_SECONDS[backend.is_accelerator, regime_count]
    ]
